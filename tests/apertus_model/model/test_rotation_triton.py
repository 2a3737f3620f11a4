"""The kernel of the rotary embedding."""

from pathlib import Path

from tests.interpreted import interpreted
from tests.numerics import Numerics


def test_the_kernel_follows_the_formula_in_float64(numerics: Numerics) -> None:
    found = interpreted(Path(__file__).with_name("rotation_by_kernel.py"))
    assert found.pop("any strides") is True
    assert found.keys() == {"float32", "bfloat16"}
    assert found["bfloat16"] < 2**-7  # the interpreter cuts off where a GPU rounds to the nearest
    numerics(
        "model",
        "rotary embedding by its kernel, relative to a pair's length",
        source="arXiv 2104.09864",
        against="the formula in float64",
        difference=found["float32"],
        allowed=2e-7,
    )
