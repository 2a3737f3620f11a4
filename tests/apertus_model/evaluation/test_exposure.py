"""The exposure of canaries is their rank among what could have been drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torchtitan.distributed import ParallelDims

from apertus_model.data.corpora.planted import PlantedDocument, alternatives, secrets
from apertus_model.data.tokens.stream import Sample
from apertus_model.evaluation.exposure import ExposureTexts, exposure
from apertus_model.model.hf import to_hugging_face
from apertus_model.model.model import model_config
from apertus_model.progress import Progress
from apertus_model.trainer.config import parallelism_config
from apertus_model.trainer.evaluator import Evaluator
from specs.launch import Parallel
from specs.planted import Canaries
from specs.stages.memorisation import Exposure
from tests.apertus_model.harness import MODEL
from tests.apertus_model.model.theirs import their_config
from tests.machine import slow

CANARIES = Canaries(template="No. {number} is {secret}.", length=2, count=6)
DOCUMENTS = [
    PlantedDocument(
        name=str(number), bucket=(0, 4)[number % 2], text=CANARIES.text(number, secret), secret=secret
    )
    for number, secret in enumerate(secrets(CANARIES), start=1)
]
EOS = 2


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """More threads make the products of a tiny model slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("loss", "others", "bits"),
    [
        (1.0, [2.0, 3.0, 4.0], 2.0),  # the first of four: log2(4) - log2(1)
        (2.5, [1.0, 2.0, 3.0], math.log2(4 / 3)),
        (5.0, [1.0, 2.0, 3.0], 0.0),  # the last
        (1.0, [1.0, 1.0, 1.0], 0.0),  # alike: nothing was learnt
        (0.0, [1.0] * 1023, 10.0),
    ],
)
def test_exposure_is_that_of_the_rank_in_bits(loss: float, others: list[float], bits: float) -> None:
    assert exposure(loss, np.array(others)) == pytest.approx(bits)


def test_a_canary_that_was_never_seen_has_an_expected_exposure_of_one_bit_and_a_half() -> None:
    """Every rank among 1,024 is as likely as any other; 1 / ln 2 = 1.4427 in the limit."""
    others = np.arange(1, 1024)
    found = [exposure(rank + 0.5, others) for rank in range(1024)]
    assert np.mean(found) == pytest.approx(1 / math.log(2), abs=0.01)


def model() -> torch.nn.Module:
    built = model_config(MODEL, sequence_length=64, attention="sdpa", seed=7).build()
    built.init_weights()
    return built.eval()


def evaluator_of(built: torch.nn.Module) -> Evaluator:
    dims = ParallelDims.from_config(parallelism_config(Parallel()), 1)
    return Evaluator(built, dims, torch.device("cpu"), batch_size=16)


def encode(text: str) -> list[int]:
    return [1, *text.encode()]


@pytest.mark.parametrize("most", [40, slow(1000)])
def test_canaries_are_ranked_by_the_loss_that_transformers_computes(most: int) -> None:
    from transformers import ApertusForCausalLM

    built = model()
    with torch.no_grad():
        for weight in built.parameters():
            weight.mul_(3)  # far from uniform
    theirs = ApertusForCausalLM(their_config(MODEL)).eval()
    theirs.load_state_dict(to_hugging_face(dict(built.state_dict())))
    spec = Exposure(alternatives=most)
    texts = ExposureTexts(CANARIES, DOCUMENTS, spec, encode, EOS, row_multiple=8)
    assert texts.length == 16  # "No. 1 is 00." with both ends has 14 tokens
    metrics = texts.measure(evaluator_of(built), Progress(None))

    def loss(text: str) -> float:
        tokens = torch.tensor([[*encode(text), EOS]])
        with torch.no_grad():
            logits = theirs(tokens).logits.double()
        return float(torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum"))

    expected: dict[int, list[float]] = {0: [], 4: []}
    for number, document in enumerate(DOCUMENTS, start=1):
        assert document.secret is not None
        others = alternatives(CANARIES, number, document.secret, most, spec.seed)
        assert len(others) == min(most, 99)
        own = loss(document.text)
        rank = 1 + sum(loss(text) <= own for text in others)
        expected[document.bucket].append(math.log2((len(others) + 1) / rank))
    for bucket, values in expected.items():
        name = f"memorisation/exposure/{bucket}"
        assert metrics[name] == pytest.approx(np.mean(values))
        assert metrics[f"{name}/low"] <= metrics[name] <= metrics[f"{name}/high"]
    assert len(metrics) == 6


def test_canaries_that_were_learnt_by_heart_are_first_and_the_others_are_not() -> None:
    built = model()
    evaluator, optimizer = evaluator_of(built), torch.optim.Adam(built.parameters(), 1e-2)
    learnt = [[*encode(document.text), EOS] for document in DOCUMENTS if document.bucket]
    rows = [Sample(np.array(ids[:-1]), np.array(ids[1:]), np.arange(len(ids) - 1), 0) for ids in learnt]
    for _ in range(60):
        evaluator.gradient(rows)
        optimizer.step()
    texts = ExposureTexts(CANARIES, DOCUMENTS, Exposure(), encode, EOS, row_multiple=1)
    metrics = texts.measure(evaluator, Progress(None))
    assert metrics["memorisation/exposure/4"] == pytest.approx(math.log2(100))
    assert metrics["memorisation/exposure/0/high"] < 5
