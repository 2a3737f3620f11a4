"""The machines that a recipe is planned for, and their prices: facts for estimates. Nothing here enters a
fingerprint.

Invariant: facts about a GPU come from `GPUS`, each with its source. Where a run is started (partitions,
accounts, containers) is not part of a recipe.
"""

from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import Field

from specs.base import Spec, execution
from specs.launch import MOST_PROCESSES
from specs.units import PositiveDuration

GpuName = Literal["A100-40GB", "A100", "H100", "H100-HBM2e", "H200", "GH200", "B200", "GB200", "MI300X"]


class Gpu(NamedTuple):
    """One GPU, as its data sheet states it."""

    bf16_flops: float  # dense peak in bfloat16 with float32 sums, per second
    # Bytes, at 10^9 to a gigabyte as on the sheet. The device has up to 7% more, which is left to the CUDA
    # context, libraries and fragmentation.
    memory: float
    watts: float  # thermal design power
    source: str  # the sheet, with the numbers as it states them
    float8_flops: float | None = None  # dense peak in float8, per second; None: the GPU has no float8
    mxfp8: bool = False  # whether it multiplies MX formats (blocks of 32 with one scale), as fast as float8


# NVIDIA's sheets state tensor-core rates with sparsity, twice the dense ones. The rates are those of the SXM
# variants.
GPUS: dict[str, Gpu] = {
    "A100-40GB": Gpu(312e12, 40e9, 400, "NVIDIA A100 data sheet: 312 TFLOP/s dense, 40 GB, 400 W"),
    "A100": Gpu(312e12, 80e9, 400, "NVIDIA A100 data sheet: 312 TFLOP/s dense, 80 GB, 400 W"),
    "H100": Gpu(989.5e12, 80e9, 700,
        "NVIDIA H100 data sheet: 1,979 TFLOP/s with sparsity, 3,958 in float8, 80 GB, up to 700 W", 1979e12),
    "H100-HBM2e": Gpu(989.5e12, 96e9, 500,
        "an H100 SXM with 96 GB, limited to 500 W: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md",
        1979e12),
    "H200": Gpu(989.5e12, 141e9, 700,
        "NVIDIA H200 data sheet: 1,979 TFLOP/s with sparsity, 3,958 in float8, 141 GB, up to 700 W", 1979e12),
    # The module's 450 to 1,000 W are CPU, GPU and memory together; the GPU is an H100. The Apertus report
    # (arXiv 2509.14233) measured about 560 W per GPU: state it as `power_per_gpu`.
    "GH200": Gpu(989.5e12, 96e9, 700,
        "NVIDIA GH200 data sheet: 1,979 TFLOP/s with sparsity, 3,958 in float8, 96 GB HBM3; power of an H100",
        1979e12),
    "B200": Gpu(2250e12, 180e9, 1000,
        "NVIDIA Blackwell data sheet, HGX B200: 4.5 PFLOP/s with sparsity, 9 in float8, 180 GB, 1,000 W",
        4500e12, mxfp8=True),
    "GB200": Gpu(2500e12, 186e9, 1200,
        "NVIDIA Blackwell data sheet, a GPU of a GB200 NVL72: 5 PFLOP/s with sparsity, 10 in float8, 186 GB,"
        " up to 1,200 W", 5000e12, mxfp8=True),
    "MI300X": Gpu(1307.4e12, 192e9, 750,
        "AMD MI300X data sheet: 1,307.4 TFLOP/s dense, 2,614.9 in float8, 192 GB, 750 W", 2614.9e12),
}  # fmt: skip
assert set(GPUS) == set(get_args(GpuName))
MEMORY_TOLERANCE = 0.15  # between what a device reports and its sheet's gigabytes


def known_gpu(name: str, memory: float) -> str | None:
    """The name in `GPUS` of a device by the name that CUDA gives it and its bytes of memory; None if no data
    sheet is known."""
    fits = [
        known
        for known, facts in GPUS.items()
        if known.split("-")[0] in name.replace("-", " ").split()
        and abs(memory / facts.memory - 1) < MEMORY_TOLERANCE
    ]
    return fits[0] if fits else None


class Cluster(Spec):
    """The cluster for which a plan estimates hours, energy, cost and memory. A stage takes as many GPUs as
    its `launch` has processes. Prices are in any one currency."""

    gpu: GpuName = execution()
    gpus_per_node: int = execution(4, ge=1, le=1024)
    nodes: int = execution(
        1,
        ge=1,
        le=MOST_PROCESSES,
        description="nodes of the cluster; a stage uses as many as its processes need",
    )
    mfu: Annotated[float, Field(gt=0, le=1)] | Literal["measured"] = execution(
        "measured",
        description="expected model FLOPs utilisation, as a fraction of the GPU's dense peak (in bfloat16;"
        " for the products of `precision.linear`, in float8), without recomputation; measured: taken from"
        " stored results of the same stage, else of the other stages. `launch.mfu` of a stage wins over it",
    )
    price_per_gpu_hour: float | None = execution(None, ge=0, le=1e9)
    power_per_gpu: float | None = execution(
        None,
        gt=0,
        le=1e6,
        description="watts, including its share of the node; the GPU's design power by default",
    )
    pue: float = execution(
        1.0,
        ge=1,
        le=100,
        description="power usage effectiveness: power of the whole data centre per watt of the machines",
    )
    storage_price: float | None = execution(
        None, ge=0, le=1e9, description="price of storage per terabyte (10^12 bytes) and month of 30 days"
    )
    storage_bandwidth: float | None = execution(
        None,
        gt=0,
        le=1e9,
        description="gigabytes (10^9 bytes) per second at which all processes together write a checkpoint",
    )
    host_bandwidth: float | None = execution(
        None,
        gt=0,
        le=1e9,
        description="gigabytes (10^9 bytes) per second at which a GPU copies its part of a checkpoint to"
        " host memory",
    )
    mean_time_between_failures: PositiveDuration | None = execution(
        None, description="mean time between failures of one node"
    )

    @property
    def device(self) -> Gpu:
        return GPUS[self.gpu]

    @property
    def watts(self) -> float:
        """Power of a GPU while it trains, without the PUE."""
        return self.power_per_gpu or self.device.watts
