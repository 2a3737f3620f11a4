"""Stands in for the other stages of a pipeline as far as this rank asks them: for the shapes of what they
send.

Invariant: the shapes that this rank states must equal those that it receives, so that a wrong assumption
fails.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed.pipelining import _utils as pipelining
from torch.distributed.tensor import DTensor, Replicate, Shard


class Peers:
    """The methods that replace those of torch's schedule and `PipelineStage`."""

    hidden: Any = None  # description of the hidden states that pass from stage to stage

    def describe(self, trainer: Any) -> None:
        """Notes the hidden states of a trainer that has been built."""
        training, dims = trainer.config.training, trainer.parallel_dims
        model = trainer.config.model_spec.model
        rows = trainer.config.parallelism.pipeline_parallel_microbatch_size
        length, split = training.seq_len // dims.cp, trainer.config.parallelism.enable_sequence_parallel
        if dims.tp_enabled and split:
            length //= dims.tp
        dtype = getattr(torch, training.mixed_precision_param)
        states = torch.empty(rows, length, model.dim, dtype=dtype, device=trainer.device)
        if dims.tp_enabled:
            placement = Shard(1) if split else Replicate()
            states = DTensor.from_local(states, dims.get_mesh("tp"), [placement], run_check=False)
        self.hidden = pipelining.extract_tensor_meta(states.requires_grad_())

    def agree(self, schedule: Any, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        """Stands in for the vote of the stages: they learn the shapes of what they exchange."""
        for stage in stages:
            stage._inference_mode = pipelining.InferenceMode.DYNAMIC

    def receive(self, stage: Any, peer: int) -> Any:
        """The shapes that a peer states: the previous stage those of hidden states, the next stage those of
        gradients."""
        if peer < stage.stage_index:
            return pipelining._StageForwardMeta(forward_metas=(self.hidden,))
        return pipelining._StageBackwardMeta(backward_metas=(self._gradient,))

    def send(self, stage: Any, shapes: Any, peer: int) -> None:
        """Compares the shapes that this rank states with those that it receives."""
        forward = isinstance(shapes, pipelining._StageForwardMeta)
        (own,) = shapes.forward_metas if forward else shapes.backward_metas
        expected = self.hidden if forward else self._gradient
        assert own == expected, f"stage {stage.stage_index} sends {own}, and would be sent {expected}"

    @property
    def _gradient(self) -> Any:
        return dataclasses.replace(self.hidden, requires_grad=False)
