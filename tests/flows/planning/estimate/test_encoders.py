"""What embedding and scoring documents by a model takes, by hand and beside torch's own count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flows.planning.estimate.corpus_work import DOCUMENT_BYTES, PERCEPTRON_FLOPS, RATES
from flows.planning.plan import Plan
from tests.apertus_model.encoders import write_encoder
from tests.flows.conftest import finish
from tests.flows.planning.parts.test_classifier import Scored, mlp, scored
from tests.recipes import CLUSTER

__all__ = ["scored"]
SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3}
TOKENS = 64
ABSENT = ("sources.web.url=absent", "sources.web.declared={tokens: 1G tokens, documents: 2_000_000}")
BOTH = tuple(
    text
    for name in ("good", "bad")
    for text in (
        f"sources.{name}.url=absent-{name}",
        f"sources.{name}.declared={{tokens: 1G tokens, documents: 1_000_000}}",
    )
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder") / "e", labels=2, positions=TOKENS + 11, **SIZES)


def _passes(folder: Path, sequence: int) -> int:
    """Operations that torch counts in one forward pass."""
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros((1, sequence), dtype=torch.long))
    return int(counter.get_total_flops())


def _inference(plan: Plan) -> dict[str, dict[str, Any]]:
    stages = plan.to_json()["estimates"]["inference"].values()
    return {part["name"]: part for stage in stages for part in stage["parts"]}


def test_an_encoder_takes_the_operations_of_its_layers(scored: Scored, encoder: Path) -> None:
    training = mlp(encoder, max_tokens=TOKENS)
    plan = scored(CLUSTER, *ABSENT, *BOTH, "stages.quality.reference=null", training=training)
    found = _inference(plan)
    assert set(found) == {"quality/good", "quality/bad", "corpus/web/scores-1"}
    # 500 and 1,000 tokens a document, of which 64 are read
    assert [found[name]["requests"] for name in found] == [1_000_000, 1_000_000, 2_000_000]
    assert {part["tokens_source"] for part in found.values()} == {"declared"}
    part = found["corpus/web/scores-1"]
    assert part["read_tokens"] == 2_000_000 * TOKENS
    assert part["flops"] / 2_000_000 == pytest.approx(_passes(encoder, TOKENS), rel=0.06)
    assert part["gpus"] == 2 and part["gpu_hours"] > 0  # those of a node
    totals = plan.estimates.totals()
    assert totals["flops"] == sum(part["flops"] for part in found.values())
    assert totals["gpu_hours"] == pytest.approx(sum(part["gpu_hours"] for part in found.values()))


def test_short_documents_are_read_whole_and_stored_numbers_win(scored: Scored, encoder: Path) -> None:
    folder = f"{{url: '{encoder}', label: LABEL_1, max_tokens: {TOKENS}}}"
    filter_ = f"{{filter: score, model: {folder}, max: 0.9}}"
    short = "sources.web.declared={tokens: 40M tokens, documents: 2_000_000}"
    plan = scored(*ABSENT, short, filter_=filter_)
    part = _inference(plan)["corpus/web/scores-1"]
    assert part["read_tokens"] == 2_000_000 * 20
    assert part["flops"] / 2_000_000 == pytest.approx(_passes(encoder, 20), rel=0.06)
    here = scored(filter_=filter_)
    assert _inference(here)["corpus/web/scores-1"]["tokens_source"] == "files"
    finish(here, metrics={"documents": 7})
    part = _inference(scored(filter_=filter_))["corpus/web/scores-1"]
    assert (part["requests"], part["tokens_source"]) == (7, "measured")


def test_an_encoder_that_is_unavailable_is_not_counted(scored: Scored, tmp_path: Path) -> None:
    training, assumed = mlp(tmp_path / "nowhere"), f"assumed_inputs: {{files: ['{tmp_path}/nowhere']}}"
    found = _inference(scored(training=training, assumed=assumed))
    assert {part["not_counted"] for part in found.values()} == {"the sizes of the encoder (config.json)"}


def test_fasttext_takes_hours_of_a_core(scored: Scored) -> None:
    """Nine tenths of `good` and `bad` are trained on five times, and `web` is scored once."""
    plan = scored(*ABSENT, *BOTH)
    corpora = plan.to_json()["estimates"]["corpora"]
    training = 0.9 * 2 * 4e9 * 5 / RATES["fasttext-training"]
    assert corpora["quality"]["core_hours"] == pytest.approx(training / 3600)
    own = {part["name"]: part["core_hours"] for part in corpora["corpus"]["parts"]}
    assert own["corpus/web/scores-1"] == pytest.approx(4e9 / RATES["fasttext"] / 3600)
    assert plan.estimates.totals()["core_hours"] == pytest.approx(training / 3600 + sum(own.values()))
    assert not _inference(plan)
    few = scored(*ABSENT, *BOTH, "sources.good.declared={documents: 10}").to_json()["estimates"]["corpora"]
    assert few["quality"]["text_bytes"] == 4e9 + 10 * DOCUMENT_BYTES


def test_a_perceptron_is_trained_by_a_core(scored: Scored, encoder: Path) -> None:
    training = json.loads(mlp(encoder, max_tokens=TOKENS)) | {"hidden": 32, "epochs": 4}
    plan = scored(*ABSENT, *BOTH, training=json.dumps(training))
    found = plan.to_json()["estimates"]["corpora"]["quality"]
    operations = 6 * (128 * 32 + 32 * 2) * 0.9 * 2_000_000 * 4
    assert found["core_hours"] == pytest.approx(operations / PERCEPTRON_FLOPS / 3600)
