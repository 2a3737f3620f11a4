"""The variants of the loss of fine-tuning: the formulas of the published code over the whole batch, whatever
the layout, the accumulation and the packing."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apertus_model.chat.encoder import PROMPT, TRAINED, UNTRAINED
from apertus_model.data.conversations.samples import ConversationSamples
from apertus_model.model.model import model_config
from specs.launch import Parallel
from specs.stages.sft import InverseRl, SftLoss
from tests.apertus_model.harness import MODEL, difference, losses, segment, train
from tests.machine import slow

LENGTH, PAD = 24, 3
VARIANTS = {
    "ln-plw": SftLoss(prompt_weight=0.25, length_normalised=True),
    "plw, by sequence": SftLoss(prompt_weight=0.25, average="conversations"),
    "ln-plw, by sequence": SftLoss(prompt_weight=0.25, length_normalised=True, average="conversations"),
    "irl": SftLoss(inverse_rl=InverseRl(weight=0.3, discount=0.9)),
    "irl, ln-plw": SftLoss(prompt_weight=0.25, length_normalised=True, inverse_rl=InverseRl()),
}


class Conversations:
    """Thirty conversations of a prompt, an answer, sometimes outputs of tools within it, and another turn."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self._masks = []
        for index in range(30):
            kinds = [PROMPT] * random.integers(2, 6) + [TRAINED] * random.integers(1, 4)
            kinds += [UNTRAINED] * (index % 3) + [TRAINED] * random.integers(1, 3)
            self._masks.append(np.array(kinds + [PROMPT, TRAINED] * (index % 2), np.uint8))
        self._tokens = [random.integers(10, 128, len(mask)) for mask in self._masks]
        self.lengths = np.array([len(mask) for mask in self._masks])

    def __len__(self) -> int:
        return len(self._masks)

    def tokens(self, index: int) -> Any:
        return self._tokens[index]

    def mask(self, index: int) -> Any:
        return self._masks[index]


class Rows:
    """Samples of these conversations, which note every index that was asked for."""

    def __init__(self, loss: SftLoss, packing: str = "best-fit") -> None:
        self.asked: list[int] = []
        options: Any = {"loss": loss, "packing": packing, "longer": "drop", "pad_id": PAD, "seed": 1}
        shards: Any = [Conversations()]
        self.samples = ConversationSamples(shards, [1], sequence_length=LENGTH, **options)

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self.samples[index]


def spec_of(name: str, **changes: Any) -> Any:
    return segment("sft", sequence_length=LENGTH, **VARIANTS[name].to_json(), **changes)


def by_formula(name: str, numbers: list[int]) -> tuple[float, float]:
    """Loss and norm of the gradient of some conversations, each by itself, as the published code has them:
    a row a conversation, the sums over prompts and answers of all rows (or of each) divided apart."""
    loss = VARIANTS[name]
    model = model_config(MODEL, sequence_length=LENGTH, attention="sdpa", seed=7).build()
    model.init_weights()
    data = Conversations()
    found = []
    for number in numbers:
        tokens = torch.from_numpy(data.tokens(number))
        logits = model(tokens[None], torch.arange(len(tokens))[None])[0].double()[:-1]
        terms = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
        if loss.inverse_rl is not None:
            value = logits.logsumexp(-1)
            following = torch.cat([value[1:], torch.zeros(1)])
            chosen = logits.gather(-1, tokens[1:, None])[:, 0]
            td = (value + (chosen - value) - loss.inverse_rl.discount * following) ** 2
            terms = terms + loss.inverse_rl.weight * td
        kinds = torch.from_numpy(data.mask(number)[1:])
        found.append((terms, (kinds == PROMPT).double(), (kinds == TRAINED).double()))

    def ratio(weight: Callable[[Any, Any], Any], rows: list[Any]) -> torch.Tensor:
        total = sum((terms * weight(p, a)).sum() for terms, p, a in rows)
        return total / sum(weight(p, a).sum() for _, p, a in rows)

    def of(rows: list[Any]) -> torch.Tensor:
        if loss.length_normalised:
            return ratio(lambda p, a: a, rows) + loss.prompt_weight * ratio(lambda p, a: p, rows)
        return ratio(lambda p, a: loss.prompt_weight * p + a, rows)

    result = of(found) if loss.average == "tokens" else torch.stack([of([row]) for row in found]).mean()
    result.backward()
    return result.item(), math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))


@pytest.fixture(scope="module", params=list(VARIANTS))
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """Two steps of one process that takes the whole batch at once."""
    name = request.param
    data: Any = partial(Rows, VARIANTS[name])
    return name, train(tmp_path_factory.mktemp("alone"), spec_of(name, end_step=2), data=data)[0]


def test_the_first_step_has_the_loss_and_the_gradient_of_the_published_formula(
    alone: tuple[str, Any],
) -> None:
    name, result = alone
    rows = Rows(VARIANTS[name])
    numbers = [number for index in range(4) for _, number in rows.samples.conversations(index)]
    assert len(numbers) > 4
    loss, norm = by_formula(name, numbers)
    row = result.rows[0]
    assert (row["loss"], row["grad_norm"]) == (pytest.approx(loss, rel=2e-6), pytest.approx(norm, rel=1e-5))


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "sharded and accumulated": (2, {"micro_batch_size": 1}),
    "vocabulary": (2, {"parallel": Parallel(tp=2)}),
    "context": (2, {"parallel": Parallel(cp=2), "micro_batch_size": 2}),
}


@pytest.mark.parametrize("layout", ["sharded and accumulated", slow("vocabulary"), "context"])
def test_layout_and_accumulation_change_neither_loss_nor_gradient(
    tmp_path: Path, alone: tuple[str, Any], layout: str
) -> None:
    name, reference = alone
    if layout == "context" and "irl" in name:
        pytest.skip("a plan refuses it")
    processes, changes = LAYOUTS[layout]
    data: Any = partial(Rows, VARIANTS[name])
    result = train(tmp_path, spec_of(name, end_step=2, **changes), processes=processes, data=data)[0]
    assert losses(result) == pytest.approx(losses(reference), rel=1e-5)
    assert [row["grad_norm"] for row in result.rows] == pytest.approx(
        [row["grad_norm"] for row in reference.rows], rel=1e-4
    )
    assert difference(result.weights, reference.weights) < 1e-4


@pytest.mark.parametrize("name", [slow("plw, by sequence"), "irl, ln-plw"])
def test_one_conversation_to_a_sequence_has_the_loss_of_the_same_ones(tmp_path: Path, name: str) -> None:
    """Padding counts nowhere."""
    data: Any = partial(Rows, VARIANTS[name], "none")
    spec = spec_of(name, end_step=1, packing="none", global_batch_size=6)
    result = train(tmp_path, spec, data=data)[0]
    samples = Rows(VARIANTS[name], "none").samples
    numbers = [number for index in range(6) for _, number in samples.conversations(index)]
    assert len(numbers) == 6
    loss, norm = by_formula(name, numbers)
    row = result.rows[0]
    assert (row["loss"], row["grad_norm"]) == (pytest.approx(loss, rel=2e-6), pytest.approx(norm, rel=1e-5))
