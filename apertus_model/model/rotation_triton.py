"""Rotary position embedding in one pass over memory, by a Triton kernel. Imported only when it runs."""

import torch
import triton
import triton.language as tl

_ELEMENTS = 1024  # pairs per block and head; one vector load of bfloat16 for each of 128 threads


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]  # Triton's own types
    xs, table, ys, tokens, positions, heads,
    BACK: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = token < tokens
    if WIDTH != HALF:
        inside = inside & (column < HALF)
    angles = table + (token % positions).to(tl.int64) * (4 * HALF) + column
    cosine = tl.load(angles, mask=inside, other=0.0)  # once for all heads of a token
    sine = tl.load(angles + 2 * HALF, mask=inside, other=0.0)
    if BACK:
        sine = -sine
    at = token.to(tl.int64) * (2 * HALF * heads) + column
    for _ in range(heads):
        a = tl.load(xs + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(xs + at + HALF, mask=inside, other=0.0).to(tl.float32)
        tl.store(ys + at, (a * cosine - b * sine).to(ys.dtype.element_ty), mask=inside)
        tl.store(ys + at + HALF, (b * cosine + a * sine).to(ys.dtype.element_ty), mask=inside)
        at += 2 * HALF


def rotated(x: torch.Tensor, table: torch.Tensor, back: bool) -> torch.Tensor:
    """Computes `rotation.rotate` for float32 or bfloat16, on one GPU."""
    x, table = x.contiguous(), table.contiguous()
    batch, length, heads, width = x.shape
    assert table.shape[1:] == (length, 1, 2 * width) and table.shape[0] in (1, batch), table.shape
    assert table.dtype == torch.float32
    half, tokens = width // 2, batch * length
    assert tokens < 2**31 - _ELEMENTS, "tokens are counted in 32 bits, elements in 64"
    y = torch.empty_like(x)
    if x.numel():
        wide = triton.next_power_of_2(half)
        block = max(_ELEMENTS // wide, 1)
        _rotate[(triton.cdiv(tokens, block),)](
            x,
            table,
            y,
            tokens,
            table.shape[0] * length,
            heads,
            BACK=back,
            HALF=half,
            WIDTH=wide,
            TOKENS=block,
        )
    return y
