"""Rates of GPUs and links, for the predicted time of a step. This module has all constants of the prediction.

The peak in bfloat16 and the memory of a GPU are those of `specs.cluster.GPUS`. No constant was fitted to a
measured run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from specs.cluster import GPUS


class Sheet(NamedTuple):
    """The facts of a GPU's data sheet that `specs.cluster.Gpu` does not have, and the fractions of its peaks
    that products reach."""

    bandwidth: float  # of its memory, bytes per second
    float32_flops: float  # without tensor cores, per second
    link: float  # to the other GPUs of its node, bytes per second in one direction
    network: float  # of its network card, bytes per second in one direction
    capability: tuple[int, int]
    matrix: float  # fraction of the peak that large products of random numbers reach
    float8: float  # the same for products in float8, at the power that the GPU may draw; 0 without float8
    source: str
    clock: float = 1.0  # speed of its products relative to a GPU that may draw its design power
    peers: int | None = None  # GPUs of a node among which its links are divided; None: a switch


# Large products of normally distributed bfloat16, by the GPU's generation. Sources: H. He, Strangely, Matrix
# Multiplications on GPUs Run Faster When Given "Predictable" Data (A100); SemiAnalysis, MI300X vs H100 vs
# H200 Benchmark Part 1: Training, December 2024 (Hopper, and the MI300X with the public software of that
# time).
AMPERE, HOPPER, CDNA3 = 257 / 312, 720 / 989.5, 620 / 1307
HOPPER_FLOAT8, CDNA3_FLOAT8 = 1280 / 1979, 990 / 2614.9
BLACKWELL, BLACKWELL_FLOAT8 = HOPPER, HOPPER_FLOAT8  # no source
# An H100 limited to 500 W: 585, 575 and 546 TFLOP/s in bfloat16, and 1,126, 1,083 and 1,141 in float8, for
# three shapes of 8,192 rows and more (pytorch/FBGEMM, pull request 2546).
HOPPER_500W = (585.23 + 575.12 + 546.31) / 3 / 989.5
HOPPER_FLOAT8_500W = (1125.51 + 1082.75 + 1141.38) / 3 / 1979


def at_power(watts: float, limited: float, full: float) -> float:
    """The fraction of the peak that a Hopper GPU reaches when limited to `watts` of its 700 W, interpolated
    linearly between the measured fractions at 500 W (`limited`) and at 700 W (`full`)."""
    return full + (limited - full) * (700 - watts) / (700 - 500)


def clock(watts: float) -> float:
    """The speed of a Hopper GPU limited to `watts` of its 700 W, relative to one that is not limited."""
    return at_power(watts, HOPPER_500W, HOPPER) / HOPPER


def float8(watts: float) -> float:
    """The fraction of its float8 peak that a Hopper GPU reaches when limited to `watts` of its 700 W."""
    return at_power(watts, HOPPER_FLOAT8_500W, HOPPER_FLOAT8)


SHEETS: dict[str, Sheet] = {
    "A100-40GB": Sheet(1.555e12, 19.5e12, 300e9, 25e9, (8, 0), AMPERE, 0.0,
        "A100: 1,555 GB/s, FP32 19.5 TFLOP/s, NVLink 600 GB/s both ways; DGX A100: 200 Gb/s a GPU"),
    "A100": Sheet(2.039e12, 19.5e12, 300e9, 25e9, (8, 0), AMPERE, 0.0,
        "A100: 2,039 GB/s, FP32 19.5 TFLOP/s, NVLink 600 GB/s both ways; DGX A100: 200 Gb/s a GPU"),
    "H100": Sheet(3.35e12, 67e12, 450e9, 50e9, (9, 0), HOPPER, float8(700),
        "H100 SXM: 3.35 TB/s, FP32 67 TFLOP/s, NVLink 900 GB/s both ways; DGX H100: 400 Gb/s a GPU"),
    "H100-HBM2e": Sheet(2.4e12, 67e12, 450e9, 50e9, (9, 0), HOPPER, float8(500),
        "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: 96 GB at 2.4 TB/s, limited to 500 W,"
        " 400 Gb/s a GPU; otherwise an H100 SXM", clock=clock(500)),
    "H200": Sheet(4.8e12, 67e12, 450e9, 50e9, (9, 0), HOPPER, float8(700),
        "H200 SXM: 4.8 TB/s, FP32 67 TFLOP/s, NVLink 900 GB/s both ways; DGX H200: 400 Gb/s a GPU"),
    "GH200": Sheet(4.0e12, 67e12, 450e9, 25e9, (9, 0), HOPPER, float8(560),
        "GH200: HBM3 4 TB/s, FP32 67 TFLOP/s; 150 GB/s of NVLink to each of three others (arXiv 2408.11556,"
        " figure 1, Alps); Slingshot: 200 Gb/s a GPU; 560 W as the Apertus report measured, since CPU and GPU"
        " share the power of the module", clock=clock(560), peers=3),
    "B200": Sheet(8.0e12, 75e12, 900e9, 50e9, (10, 0), BLACKWELL, BLACKWELL_FLOAT8,
        "DGX B200, for 8: 64 TB/s (62 in the Blackwell data sheet), NVLink 14.4 TB/s both ways; FP32 75"
        " TFLOP/s; 400 Gb/s a GPU"),
    "GB200": Sheet(8.0e12, 80e12, 900e9, 50e9, (10, 0), BLACKWELL, BLACKWELL_FLOAT8,
        "GB200 NVL72: 8 TB/s, FP32 80 TFLOP/s, NVLink 1.8 TB/s both ways among 72 GPUs (`gpus_per_node`);"
        " DGX GB200: 400 Gb/s a GPU"),
    "MI300X": Sheet(5.3e12, 163.4e12, 448e9, 50e9, (9, 4), CDNA3, CDNA3_FLOAT8,
        "MI300X: 5.3 TB/s, FP32 163.4 TFLOP/s, 7 links of 128 GB/s both ways; network as of an H100",
        peers=7),
}  # fmt: skip
assert set(SHEETS) == set(GPUS)

# Fraction of the peak that attention kernels reach on the scores that they compute: FlashAttention-2 with
# head dimension 128, causal, 8k tokens on an H100: 333 TFLOP/s forward. arXiv 2407.08608, figure 5, which
# counts half of the scores.
ATTENTION = 333 / 989.5
# Fraction of the bandwidth of memory: copies on an H100 SXM, 2,903 of 3,350 GB/s (Voltage Park and AI @
# Georgia Tech, vpbenchmarking). BabelStream's triad on a GH200: 3,315 of 4,000 (its issue 194).
MEMORY = 2903 / 3350
# Fraction of the bandwidth of NVLink in one direction: 380 of 450 GB/s between two H100 SXM (NVIDIA/nccl
# issue 1264).
LINK = 380 / 450

# Seconds of any collective, and of each of its steps inside a node and over the network (NCCL,
# src/graph/tuning.cc: baseLat and hwLat of a ring with the protocol Simple).
START = 8.4e-6
HOP = {"node": 3.4e-6, "network": 9.6e-6}

RINGS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")  # a rank has its own part already


def unmasked(queries: int, keys: int) -> float:
    """The fraction of scores that fused kernels compute under the causal mask; the queries of a rank that
    shares its sequences are taken to be the last ones."""
    return 1 - queries / (2 * keys)


def hidden_seconds(collective: float, product: float, parts: int) -> float:
    """The seconds in which a collective and a matrix product overlap when both are divided into `parts` and
    run beside each other, as async_tp does: those of the shorter one except for one part, with which the
    pipeline fills or drains."""
    return min(collective, product) * (1 - 1 / parts)


@dataclass(frozen=True)
class Rates:
    """The rates of one GPU in its cluster."""

    name: str
    gpus_per_node: int

    @property
    def memory(self) -> float:
        return GPUS[self.name].memory

    @property
    def capability(self) -> tuple[int, int]:
        return SHEETS[self.name].capability

    def speed(self, kind: str, width: int) -> float:
        """Operations per second of a kind of operators: `matrix` or `attention`. `width`: bytes per element
        of the tensors that are multiplied; 1 is float8, and a ValueError on a GPU without it."""
        sheet, gpu = SHEETS[self.name], GPUS[self.name]
        if width == 1:
            if gpu.float8_flops is None:
                raise ValueError(f"{self.name} multiplies nothing in float8")
            return gpu.float8_flops * sheet.float8
        peak = gpu.bf16_flops if width == 2 else sheet.float32_flops
        return peak * sheet.clock * (sheet.matrix if kind == "matrix" else ATTENTION)

    def compute(self, operations: float, moved: float, kind: str, width: int) -> float:
        """Seconds of an operator: the larger of computing and moving bytes. `width`: as for `speed`."""
        return max(
            operations / self.speed(kind, width) if operations else 0.0,
            moved / (SHEETS[self.name].bandwidth * MEMORY),
        )

    def bound(self, seconds: Mapping[str, float]) -> float:
        """The largest fraction of its peak that the GPU could use if it waited for nothing: the share of
        matrix products and attention in the time of all operators, at the rates of the data sheet in
        bfloat16. `seconds`: the predicted seconds by kind."""
        sheet = SHEETS[self.name]
        products = sheet.clock * (seconds["matrix"] * sheet.matrix + seconds["attention"] * ATTENTION)
        return products / (products + seconds["memory"] * MEMORY)

    def collective(self, kind: str, size: float, ranks: list[int]) -> float:
        """Seconds of a collective of these ranks over `size` bytes, the whole tensor."""
        nodes = len({rank // self.gpus_per_node for rank in ranks})
        return self.between(kind, size, len(ranks), nodes)

    def between(self, kind: str, size: float, number: int, nodes: int) -> float:
        """Seconds of a collective of `number` ranks on `nodes` nodes, by the alpha-beta model. Bytes go
        around a ring: over the network, through the cards of all its GPUs in a node; without a switch, over
        the links between these GPUs. The number of steps is that of a tree."""
        if number < 2:
            return 0.0
        sheet, level = SHEETS[self.name], "node" if nodes == 1 else "network"
        bandwidth = sheet.link * LINK
        if sheet.peers is not None:
            bandwidth *= max(1, number // nodes - 1) / sheet.peers
        if nodes > 1:
            bandwidth = min(bandwidth, sheet.network * number / nodes)
        passes, hops = 1.0, (number - 1).bit_length()
        if kind == "all-reduce":
            passes, hops = 2.0, 2 * hops
        share = (number - 1) / number if kind in RINGS else 1.0
        return START + hops * HOP[level] + passes * share * size / bandwidth
