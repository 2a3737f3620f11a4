"""Runs the same tokens through this model and transformers' `ApertusForCausalLM`, by module, in float32.

Only the weights of one module (`apertus_model.model.hf_folder`) are in memory, so that the logits of a model
of any size can be compared.

Invariant: each side computes with its own code and its own hidden states, from the embedding to the logits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from apertus_model.model.attention import KeysValues, document_mask
from apertus_model.model.hf import to_hugging_face
from apertus_model.model.hf_classes import keys_values, model_class
from apertus_model.model.model import empty_model
from apertus_model.model.rotation import rope_config
from specs.model import ModelSpec


class SideBySide:
    """Hidden states of both sides, `ours` and `theirs`: first the tokens (batch, seq_len), or hidden states
    (batch, seq_len, dim) float32 to begin at a layer; at the end the logits. `their_config`: as transformers
    reads it."""

    def __init__(self, spec: ModelSpec, their_config: Any, tokens: torch.Tensor) -> None:
        self.ours = self.theirs = tokens
        length = tokens.shape[1]
        self._loaded: dict[int, tuple[Any, Any]] = {}  # layers that later steps of a schedule run
        self._kept: dict[int, KeysValues] = {}
        self._positions = torch.arange(length).expand(tokens.shape[:2])
        self._mask = document_mask(self._positions)
        self._rope = rope_config(spec, length).build()
        self._model: Any = empty_model(spec, length)
        with torch.device("meta"):
            self._other = model_class(spec)(their_config).float().eval()
        self._their_kept = None if spec.plain_stack else keys_values()
        self._their_head = "score" if spec.head == "reward" else "lm_head"
        rotary = type(self._other.model.rotary_emb)(their_config)
        self._angles = rotary(torch.empty(0), position_ids=self._positions[:1])

    @torch.no_grad()
    def advance(self, name: str, weights: Mapping[str, torch.Tensor]) -> float:
        """Runs both sides through one module; with a schedule, through every step whose layers are loaded.
        Returns the largest absolute difference of their outputs. `name`: `tok_embeddings`, `layers.3`, `norm`
        or `lm_head`; or, before the layers, `schedule`, of which only the weights are kept, and for which 0
        is returned. `weights`: float32, by our names; both sides read the same memory."""
        if name == "schedule":
            _assign(self._model.schedule, name, weights)
            _assign(self._other.model.schedule, f"model.{name}", to_hugging_face(weights))
            return 0.0
        layer = name.startswith("layers.")
        path = f"model.{name.replace('tok_embeddings', 'embed_tokens')}"
        path = self._their_head if name == "lm_head" else path
        ours, theirs = self._model.get_submodule(name), self._other.get_submodule(path)
        _assign(ours, name, weights)
        _assign(theirs, path, to_hugging_face(weights))
        if layer and self._model.schedule is not None:
            self._loaded[int(name.removeprefix("layers."))] = ours, theirs
            self._run_steps()
            return (self.ours - self.theirs).abs().max().item()
        if layer:
            self._step(1, [(ours, theirs)])
        else:
            self.ours, self.theirs = ours(self.ours), theirs(self.theirs)
            self._states = [(self.ours, self.theirs)]  # the embedding; unused after the layers
        for module in (ours, theirs):
            module.to("meta")
        return (self.ours - self.theirs).abs().max().item()

    def _step(self, number: int, layers: Sequence[tuple[Any, Any]]) -> None:
        """Runs layers on both sides, as the step of the schedule with this number."""
        ours, theirs = (list(side) for side in zip(*layers, strict=True))
        shared = {"position_ids": self._positions[:1], "position_embeddings": self._angles}
        empty = [own.attention.rope for own in ours]
        for own in ours:
            own.attention.rope = self._rope
        schedule, other = self._model.schedule, getattr(self._other.model, "schedule", None)
        if schedule is None or other is None:
            self.ours = ours[0](self.ours, self._mask, self._positions)
            self.theirs = theirs[0](self.theirs, **shared)
        else:
            self.ours = schedule.run(number, ours, self._kept, self.ours, self._mask, self._positions)
            mask = self._mask if other.reads else None
            self.theirs = other.run(number, theirs, self._their_kept, self.theirs, mask, **shared)
        for own, rope in zip(ours, empty, strict=True):
            own.attention.rope = rope

    def _run_steps(self) -> None:
        """Runs the next steps whose layers are loaded, and frees the layers that no later step runs."""
        steps = self._model.schedule.steps
        while (number := len(self._states)) <= len(steps):
            wanted = steps[number - 1].layers
            if not self._loaded.keys() >= set(wanted):
                break
            inputs = self.ours, self.theirs
            self._step(number, [self._loaded[layer] for layer in wanted])
            self._states.append((self.ours, self.theirs))
            own, other = (list(states) for states in zip(*self._states, strict=True))
            self.ours = self._model.schedule.passed_on(number, own, inputs[0])
            self.theirs = self._other.model.schedule.passed_on(number, other, inputs[1])
        left = {layer for step in steps[len(self._states) - 1 :] for layer in step.layers}
        for layer in self._loaded.keys() - left:
            for module in self._loaded.pop(layer):
                module.to("meta")


def _assign(module: nn.Module, path: str, weights: Mapping[str, torch.Tensor]) -> None:
    """Gives a module on the meta device its weights, without copying them."""
    module.load_state_dict(
        {name.removeprefix(f"{path}."): weight for name, weight in weights.items()}, strict=True, assign=True
    )
