"""What operators and kernels are for: the classes of the time of a step, by names.

The name of an operator or kernel decides, else those of what called it, the innermost first. Nothing here
loads torch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

GAPS, OTHER = "gaps", "other"
# What is searched for in the name of an operator or kernel.
NEAR = {
    "attention": r"attention|flash|fmha|flex|varlen|sdpa",
    "products": r"gemm|cutlass|nvjet|xmma|cublas|_scaled_mm|^(aten::)?(mm|addmm_?|bmm|linear|matmul)$",
}
# The same, searched for in the names of what called it, too.
AROUND = {
    "optimizer": r"Optimizer|[Aa]dam|_foreach_(norm|mul|div|lerp|addc|sqrt|add|pow)|vector_norm|clip"
    r"|\.optimizers\.",
    "embedding and loss": r"mbedding|[Cc]ross_?[Ee]ntropy|[Ss]oftmax|nll_loss|\.losses\.",
    "norms": r"rms_?norm|R(MS|ms)Norm|layer_norm|rsqrt",
    "activation": r"xielu|XIELU|[Ss]ilu|expm1|[Ss]oftplus",
}
LAST = {
    "casts and copies": r"[Cc]opy|Mem(cpy|set)|[Cc]ast|[Ff]ill|zero|split_with|(::|^)_?(to|(chunk_)?cat)$"
}
CLASSES = (*NEAR, *AROUND, *LAST, OTHER, GAPS)


def search(table: Mapping[str, str], names: Sequence[str]) -> str | None:
    """The class whose pattern is in the last of the names that has one; None if no name has."""
    for name in reversed(names):
        for kind, pattern in table.items():
            if re.search(pattern, name):
                return kind
    return None


@functools.cache
def class_of(*names: str) -> str:
    """The class of a kernel or an operator, the last of `names`, within the operators before it."""
    return search(NEAR, names[-2:]) or search(AROUND, names) or search(LAST, names[-2:]) or OTHER
