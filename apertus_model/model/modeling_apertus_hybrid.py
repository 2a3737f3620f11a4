"""An Apertus model for transformers in which some layers mix tokens by Mamba-2 instead of attention.

An export ships this file beside the weights, and `config.json` names it:

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

`mamba_layers` in `config.json` are the numbers of these layers. Each has the projections and the norms of
attention, and every query head h a state S of head_dim x head_dim:

    c, b, x = silu(conv(norm(q_proj u))), silu(conv(norm(k_proj u))), silu(conv(v_proj u))
    dt = softplus(dt_proj u + dt_bias),  S = exp(-exp(a_log) dt) S + dt b x',  y = S' c + d x
    out = o_proj(norm(y silu(z_proj u)))                    the norm of each head, with weights out_norm

where the heads of a group share b and x, and conv is a weighted sum of the last `mamba_conv_width` tokens of
each channel. Without `mamba_decay`, dt is 1 and S only adds up: linear attention. Besides the keys and values
of attention, the cache has the states of these layers, and the last inputs of their convolutions. It cannot
be cropped. The file needs nothing but torch and transformers. `ApertusForCausalLM` would compute attention;
the stored `hidden_act` makes it refuse the folder.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import ApertusConfig, ApertusForCausalLM, ApertusModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.models.apertus.modeling_apertus import ApertusAttention

STORED_ACTIVATION = "xielu_beside_mamba_2"


class HybridApertusConfig(ApertusConfig):
    """The config of Apertus, with the numbers of the layers without attention."""

    model_type = "apertus_hybrid"
    mamba_layers: list | None = None
    mamba_conv_width: int = 4
    mamba_chunk: int = 64  # tokens that are mixed by one matrix
    mamba_decay: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        self.hidden_act = "xielu"
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return {**super().to_dict(), "hidden_act": STORED_ACTIVATION}


class StateLayer(DynamicLayer):
    """The cache of a layer without attention."""

    window: torch.Tensor | None = None  # (batch, tokens, channels), before the convolution
    state: torch.Tensor | None = None  # (batch, heads, head_dim, head_dim), float32
    seen = 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.window is not None and self.state is not None:
            self.window, self.state = self.window[indices], self.state[indices]

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.window is not None and self.state is not None:
            self.window = self.window.repeat_interleave(repeats, dim=0)
            self.state = self.state.repeat_interleave(repeats, dim=0)

    def reset(self) -> None:
        self.window, self.state, self.seen = None, None, 0

    def crop(self, *_: Any) -> None:
        raise NotImplementedError("a state cannot forget its last tokens")


class MambaMixer(ApertusAttention):
    """The mixer in place of attention, whose projections and norms it has."""

    padding: torch.Tensor | None = None  # (batch, tokens so far), 0 for padding; set before each pass

    def __init__(self, config: HybridApertusConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads, key_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
        self.chunk, self.eps, self.decay = config.mamba_chunk, config.rms_norm_eps, config.mamba_decay
        self.z_proj = nn.Linear(dim, heads * self.head_dim, bias=False)
        width = config.mamba_conv_width
        self.conv_c = nn.Parameter(torch.zeros(heads * self.head_dim, width))
        self.conv_b = nn.Parameter(torch.zeros(key_heads * self.head_dim, width))
        self.conv_x = nn.Parameter(torch.zeros(key_heads * self.head_dim, width))
        if self.decay:
            self.dt_proj = nn.Linear(dim, heads, bias=False)
            self.a_log = nn.Parameter(torch.zeros(heads))
            self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.d = nn.Parameter(torch.ones(heads))
        self.out_norm = nn.Parameter(torch.ones(heads * self.head_dim))

    def forward(
        self, hidden_states: torch.Tensor, past_key_values: Any = None, cache: Any = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        cache = past_key_values if cache is None else cache  # its name from transformers 5.24 on
        batch, length, _ = hidden_states.shape
        if self.padding is not None:  # tokens of zeros leave the state as it is: at the start, 0
            hidden_states = hidden_states * self.padding[:, -length:, None].to(hidden_states.dtype)
        kept = cache.layers[self.layer_idx] if cache is not None else StateLayer()
        heads = (batch, length, -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(heads)).flatten(2)
        k = self.k_norm(self.k_proj(hidden_states).view(heads)).flatten(2)
        new = torch.cat([q, k, self.v_proj(hidden_states)], dim=-1)
        c, b, x = (part.view(heads).float() for part in self.convolved(new, kept).split(
            [self.conv_c.shape[0], self.conv_b.shape[0], self.conv_x.shape[0]], dim=-1
        ))  # fmt: skip
        b, x = (part.repeat_interleave(self.num_key_value_groups, dim=2) for part in (b, x))
        dt, log_a = torch.ones_like(c[..., 0]), torch.zeros_like(c[..., 0])
        if self.decay:
            dt = F.softplus(self.dt_proj(hidden_states).float() + self.dt_bias.float())
            log_a = -self.a_log.float().exp() * dt
        mixed = self.scan(c, b, x, dt, log_a, kept) + self.d.float()[:, None] * x
        gated = mixed * F.silu(self.z_proj(hidden_states).view(heads).float())
        normed = gated * (gated.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        kept.seen += length
        return self.o_proj((normed.flatten(2) * self.out_norm.float()).to(hidden_states.dtype)), None

    def convolved(self, new: torch.Tensor, kept: StateLayer) -> torch.Tensor:
        """(batch, tokens, channels) -> (batch, tokens, channels); keeps the last tokens in `kept` for the
        next ones."""
        taps = torch.cat([self.conv_c, self.conv_b, self.conv_x])
        width = taps.shape[1]
        window = kept.window if kept.window is not None else new.new_zeros(len(new), width - 1, new.shape[-1])
        whole = torch.cat([window, new], dim=1)
        kept.window = whole[:, whole.shape[1] - (width - 1) :]
        return F.silu(sum(whole[:, at : at + new.shape[1]] * taps[:, at] for at in range(width)))

    def scan(
        self,
        c: torch.Tensor,
        b: torch.Tensor,
        x: torch.Tensor,
        dt: torch.Tensor,
        log_a: torch.Tensor,
        kept: StateLayer,
    ) -> torch.Tensor:
        """The mixed tokens (batch, tokens, heads, head_dim), computed in chunks; keeps the state in `kept`
        for the next tokens."""
        state = kept.state
        if state is None:
            state = x.new_zeros(len(x), x.shape[2], self.head_dim, self.head_dim)
        mixed = []
        for begin in range(0, x.shape[1], self.chunk):
            part = slice(begin, begin + self.chunk)
            total = log_a[:, part].cumsum(dim=1)
            length = total.shape[1]
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            exponents = (total[:, :, None] - total[:, None]).masked_fill(later[..., None], -math.inf)
            matrix = torch.einsum("bthn,bshn->btsh", c[:, part], b[:, part]) * exponents.exp()
            inside = torch.einsum("btsh,bsh,bshp->bthp", matrix, dt[:, part], x[:, part])
            across = torch.einsum("bthn,bhnp->bthp", c[:, part] * total.exp()[..., None], state)
            mixed.append(inside + across)
            left = (total[:, -1:] - total).exp() * dt[:, part]
            state = state * total[:, -1].exp()[..., None, None]
            state = state + torch.einsum("bsh,bshn,bshp->bhnp", left, b[:, part], x[:, part])
        kept.state = state
        return torch.cat(mixed, dim=1)


class HybridApertusModel(ApertusModel):
    """The layers of Apertus, some of them with a Mamba-2 mixer."""

    config: HybridApertusConfig

    def __init__(self, config: HybridApertusConfig) -> None:
        super().__init__(config)
        if not config.mamba_layers:
            raise ValueError("config.json states no mamba_layers")
        for layer in config.mamba_layers:
            self.layers[layer].self_attn = MambaMixer(config, layer)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        cache: Any = None,  # past_key_values, from transformers 5.24 on
        **kwargs: Any,
    ) -> Any:
        past_key_values = past_key_values if cache is None else cache
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = DynamicCache(config=self.config)
        for layer in self.config.mamba_layers or ():
            mixer = self.layers[layer].self_attn
            mixer.padding = (
                attention_mask if attention_mask is not None and attention_mask.ndim == 2 else None
            )
            if isinstance(past_key_values, DynamicCache):
                places = past_key_values.layers
                places.extend(DynamicLayer() for _ in range(layer + 1 - len(places)))
                if not isinstance(places[layer], StateLayer):
                    places[layer] = StateLayer()
        return super().forward(
            input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )


class HybridApertusForCausalLM(ApertusForCausalLM):
    """The model with an output layer for the logits of the next token."""

    config: HybridApertusConfig

    def __init__(self, config: HybridApertusConfig) -> None:
        super().__init__(config)
        self.model = HybridApertusModel(config)
        self.post_init()
