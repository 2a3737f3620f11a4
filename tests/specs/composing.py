"""Files that are composed: what the tests of `extends`, `variables` and `matrix` share."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from specs.compose import expand
from specs.document import parse
from specs.errors import SpecError
from specs.pipeline import Pipeline
from specs.recipe import load

BASE = """\
name: base
sources:
  notes: {url: /nowhere, format: text}
stages:
  tokenizer: {kind: tokenizer, sources: [notes], vocab_size: 512}
  corpus: {kind: corpus, tokenizer: tokenizer, sources: {notes: {holdout: 0.2}}}
  main: {kind: mixture, weights: {corpus/notes: 1}}
  pretrain:
    kind: pretrain
    model: {flavour: mini}
    mixture: main
    sequence_length: 32
    global_batch_size: 4
    budget: 16 steps
    optimizer:
      lr: 1e-2
      weight_decay: 0.1
    goldfish: {k: 4}
  cooldown:
    kind: cooldown
    from: pretrain
    mixture: main
    budget: 6 steps
  export: {kind: export, from: cooldown}
"""

VARIANTS = """\
extends: base.yaml
stages:
  cooldown:
    optimizer:
      lr: fast
    matrix:
      short: {budget: 3 steps}
      long:
        budget: 9 bananas
        sequence_lenght: 1
  export:
    matrix: [short, long]
    from: cooldown-${matrix}
"""


def write(name: str, text: str) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return name


def errors(name: str, *overrides: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load(name, overrides)
    return str(caught.value).splitlines()


def data(text: str, *overrides: str) -> dict[str, Any]:
    """What a text becomes, without the models."""
    document = expand(parse(textwrap.dedent(text), "f.yaml"), overrides)
    assert document.problems == []
    return document.data


def problems(text: str, *overrides: str) -> list[str]:
    return [str(problem) for problem in expand(parse(textwrap.dedent(text), "f.yaml"), overrides).problems]


def stage(pipeline: Pipeline, name: str) -> Any:
    return pipeline.stages[name]
