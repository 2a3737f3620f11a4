"""Layers that mix tokens by Mamba-2 (arXiv 2405.21060) with the projections of attention (arXiv 2408.15237).

    c, b, x = silu(conv(norm(wq u))), silu(conv(norm(wk u))), silu(conv(wv u))    u: the normed input
    dt = softplus(dt_proj u + dt_bias),  a = exp(-exp(a_log) dt)                  one number for each head
    S_t = a_t S_{t-1} + dt_t b_t x_t',  y_t = S_t' c_t + d x_t                    S: (head_dim, head_dim)
    out = wo(norm(y silu(z_proj u)))                                              the norm of each head

Keys and values belong to groups of heads, as in attention. In every head, a matrix over tokens takes the
place of the softmax: M_ts = (c_t . b_s) a_{s+1} ... a_t dt_s for s <= t of the same document. It is computed
for chunks of tokens, between which the state carries over. Its sums and the state are float32 at least, and
no rounding depends on other documents; the convolution has the precision of its input. It is initialised as
the identity, so that a layer with the projections of attention begins with their queries, keys and values;
step sizes and decays are drawn as in Mamba-2. Without decay, a_t and dt_t are 1: linear attention.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.decoder_sharding import colwise_config, dense_param_placement
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.sharding import ShardingConfig

from apertus_model.model.attention import document_numbers, projected
from apertus_model.model.init import local_part
from specs.mamba import OF_DECAYS, Mamba

STEPS = (1e-3, 0.1)  # step sizes of a new model, log-uniform
DECAYS = (1.0, 16.0)  # exp(a_log) of a new model, uniform


class Recurrence(NamedTuple):
    """The terms of the states of heads, in float32 at least. T tokens, H heads, N the width of a head."""

    c: torch.Tensor  # (batch, T, H, N): reads the state
    b: torch.Tensor  # the same shape: where the state is written
    x: torch.Tensor  # the same shape: what is written
    dt: torch.Tensor  # (batch, T, H): step sizes
    log_a: torch.Tensor  # (batch, T, H): logarithms of decays, at most 0
    documents: torch.Tensor  # (batch, T) int64: which document a token belongs to, not decreasing


def products_of_decays(log_a: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """(..., T, H), (..., T) -> (..., H, T, T): at [t, s] the product of a over s+1 .. t, and 0 for s > t or
    another document. Logarithms are added from s+1 on: a difference of two long sums would have the rounding
    of both, and depend on other documents."""
    length = log_a.shape[-2]
    upper = torch.ones(length, length, dtype=torch.bool, device=log_a.device).triu()
    added = log_a.transpose(-1, -2)[..., None].expand(*log_a.shape[:-2], -1, -1, length)
    exponents = added.masked_fill(upper, 0.0).cumsum(dim=-2)
    same = documents[..., :, None] == documents[..., None, :]
    return exponents.masked_fill(~same.tril().unsqueeze(-3), -math.inf).exp()


def matrix(of: Recurrence, decays: torch.Tensor | None = None) -> torch.Tensor:
    """(..., H, T, T): M of the module's docstring. `decays`: the result of `products_of_decays`, if known."""
    if decays is None:
        decays = products_of_decays(of.log_a, of.documents)
    scores = torch.einsum("...thn,...shn->...hts", of.c, of.b)
    return scores * decays * of.dt.transpose(-1, -2).unsqueeze(-2)


def scan(of: Recurrence, chunk: int) -> torch.Tensor:
    """M x, (batch, T, H, N), computed in chunks of tokens."""
    length = of.x.shape[1]
    chunk = min(chunk, length)
    if left := -length % chunk:  # pads the last document with tokens that write nothing
        rest = [F.pad(term, (0, 0) * (term.ndim - 2) + (0, left)) for term in of[:-1]]
        last_document = of.documents[:, -1:].expand(-1, left)
        of = Recurrence._make([*rest, torch.cat([of.documents, last_document], dim=1)])
    chunks = Recurrence(*(term.unflatten(1, (-1, chunk)) for term in of))
    decays = products_of_decays(chunks.log_a, chunks.documents)
    inside = torch.einsum("bghts,bgshn->bgthn", matrix(chunks, decays), chunks.x)

    # the contribution of each chunk's tokens to the state at the chunk's end
    kept = decays[..., -1, :].transpose(-1, -2) * chunks.dt
    left_behind = torch.einsum("bgsh,bgshn,bgshp->bghnp", kept, chunks.b, chunks.x)
    # the state at the end of each chunk, from all chunks so far
    last, total = chunks.documents[:, :, -1], chunks.log_a.cumsum(dim=2)
    passed = products_of_decays(total[:, :, -1], last)
    states = torch.einsum("bhgf,bfhnp->bghnp", passed, left_behind)
    before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], dim=1)
    document_before = torch.cat([last[:, :1], last[:, :-1]], dim=1)
    seen = total.exp() * (chunks.documents == document_before[..., None])[..., None]
    across = torch.einsum("bgth,bgthn,bghnp->bgthp", seen, chunks.c, before)
    return (inside + across).flatten(1, 2)[:, :length]


