"""What a recipe may state about weights to learn, and about a mixture that uses them."""

from __future__ import annotations

from pathlib import Path

import pytest

from specs.recipe import load
from specs.stages.domain_weights import PARTS, DomainWeightsStage, in_parts
from tests.recipes import RECIPE, problems, write_recipe

LEARNED = (
    RECIPE.replace(
        "sources:\n",
        'sources:\n  pages: {{url: "{documents}", format: text, include: ["note-0*.txt"]}}\n'
        '  sums: {{url: "{documents}", format: text, include: ["note-1*.txt"]}}\n',
        1,
    ).replace("sources: {{notes: {{holdout: 0.2}}}}", "sources: {{notes: {{}}, pages: {{}}, sums: {{}}}}")
    + """\
  thirds:
    kind: mixture
    weights: {{corpus/notes: 1, corpus/pages: 1, corpus/sums: 1}}
    max_repetition: 100
  proxy:
    kind: domain_weights
    model: &small
      {{dim: 16, n_layers: 1, n_heads: 2, n_kv_heads: 1, head_dim: 8, ffn_dim: 32, vocab_size: 512}}
    mixture: thirds
    targets: [corpus/sums]
    sequence_length: 32
    global_batch_size: 6
    budget: 8 steps
    optimizer: {{name: adamw, lr: 1e-2}}
  learned: {{kind: mixture, learned: {{from: proxy}}, max_repetition: 100}}
  swapped:
    kind: mixture
    learned: {{from: proxy, sources: {{corpus/notes: corpus/pages, corpus/sums: corpus/notes}}}}
    max_repetition: 100
  large:
    kind: pretrain
    model: *small
    mixture: learned
    sequence_length: 32
    global_batch_size: 4
    budget: 8 steps
    optimizer: {{name: adamw, lr: 1e-2}}
"""
)


def test_the_stage_and_its_mixtures_are_read(tmp_path: Path) -> None:
    stages = load(write_recipe(tmp_path, LEARNED)).stages
    proxy = stages["proxy"]
    assert isinstance(proxy, DomainWeightsStage)
    assert [str(target) for target in proxy.targets] == ["corpus/sums"]
    assert (proxy.update.mu, proxy.update.largest, proxy.update.smoothing) == (0.01, 5.0, 0.0)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("stages.proxy.mixture={0 steps: thirds, 2 steps: thirds}", "weights are learned on one mixture"),
        ("stages.proxy.global_batch_size={0 steps: 6, 2 steps: 12}", "learned on one global_batch_size"),
        ("stages.proxy.anomalies.spike=skip", "so no step can be skipped; use anomalies: stop"),
        ("stages.proxy.mixture=null", "null is not text and not a mapping"),
        ("stages.proxy.optimizer.lr=null", "has no parent to take the learning rate from"),
        ("stages.proxy.optimizer.name=sophia", "needs cross-entropy over the tokens of a step, and not"),
        ("stages.proxy.update.mu=0", "0 is not above 0.0"),
        ("stages.proxy.update.smoothing=1", "1 is not below 1.0"),
        ("stages.proxy.targets=[corpus/sums, corpus/sums]", "a part is repeated"),
        ("stages.proxy.targets=[corpus/sun]", "corpus 'corpus' has no part 'sun'"),
        (
            "stages.proxy.launch={processes: 2, parallel: {pp: 2}}",
            "it needs a separate gradient",
        ),
        ("stages.learned.weights={corpus/notes: 1}", "a mixture has either weights"),
        ("stages.learned.learned=null", "a mixture has either weights"),
        ("stages.learned.anneal={to: {corpus/notes: 1}, over: 2 steps}", "set weights in place of learned"),
        ("stages.learned.learned.from=pretrain", "stage 'pretrain' is a pretrain; domain_weights is needed"),
        ("stages.learned.learned.from=prox", "there is no stage 'prox'. Fix: did you mean 'proxy'?"),
        ("stages.swapped.learned.sources={corpus/notes: corpus/page}", "has no part 'page'"),
        ("stages.cooldown.from=proxy", "stage 'proxy' is a domain_weights; one of"),
        ("stages.thirds.weights={learned: 1}", "the stages form a cycle"),
    ],
)
def test_mistakes_are_refused_with_place_and_reason(tmp_path: Path, override: str, told: str) -> None:
    found = problems(write_recipe(tmp_path, LEARNED), override)
    assert told in found


def test_weights_become_whole_parts_of_which_none_is_lost() -> None:
    assert in_parts([0.5, 0.4999999, 1e-9]) == [PARTS // 2, 500_000, 1]
