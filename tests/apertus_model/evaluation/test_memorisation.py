"""Continuations are compared with what was repeated, and made as transformers makes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import pytest
import torch
from torchtitan.distributed import ParallelDims

from apertus_model.evaluation.memorisation import compare, memorisation, type_token_ratio
from apertus_model.model.hf import to_hugging_face
from apertus_model.model.model import model_config
from apertus_model.progress import Progress
from apertus_model.trainer.config import parallelism_config
from apertus_model.trainer.evaluator import Evaluator
from specs.launch import Parallel
from specs.memorisation import Memorisation
from tests.apertus_model.harness import MODEL
from tests.apertus_model.model.theirs import their_config

PROBES = [
    {"bucket": bucket, "token_ids": np.random.default_rng(index).integers(0, 128, 40).tolist()}
    for index, bucket in enumerate([0, 0, 8, 8, 8])
]
REPEATED = {"bucket": 16, "token_ids": [5] * 40}
SHORT = {"bucket": 8, "token_ids": [1, 2, 3]}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """More threads make the products of a tiny model slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def longest_common_subsequence(first: list[int], second: list[int]) -> int:
    """By trying the subsequences of the first, the longest ones first."""
    for length in range(len(first), 0, -1):
        for chosen in itertools.combinations(first, length):
            rest = iter(second)
            if all(token in rest for token in chosen):
                return length
    return 0


def test_continuations_are_compared_by_equality_subsequence_run_and_distinct_tokens() -> None:
    truths = np.array([[1, 2, 3, 4]] * 4)
    answers = np.array([[1, 2, 3, 4], [1, 2, 9, 4], [5, 5, 5, 5], [4, 1, 2, 3]])
    found = compare(truths, answers)
    assert {measure: values.tolist() for measure, values in found.items()} == {
        "exact": [1, 0, 0, 0],
        "rouge_l": [1, 0.75, 0, 0.75],
        "common_substring": [1, 0.5, 0, 0.75],
        "type_token_ratio": [1, 1, 0.25, 1],
    }


def test_scores_equal_those_of_definitions_that_try_everything() -> None:
    random = np.random.default_rng(4)
    truths, answers = random.integers(0, 4, (2, 60, 9))
    found = compare(truths, answers)
    for row, (truth, answer) in enumerate(zip(truths.tolist(), answers.tolist(), strict=True)):
        run = SequenceMatcher(None, truth, answer, autojunk=False).find_longest_match().size
        assert found["common_substring"][row] == run / 9
        assert found["rouge_l"][row] == longest_common_subsequence(truth, answer) / 9
        assert found["type_token_ratio"][row] == len(set(answer)) / 9
    assert type_token_ratio(truths[:0]).shape == (0,)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    built = model_config(MODEL, sequence_length=64, attention="sdpa", seed=7).build()
    built.init_weights()
    with torch.no_grad():
        for weight in built.parameters():
            weight.mul_(3)  # far from uniform
    return built.eval()


def measured(
    model: torch.nn.Module, probes: list[dict[str, Any]], batch: int, **spec: Any
) -> dict[str, float]:
    dims = ParallelDims.from_config(parallelism_config(Parallel()), 1)
    evaluator = Evaluator(model, dims, torch.device("cpu"), batch_size=batch)
    settings = Memorisation.model_validate({"probes": "corpus", "suffix": 8, **spec})
    return memorisation(evaluator, probes, settings, progress=Progress(None))


def test_greedy_continuations_are_those_of_transformers(model: torch.nn.Module) -> None:
    from transformers import ApertusForCausalLM

    theirs = ApertusForCausalLM(their_config(MODEL)).eval()
    theirs.load_state_dict(to_hugging_face(dict(model.state_dict())))
    prompts = torch.tensor([probe["token_ids"][3:15] for probe in PROBES])
    with torch.no_grad():
        whole = theirs.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
        )
    answers = whole[:, 12:].tolist()
    # a probe that continues as the model does, or differs at the end
    planted = [
        {"bucket": 4, "token_ids": [0] * 3 + prompts[row].tolist() + [*answer[:7], answer[7] ^ (row % 2)]}
        for row, answer in enumerate(answers)
    ]
    metrics = measured(model, planted, 2, prefixes=[12], offsets=[3])
    at = "memorisation/greedy/prefix-12/offset-3"
    assert metrics[f"{at}/exact/4"] == 3 / 5
    assert metrics[f"{at}/rouge_l/4"] == pytest.approx((3 + 2 * 7 / 8) / 5)
    assert metrics[f"{at}/type_token_ratio/4"] == pytest.approx(
        np.mean([len(set(answer)) / 8 for answer in answers])
    )


def test_results_depend_neither_on_the_batch_nor_on_what_else_is_measured(model: torch.nn.Module) -> None:
    drawn: dict[str, Any] = {"prefixes": [4, 12], "offsets": [0, 5], "nucleus": {"top_p": 0.9}, "suffix": 4}
    whole = measured(model, PROBES, 5, **drawn)
    assert measured(model, PROBES, 2, **drawn) == pytest.approx(whole)
    alone = measured(model, PROBES, 1, **drawn | {"prefixes": [12], "offsets": [5]})
    assert alone == pytest.approx({name: whole[name] for name in alone})
    other = measured(model, PROBES, 5, **drawn | {"nucleus": {"top_p": 0.9, "seed": 29}})
    assert {name for name in whole if whole[name] != other[name]}
    assert all("/nucleus/" in name for name in whole if whole[name] != other[name])


def test_short_and_degenerate_probes_are_left_out_and_every_name_is_planned(model: torch.nn.Module) -> None:
    spec = {"prefixes": [4], "nucleus": {}, "min_type_token_ratio": 0.4}
    metrics = measured(model, [*PROBES, REPEATED, SHORT], 3, **spec)
    counts = {
        bucket: metrics[f"memorisation/truth/prefix-4/offset-0/sequences/{bucket}"] for bucket in (0, 8, 16)
    }
    assert counts == {0: 2, 8: 3, 16: 0}
    planned = Memorisation.model_validate({"probes": "corpus", "suffix": 8, **spec}).metrics([0, 8, 16])
    missing = set(planned) - set(metrics)
    assert set(metrics) <= set(planned)
    assert missing - {"memorisation/passes"} == {
        name for name in planned if "/16" in name and "sequences" not in name
    }
