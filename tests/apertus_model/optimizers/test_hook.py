"""An optimizer that the trainer has never heard of gets the pass that it wants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from apertus_model.losses.cross_entropy import LastStates, cross_entropy
from apertus_model.optimizers import registry
from apertus_model.optimizers.hook import Hooked
from specs.launch import Parallel
from specs.optimizer import OptimizerSpec
from tests.apertus_model.harness import segment, train
from tests.machine import slow

NOTES = ("passes", "extra", "last")


def own_loss(states: LastStates, **batch: Any) -> Tensor:
    return cross_entropy(states, batch["denominator"], batch["weights"])


class EveryOtherStep(Hooked):
    """Notes the gradients of a pass with the step's own loss, in the steps 1, 3, 5, and those of the last
    step."""

    def __init__(self, params: Any, lr: float = 1e-3, **unused: Any) -> None:
        super().__init__(params, {"lr": lr})

    def before_step(self, step: int, extra_pass: Any) -> None:
        if self.state[self.param_groups[0]["params"][0]]["steps"].item() % 2:
            return
        extra_pass(own_loss)
        with torch.no_grad():
            for state, gradient in self._noted():
                state["passes"] += 1
                state["extra"].copy_(gradient)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for state, gradient in self._noted():
            state["steps"] += 1
            state["last"].copy_(gradient)

    def _noted(self) -> list[tuple[dict[str, Tensor], Tensor]]:
        found = []
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {name: torch.zeros_like(parameter) for name in NOTES} | {
                        "steps": torch.zeros(())
                    }
                found.append((state, parameter.grad))
        return found


@pytest.mark.parametrize(
    ("processes", "parallel"), [(1, Parallel()), slow(2, Parallel()), (2, Parallel(cp=2))]
)
def test_the_extra_gradients_are_those_of_the_whole_batch(
    processes: int, parallel: Parallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.CONSTRUCTORS, "adamw", EveryOtherStep)
    spec = segment(
        optimizer=OptimizerSpec(name="adamw", lr=1e-3, grad_clip=1e9).resolved({}),
        end_step=3,
        micro_batch_size=1,
        parallel=parallel,
    )
    notes = train(tmp_path, spec, processes=processes, states=True)[0].optimizer
    names = {name.rsplit(".", 1)[0] for name in notes}
    assert len(names) > 3
    for name in names:
        passes, extra, last = (notes[f"{name}.{note}"] for note in NOTES)
        assert torch.equal(passes, torch.full_like(passes, 2))
        assert last.abs().max() > 0
        torch.testing.assert_close(extra, last, rtol=1e-4, atol=1e-6)
