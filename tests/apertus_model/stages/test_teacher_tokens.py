"""What a teacher predicts, stored: the samples are those of the training that reads them, and all words but
one are as good as a teacher beside the student."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apertus_model.data.tokens.teacher_tokens import StoredPredictions
from apertus_model.stages.training_data import OtherDataError, open_data
from infra.store import Artifact, StoreError
from specs.settings import Precision
from specs.stages.distill import DistillLoss, TeacherTokensPart
from tests.apertus_model.harness import MODEL, segment
from tests.apertus_model.stages.training import SPEC, Stages, weights_of

LARGER = MODEL.model_copy(update={"dim": 48, "n_layers": 3, "n_heads": 6, "ffn_dim": 96})
LOSS = DistillLoss(temperature=2.0, weight=0.5)
MOST = MODEL.vocab_size - 1
SAMPLES = 24


def part(top_k: int, **changes: Any) -> TeacherTokensPart:
    fields: dict[str, Any] = {"first_sample": 4, "samples": SAMPLES, "temperature": LOSS.temperature}
    fields |= {"model": LARGER, "sequence_length": 16, "precision": Precision(param="float32")}
    return TeacherTokensPart(**{**fields, "batch_size": 3, "samples_per_unit": 10, "top_k": top_k, **changes})


def distilled(top_k: int | None) -> Any:
    data = {"sample_offset": 4, "source_names": ["steady", "striding"], "goldfish": {"k": 5, "h": 3}}
    fields = {"teacher": LARGER, "loss": LOSS, "top_k": top_k, "validation": {"interval": 3, "samples": 2}}
    return segment("distill", **data, **fields)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """A store with a teacher, and what it predicts: all words but one, and the two most likely ones."""
    stages = Stages(tmp_path_factory.mktemp("stages"))
    stages.train("teacher", SPEC.model_copy(update={"model": LARGER, "end_step": 3}))
    for top_k in (MOST, 2):
        store(stages, f"top-{top_k}", part(top_k))
    return stages


def store(stages: Stages, name: str, spec: TeacherTokensPart, **options: Any) -> Artifact:
    inputs = {"checkpoint": stages.ref("pretrain/teacher", 3), "mixture": stages.ref("mixture/mixture")}
    return stages.run("teacher_tokens", name, spec, inputs=inputs, **options)


def distill(stages: Stages, name: str, top_k: int | None, predicted: str = "", **fields: Any) -> Artifact:
    spec = distilled(top_k)
    teacher = stages.ref(f"teacher_tokens/{predicted}") if top_k else stages.ref("pretrain/teacher", 3)
    inputs = {"mixture": stages.ref("mixture/mixture"), "teacher": teacher}
    return stages.run("distill", name, spec, inputs=inputs, **fields)


def rows_of(artifact: Artifact) -> list[dict[str, Any]]:
    return [row for row in artifact.history() if "loss" in row]


def test_all_words_but_one_are_as_good_as_a_teacher_beside_the_student(stages: Stages) -> None:
    stored, beside = distill(stages, "stored", MOST, f"top-{MOST}"), distill(stages, "beside", None)
    for name in ("loss", "divergence", "cross_entropy", "grad_norm"):
        found, expected = ([row[name] for row in rows_of(run)] for run in (stored, beside))
        assert found == pytest.approx(expected, rel=2e-5), name
    few = rows_of(distill(stages, "few", 2, "top-2"))
    assert few[0]["divergence"] < rows_of(beside)[0]["divergence"]
    assert few[0]["cross_entropy"] == pytest.approx(rows_of(beside)[0]["cross_entropy"])


def test_an_interrupted_student_has_the_same_bits_and_refuses_other_predictions(stages: Stages) -> None:
    whole = distill(stages, "whole", 2, "top-2")
    distill(stages, "cut", 2, "top-2", stop_after=3)
    with pytest.raises(RuntimeError, match=OtherDataError.__name__):
        distill(stages, "cut", 2, f"top-{MOST}", attempt="other", resume_step=3)
    resumed = distill(stages, "cut", 2, "top-2", attempt="second", resume_step=3)
    assert weights_of(resumed, 6) == weights_of(whole, 6)


def test_units_ranks_and_batches_change_no_bit(stages: Stages) -> None:
    expected = Artifact(stages.store, "teacher_tokens/top-2")
    other = store(stages, "other", part(2, samples_per_unit=7, batch_size=2), processes=2)
    assert [len(one.manifest.facts["files"]) for one in (expected, other)] == [3, 4]
    assert joined(other) == joined(expected)
    assert expected.manifest.metrics == {"samples": SAMPLES, "tokens": SAMPLES * 16}


def joined(artifact: Artifact) -> bytes:
    return b"".join(artifact.bytes(name) for name in artifact.manifest.facts["files"])


def test_samples_are_those_of_the_mixture_and_no_others_are_stored(stages: Stages) -> None:
    inputs = {"mixture": stages.ref("mixture/mixture"), "teacher": stages.ref("teacher_tokens/top-2")}
    taught = open_data(stages.store, inputs, distilled(2)).samples
    plain = open_data(stages.store, inputs, distilled(None)).samples
    for index in (4, 4 + SAMPLES - 1):
        own, other = taught[index], plain[index]
        assert all(np.array_equal(getattr(own, name), getattr(other, name)) for name in ("input", "labels"))
        found: Any = own
        assert found.teacher_words.shape == (16, 2) and found.teacher_log_p.shape == (16, 3)
        np.testing.assert_allclose(np.exp(found.teacher_log_p).sum(-1), 1, rtol=1e-6)
    assert taught.epochs(10) == plain.epochs(10)
    stored = StoredPredictions(Artifact(stages.store, "teacher_tokens/top-2"), None)
    assert np.array_equal(stored[4].words, taught[4].teacher_words)  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match="has the samples 4 to 27, not 28"):
        stored[4 + SAMPLES]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2, "cp_load_balancer": "head-tail"}], ids=str)
def test_other_layouts_predict_the_same(stages: Stages, layout: dict[str, Any], tmp_path: Path) -> None:
    name = "-".join(map(str, layout))
    found = store(stages, name, part(2, parallel=layout), processes=2)
    own, other = (np.frombuffer(joined(one), "<i4").reshape(SAMPLES, -1) for one in
                  (found, Artifact(stages.store, "teacher_tokens/top-2")))  # fmt: skip
    assert (own[:, :32] == other[:, :32]).mean() > 0.99, "words, but for ties"
    np.testing.assert_allclose(
        own[:, 32:].copy().view("<f4"), other[:, 32:].copy().view("<f4"), rtol=1e-4, atol=1e-5
    )
