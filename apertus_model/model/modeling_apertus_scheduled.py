"""An Apertus model for transformers whose layers do not simply run one after the other.

An export ships this file beside the weights, and `config.json` names it:

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

`layer_schedule` in `config.json` lists the steps, `[layer, [state, ...], [other layer, ...], [step, ...],
normed]` each, where the entries after the states can be missing. A step runs a layer, or several at the same
time, on what the previous step passed on. Its attention also sees the keys and values of the listed steps,
for each token up to its own place. The output of a step that is `normed` goes through `model.schedule.norm`.
State 0 is the embedding and state s the output of step s, counted from 1; -1 is the step's own input. A step
passes on its output or, if it lists states, their sum with the weights `model.schedule.sums.<step>.weight`.

A token needs only the states of its own forward pass. The key-value cache has a place for each run of a
layer, in the order of the steps. The file needs nothing but torch and transformers. `ApertusForCausalLM`
would run the layers as a plain stack; the stored `hidden_act` makes it refuse the folder.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import ApertusConfig, ApertusForCausalLM, ApertusModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.apertus.modeling_apertus import ApertusRMSNorm

STORED_ACTIVATION = "xielu_in_a_layer_schedule"


class ScheduledApertusConfig(ApertusConfig):
    """The config of Apertus, with a layer schedule."""

    model_type = "apertus_scheduled"
    layer_schedule: list | None = None
    layer_schedule_of: dict | None = None  # what made it, for the program that trained the model

    def __post_init__(self, **kwargs: Any) -> None:
        self.hidden_act = "xielu"
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return {**super().to_dict(), "hidden_act": STORED_ACTIVATION}


class WeightedSum(nn.Module):
    """The weighted sum of tensors of one shape, computed in float32."""

    def __init__(self, states: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(states))

    def forward(self, states: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros_like(states[0], dtype=torch.float32)
        for weight, state in zip(self.weight.float(), states, strict=True):
            total = total + weight * state
        return total.to(states[0].dtype)


class ScheduledStep(NamedTuple):
    """An entry of `layer_schedule`."""

    layer: int
    summed: Sequence[int]
    beside: Sequence[int] = ()
    reads: Sequence[int] = ()
    normed: bool = False


class KeysValues:
    """The keys and values that a forward pass keeps for attention: the cache of earlier tokens, if any, and
    the keys and values of its steps."""

    def __init__(self, cache: Cache | None = None) -> None:
        self.cache = cache
        self.of_steps: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, number: int, place: int, step: ScheduledStep) -> "KeysValues":
        """The object that a layer uses as its cache when it runs at this place, in the step with this
        number."""
        return _OfRun(self, number, place, step)


class _OfRun(KeysValues):
    def __init__(self, whole: KeysValues, number: int, place: int, step: ScheduledStep) -> None:
        self.whole, self.number, self.place, self.step = whole, number, place, step

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps new keys and values (batch, heads, tokens, head_dim). Returns those that attention sees."""
        cache, of_steps = self.whole.cache, self.whole.of_steps
        if cache is not None:
            keys, values = cache.update(keys, values, self.place)
        of_steps[self.number] = keys, values
        seen = [*(of_steps[number] for number in self.step.reads), (keys, values)]
        if len(seen) == 1:
            return keys, values
        return torch.cat([keys for keys, _ in seen], dim=2), torch.cat([values for _, values in seen], dim=2)