def causal_convolution(x: torch.Tensor, taps: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each channel of `x` (batch, T, channels) over the last tokens of the same document,
    followed by silu. `taps`: (channels, width); the last one multiplies the token itself."""
    total = x * taps[:, -1]
    for back in range(1, min(taps.shape[1], x.shape[1])):
        same = documents[:, back:] == documents[:, :-back]
        earlier = (x[:, :-back] * same[..., None]) * taps[:, -1 - back]
        total = total + F.pad(earlier, (0, 0, back, 0))
    return F.silu(total)


class MambaMixer(GQAttention):
    """The mixer in place of a layer's attention, whose projections and norms it has. The rotary embedding and
    the inner attention are not used."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        conv_width: int
        chunk: int
        z_proj: Linear.Config
        dt_proj: Linear.Config | None  # None without decay

        def set_own_sharding(self) -> None:
            """Gives every tensor-parallel rank the gates and step sizes of its own heads."""
            for projection in filter(None, (self.z_proj, self.dt_proj)):
                projection.sharding_config = colwise_config()

    _sharding_config: ShardingConfig | None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.chunk, self.norm_eps = config.chunk, config.qk_norm.eps
        self.z_proj = config.z_proj.build()
        self.dt_proj = config.dt_proj.build() if config.dt_proj is not None else None
        heads, key_heads = config.n_heads, config.n_kv_heads or config.n_heads
        assert config.head_dim is not None
        for name, size in (("c", heads), ("b", key_heads), ("x", key_heads)):
            taps = torch.empty(size * config.head_dim, config.conv_width)
            self.register_parameter(f"conv_{name}", nn.Parameter(taps))
        for name in PER_HEAD:
            if self.dt_proj is None and name in OF_DECAYS:
                continue
            self.register_parameter(name, nn.Parameter(torch.empty(heads)))
        self.out_norm = nn.Parameter(torch.empty(heads * config.head_dim))

    def initial(self, name: str, size: torch.Size, generator: torch.Generator) -> torch.Tensor | None:
        """The initial value of the whole parameter; None if it is initialised like any matrix or norm."""
        if name.startswith("conv_"):
            return torch.cat([torch.zeros(size[0], size[1] - 1), torch.ones(size[0], 1)], dim=1)
        if name not in ("a_log", "dt_bias"):
            return None
        drawn = torch.rand(size, generator=generator, dtype=torch.float64)
        if name == "a_log":
            return (DECAYS[0] + drawn * (DECAYS[1] - DECAYS[0])).log().float()
        low, high = map(math.log, STEPS)
        return torch.expm1((low + drawn * (high - low)).exp()).log().float()  # inverse softplus of the step

    def parallelize(self, parallel_dims: Any) -> None:
        """Gives every tensor-parallel rank the parameters of its own heads."""
        assert self._sharding_config is not None
        own = dict.fromkeys(self._parameters, dense_param_placement(tp=spmd.S(0)))
        self._sharding_config = dataclasses.replace(self._sharding_config, state_shardings=own)
        super().parallelize(parallel_dims)

    def recurrence(self, u_BLD: torch.Tensor, positions: torch.Tensor) -> Recurrence:
        """The recurrence of this rank's heads. `positions`: (batch, T) int64, 0 where a document begins."""
        documents = document_numbers(positions)
        taps = [local_part(getattr(self, name)) for name in CONVOLUTIONS]
        heads = []
        for part, own in zip(projected(self, u_BLD), taps, strict=True):
            whole = local_part(part)
            mixed = causal_convolution(whole.flatten(2), own.to(whole.dtype), documents)
            heads.append(wide(mixed.unflatten(2, whole.shape[2:])))
        c, b, x = heads
        again = c.shape[2] // b.shape[2]
        if self.dt_proj is None:
            dt, log_a = c.new_ones(c.shape[:3]), c.new_zeros(c.shape[:3])
        else:
            dt = wide(local_part(self.dt_proj(u_BLD)))
            dt = F.softplus(dt + local_part(self.dt_bias).to(dt.dtype))
            log_a = -local_part(self.a_log).to(dt.dtype).exp() * dt
        b, x = (term.repeat_interleave(again, dim=2) for term in (b, x))
        return Recurrence(c, b, x, dt, log_a, documents)

    def forward(
        self, x_BLD: torch.Tensor, attention_masks: Any = None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(batch, seq_len, dim) -> (batch, seq_len, dim)."""
        assert positions is not None, "the borders of documents"
        of = self.recurrence(x_BLD, positions)
        skip = local_part(self.d).to(of.x.dtype)[:, None] * of.x
        gates = self.z_proj(x_BLD)
        gated = (scan(of, self.chunk) + skip) * F.silu(wide(local_part(gates)).view_as(of.x))
        scales = local_part(self.out_norm).to(gated.dtype).view(gated.shape[2:])
        normed = gated * (gated.square().mean(dim=-1, keepdim=True) + self.norm_eps).rsqrt() * scales
        out = normed.flatten(2).to(x_BLD.dtype)
        if isinstance(gates, DTensor):
            out = DTensor.from_local(out, gates.device_mesh, gates.placements, run_check=False)
        return self.wo(out)


CONVOLUTIONS = ("conv_c", "conv_b", "conv_x")
PER_HEAD = ("a_log", "dt_bias", "d")


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float32, or in its own precision if that is higher."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def mixing(plain: GQAttention.Config, settings: Mamba) -> MambaMixer.Config:
    """The config of a layer's mixer, with the modules of `plain`."""
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    del fields["param_init"]
    wq = plain.qkv_linear.wq
    # one output for each head: float8 is too imprecise for it, and needs more outputs
    steps = Linear.Config(in_features=wq.in_features, out_features=plain.n_heads, param_init=wq.param_init)
    return MambaMixer.Config(
        **fields,
        conv_width=settings.conv_width,
        chunk=settings.chunk,
        z_proj=dataclasses.replace(wq),
        dt_proj=steps if settings.decay else None,
        param_init=dict.fromkeys((*CONVOLUTIONS, *PER_HEAD, "out_norm"), skip_param_init),
    )
