"""The kernel of AdEMAMix."""

from pathlib import Path

from apertus_model.optimizers.ademamix import MOMENTS
from tests.interpreted import interpreted
from tests.numerics import Numerics


def test_the_kernel_computes_what_foreach_does(numerics: Numerics) -> None:
    found = interpreted(Path(__file__).with_name("kernel_against_foreach.py"))
    assert found.pop("cut") is True
    assert len(found) == 4
    for kind, largest in found.items():
        weights, moments = kind.split()
        for what, dtype, names in (("weights", weights, ["weight"]), ("moments", moments, MOMENTS)):
            numerics(
                "optimizers",
                f"ademamix by the Triton kernel (interpreted), {what} in {dtype} after 8 steps",
                source="arXiv 2409.03137",
                against="the foreach path",
                difference=max(largest[name] for name in names),
                # both round the same value but for its last bit, which decided nowhere here
                allowed=0.0 if dtype == "bfloat16" else 5e-7,
            )
