"""The kernels of xIELU."""

from pathlib import Path

from tests.interpreted import interpreted
from tests.numerics import Numerics


def test_the_kernels_follow_the_formula_in_float64(numerics: Numerics) -> None:
    found = interpreted(Path(__file__).with_name("xielu_by_kernel.py"))
    assert found.pop("keeps nan") is found.pop("end of 2^31 elements") is True
    assert len(found) == 8  # the value and three gradients, in two dtypes
    for quantity, largest in found.items():
        if quantity.endswith("bfloat16"):  # the interpreter cuts off where a GPU rounds to the nearest
            assert largest < 2**-7
            continue
        numerics(
            "model",
            "xIELU by its kernels, relative to its terms",
            source="arXiv 2411.13010",
            against="autograd through the formula in float64",
            difference=largest,
            allowed=1e-6,
        )
