from __future__ import annotations

from pathlib import Path

import pytest

from apertus_model.evaluation.harness.run import finite, flat, metadata, seeds
from specs.stages.harness import Suite


def test_metrics_are_named_by_task_and_filter() -> None:
    results = {
        "t": {
            "alias": "t",
            "acc,none": 0.5,
            "acc_stderr,none": "N/A",
            "exact_match,strict": 1,
            "sample_len": 7,
            "bad,none": float("nan"),
            "8192,none": 0.25,
            "4096,none": -1,  # a length that was not asked
        }
    }
    assert flat(results) == {"t/acc": 0.5, "t/exact_match/strict": 1.0, "t/8192": 0.25}
    assert finite(results)["t"]["bad,none"] is None


def test_seeds_are_the_published_ones_or_the_stated_one() -> None:
    defaults = pytest.importorskip("lm_eval.defaults", reason="the extra `harness` is not installed")
    found = seeds(Suite(tasks=["x"]))
    assert found.pop("random_seed") == defaults.DEFAULT_RANDOM_SEED
    assert set(found) == {"numpy_random_seed", "torch_random_seed", "fewshot_random_seed"}
    assert set(found.values()) == {defaults.DEFAULT_OTHER_SEED}
    assert set(seeds(Suite(tasks=["x"], seed=5)).values()) == {5}


def test_tasks_that_write_prompts_are_told_the_tokenizer_and_the_lengths(tmp_path: Path) -> None:
    told = metadata(Suite(tasks=["ruler"], sequence_lengths=[4096, 8192]), tmp_path)
    assert told == {
        "pretrained": str(tmp_path),
        "tokenizer": str(tmp_path),
        "max_seq_lengths": [4096, 8192],
    }
