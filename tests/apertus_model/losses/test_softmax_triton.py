"""The kernels of the softmax."""

from pathlib import Path

from tests.interpreted import interpreted
from tests.numerics import Numerics


def test_the_kernels_follow_the_formulas_in_float64(numerics: Numerics) -> None:
    found = interpreted(Path(__file__).with_name("softmax_by_kernel.py"))
    assert found.pop("not finite") is True
    assert len(found) == 4
    assert found.pop("gradients, bfloat16") < 2**-7  # the interpreter cuts off where a GPU rounds
    for quantity, largest in found.items():
        numerics(
            "losses",
            f"softmax by its kernels: {quantity}, relative to the sum or the factor",
            source="softmax(W h), factor (softmax(W h) - [y])",
            against="the formula in float64",
            difference=largest,
            allowed=5e-7,
        )
