"""Several sets: which pairs of each are trained on, and that training begins at the reference of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.store import Artifact, Attempt
from specs.errors import StageError
from specs.stages.preference_data import LogProbabilitiesPart
from tests.apertus_model.stages.training import SPEC, Stages, segment


def put_pairs(attempt: Attempt, prompts: list[str], seed: int) -> Artifact:
    """Pairs of random completions, one for each of the prompts."""
    random = np.random.default_rng(seed)
    lengths = random.integers(3, 6, 2 * len(prompts))
    arrays = {
        "tokens": random.integers(20, 120, lengths.sum()).astype(np.int32),
        "lengths": lengths.astype(np.int64),
        "prompt_lengths": np.full(2 * len(prompts), 2, np.int64),
        "rewards": random.random(2 * len(prompts)).astype(np.float32),
    }
    for name, array in arrays.items():
        np.save(attempt.workdir / f"{name}.npy", array)
        attempt.put(attempt.workdir / f"{name}.npy", f"{name}.npy")
    attempt.write_bytes("pairs.jsonl", "".join(f"{json.dumps({'id': one})}\n" for one in prompts).encode())
    attempt.commit(metrics={}, facts={"pad_id": 3, "pairs": len(prompts), "sequences": 2 * len(prompts)})
    return attempt.artifact


SETS = {"standard": ["a", "b", "b", "c"], "controversial": ["d", "c", "b", "e", "e"]}


def distinct(bench: Any, repeated: str, sets: dict[str, list[str]] = SETS) -> Artifact:
    pairs = {
        f"pairs:{number}": put_pairs(Attempt(bench.job("pairs", name)), prompts, number)
        for number, (name, prompts) in enumerate(sets.items())
    }
    return bench.run("distinct_prompts", "d", {"repeated_prompts": repeated, "names": list(sets)}, pairs)


def test_a_prompt_of_two_sets_is_an_error_that_names_both_and_the_fix(bench: Any) -> None:
    message = (
        r"'standard' and 'controversial' both have pairs of 2 prompts, such as c\. Fix: set repeated_prompts:"
        r" first, which keeps them in 'standard', or use other prompts"
    )
    with pytest.raises(StageError, match=message):
        distinct(bench, "error")


def test_sets_without_a_common_prompt_are_kept_whole(bench: Any) -> None:
    found = distinct(bench, "error", {"one": ["a", "a"], "two": ["b"]})
    assert [np.load(found.local(f"kept-{n}.npy")).tolist() for n in (0, 1)] == [[True, True], [True]]
    assert found.manifest.metrics == {"prompts": 2, "dropped": {"one": 0, "two": 0}}


def test_the_first_set_keeps_its_prompts(bench: Any) -> None:
    found = distinct(bench, "first")
    assert np.load(found.local("kept-0.npy")).tolist() == [True] * 4
    assert np.load(found.local("kept-1.npy")).tolist() == [True, False, False, True, True]
    assert found.manifest.metrics == {"prompts": 5, "dropped": {"standard": 0, "controversial": 2}}


def test_training_on_two_sets_begins_at_their_reference(tmp_path: Path) -> None:
    """Also where a row has pairs that are not trained on, and the sets have rows of other widths."""
    stages = Stages(tmp_path)
    stages.train("trained", SPEC)
    parent, inputs = stages.ref("pretrain/trained", 6), {}
    part = LogProbabilitiesPart(
        model=SPEC.model, sequence_length=20, precision={"param": "float32"}, batch_size=2
    )
    kept = Attempt(stages.job("distinct_prompts", "d"))
    for number, prompts in enumerate((["a"] * 12, ["b"] * 9)):
        name = f"set-{number}"
        put_pairs(stages.attempt("pairs", name), prompts, number)
        read = {"pairs": stages.ref(f"pairs/{name}"), "checkpoint": parent}
        stages.run("log_probabilities", name, part, inputs=read)
        inputs |= {
            f"pairs:{number}": read["pairs"],
            f"log_probabilities:{number}": stages.ref(f"log_probabilities/{name}"),
        }
        np.save(kept.workdir / "kept.npy", np.arange(len(prompts)) % 4 > 0)
        kept.put(kept.workdir / "kept.npy", f"kept-{number}.npy")
    kept.commit(metrics={})
    inputs |= {"distinct_prompts": stages.ref("distinct_prompts/d"), "parent": parent}
    spec = segment(
        "qrpo",
        seed=None,
        micro_batch_size=2,
        sequence_length=20,
        repeats=[2, 0.5],
        source_names=["standard", "controversial"],
    )
    trained = stages.run("qrpo", "both", spec, inputs=inputs)
    rows = [row for row in trained.history() if "loss" in row]
    assert (rows[0]["log_ratio_chosen"], rows[0]["log_ratio_rejected"]) == (0.0, 0.0)
    assert rows[-1]["log_ratio"] != 0.0
    epochs = trained.checkpoint(spec.end_step).facts["epochs"]
    assert epochs["standard"] == 4 * epochs["controversial"] > 0