class LayerSchedule(nn.Module):
    """The steps, the weights of their sums, and their norm."""

    def __init__(self, steps: list[list[Any]], dim: int, eps: float) -> None:
        super().__init__()
        self.steps = [ScheduledStep(*step) for step in steps]
        self.sums = nn.ModuleDict(
            {
                str(number): WeightedSum(len(step.summed))
                for number, step in enumerate(self.steps, 1)
                if step.summed
            }
        )
        self.norm = ApertusRMSNorm(dim, eps) if any(step.normed for step in self.steps) else None
        runs = [1 + len(step.beside) for step in self.steps]
        self.places = [sum(runs[:index]) for index in range(len(runs))]  # of the cache, first of each step
        self.runs = sum(runs)
        self.reads = any(step.reads for step in self.steps)

    def run(
        self,
        number: int,
        layers: list[nn.Module],
        kept: KeysValues,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **shared: Any,
    ) -> torch.Tensor:
        """The output of the step with this number, which has these layers. If there are several, all
        attentions are added to their common input, and then all feed-forwards to that sum."""
        step, place = self.steps[number - 1], self.places[number - 1]
        if step.reads:
            assert attention_mask is not None, "the keys of several steps are no causal sequence"
            attention_mask = attention_mask.repeat(1, 1, 1, 1 + len(step.reads))
        own = [
            {
                **shared,
                "attention_mask": attention_mask,
                "past_key_values": kept.of(number, place + index, step),
            }
            for index in range(len(layers))
        ]
        if len(layers) == 1:
            hidden = layers[0](hidden, **own[0])
        else:
            hidden = hidden + sum(
                layer.self_attn(hidden_states=layer.attention_layernorm(hidden), **mine)[0]
                for layer, mine in zip(layers, own, strict=True)
            )
            hidden = hidden + sum(layer.mlp(layer.feedforward_layernorm(hidden)) for layer in layers)
        return hidden if self.norm is None or not step.normed else self.norm(hidden)

    def passed_on(self, number: int, states: list[torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """The state that the step with this number passes on: its output, which is the last of `states`, or a
        weighted sum of states. `hidden`: the input of the step."""
        summed = self.steps[number - 1].summed
        if not summed:
            return states[-1]
        result: torch.Tensor = self.sums[str(number)](
            [hidden if state == -1 else states[state] for state in summed]
        )
        return result


class ScheduledApertusModel(ApertusModel):
    """The layers of Apertus in the order of the schedule."""

    config: ScheduledApertusConfig

    def __init__(self, config: ScheduledApertusConfig) -> None:
        super().__init__(config)
        if config.layer_schedule is None:
            raise ValueError("config.json states no layer_schedule")
        self.schedule = LayerSchedule(config.layer_schedule, config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cache: Any = None,  # past_key_values, from transformers 5.24 on
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        past_key_values = past_key_values if cache is None else cache
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = DynamicCache()
        if isinstance(past_key_values, DynamicCache):  # `generate` makes one with a place for each layer
            missing = self.schedule.runs - len(past_key_values.layers)
            past_key_values.layers.extend(DynamicLayer() for _ in range(missing))
        if position_ids is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(seen, seen + hidden.shape[1], device=hidden.device)[None]
        if self.schedule.reads and self.config._attn_implementation not in ("sdpa", "eager"):
            raise ValueError("attention to the keys of earlier steps needs attn_implementation sdpa or eager")
        kept = KeysValues(past_key_values)
        shared = {
            "attention_mask": create_causal_mask(
                config=self.config,
                inputs_embeds=hidden,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
                allow_is_causal_skip=not self.schedule.reads,
            ),
            "position_ids": position_ids,
            "position_embeddings": self.rotary_emb(hidden, position_ids=position_ids),
        }
        states = [hidden]
        for number, step in enumerate(self.schedule.steps, 1):
            layers = [self.layers[index] for index in (step.layer, *step.beside)]
            states.append(self.schedule.run(number, layers, kept, hidden, **shared))
            hidden = self.schedule.passed_on(number, states, hidden)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), past_key_values=past_key_values)


class ScheduledApertusForCausalLM(ApertusForCausalLM):
    """The model with an output layer for the logits of the next token."""

    config: ScheduledApertusConfig

    def __init__(self, config: ScheduledApertusConfig) -> None:
        super().__init__(config)
        self.model = ScheduledApertusModel(config)
        self.post_init()
