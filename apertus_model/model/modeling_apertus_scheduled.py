"""An Apertus model whose layers do not only run one after the other, for transformers.

An export ships this file beside the weights, and `config.json` names it:

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

`layer_schedule` in `config.json` lists the steps, `[layer, [state, ...], [other layer, ...]]` each, where the
last list can be missing. A step runs a layer, or several at the same time, on what the step before passed on.
State 0 is the embedding and state s the output of step s, counted from 1; -1 is what the step itself has
read. A step passes on its output or, where it lists states, their sum with the weights
`model.schedule.sums.<step>.weight`.

A token needs the states of its own forward pass alone, so the key-value cache is that of Apertus. The file
needs nothing but torch and transformers. `ApertusForCausalLM` would run the layers as a plain stack; the
`hidden_act` that is stored makes it refuse the folder.
"""

from typing import Any

import torch
from torch import nn
from transformers import ApertusConfig, ApertusForCausalLM, ApertusModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

STORED_ACTIVATION = "xielu_in_a_layer_schedule"


class ScheduledApertusConfig(ApertusConfig):
    """The config of Apertus, and the schedule."""

    model_type = "apertus_scheduled"
    layer_schedule: list | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.hidden_act = "xielu"
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return {**super().to_dict(), "hidden_act": STORED_ACTIVATION}


class WeightedSum(nn.Module):
    """The sum of tensors of one shape, with a weight each; computed in float32."""

    def __init__(self, states: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(states))

    def forward(self, states: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros_like(states[0], dtype=torch.float32)
        for weight, state in zip(self.weight.float(), states, strict=True):
            total = total + weight * state
        return total.to(states[0].dtype)


class LayerSchedule(nn.Module):
    """The steps, and the weights of their sums."""

    def __init__(self, steps: list[list[Any]]) -> None:
        super().__init__()
        self.steps = [(step[0], step[1], step[2] if len(step) > 2 else []) for step in steps]
        self.sums = nn.ModuleDict(
            {str(number): WeightedSum(len(step[1])) for number, step in enumerate(steps, 1) if step[1]}
        )

    def run(self, layers: list[nn.Module], hidden: torch.Tensor, **shared: Any) -> torch.Tensor:
        """The output of a step with these layers. Of several, all attention adds to what they read, and then
        every feed-forward to that."""
        if len(layers) == 1:
            return layers[0](hidden, **shared)
        hidden = hidden + sum(
            layer.self_attn(hidden_states=layer.attention_layernorm(hidden), **shared)[0] for layer in layers
        )
        return hidden + sum(layer.mlp(layer.feedforward_layernorm(hidden)) for layer in layers)

    def passed_on(self, number: int, states: list[torch.Tensor], read: torch.Tensor) -> torch.Tensor:
        """What the step with this number passes on; its output is the last of the states."""
        summed = self.steps[number - 1][1]
        if not summed:
            return states[-1]
        result: torch.Tensor = self.sums[str(number)](
            [read if state == -1 else states[state] for state in summed]
        )
        return result


class ScheduledApertusModel(ApertusModel):
    """The layers of Apertus in the order of the schedule."""

    config: ScheduledApertusConfig

    def __init__(self, config: ScheduledApertusConfig) -> None:
        super().__init__(config)
        if config.layer_schedule is None:
            raise ValueError("config.json states no layer_schedule")
        self.schedule = LayerSchedule(config.layer_schedule)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(seen, seen + hidden.shape[1], device=hidden.device)[None]
        shared = {
            "attention_mask": create_causal_mask(
                config=self.config,
                inputs_embeds=hidden,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            ),
            "position_ids": position_ids,
            "position_embeddings": self.rotary_emb(hidden, position_ids=position_ids),
            "past_key_values": past_key_values,
        }
        states = [hidden]
        for number, (layer, _, beside) in enumerate(self.schedule.steps, 1):
            layers = [self.layers[index] for index in (layer, *beside)]
            states.append(self.schedule.run(layers, hidden, **shared))
            hidden = self.schedule.passed_on(number, states, hidden)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), past_key_values=past_key_values)


class ScheduledApertusForCausalLM(ApertusForCausalLM):
    """Logits of the next token."""

    config: ScheduledApertusConfig

    def __init__(self, config: ScheduledApertusConfig) -> None:
        super().__init__(config)
        self.model = ScheduledApertusModel(config)
        self.post_init()
