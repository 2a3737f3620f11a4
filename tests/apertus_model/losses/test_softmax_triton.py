"""The kernels of the softmax."""

from pathlib import Path

from tests.apertus_model.losses.test_cross_entropy import LOG_P
from tests.interpreted import interpreted
from tests.numerics import Numerics


def test_the_kernels_follow_the_formulas_in_float64(numerics: Numerics) -> None:
    found = interpreted(Path(__file__).with_name("softmax_by_kernel.py"))
    assert found.pop("not finite") is True
    assert len(found) == 4 + 2  # two dtypes; and, of two halves of the words, ln p and the gradient
    assert found.pop("gradients, bfloat16") < 2**-7  # the interpreter cuts off where a GPU rounds
    numerics(
        "losses",
        "softmax by its kernels, and its gradient, relative",
        source=LOG_P,
        against="the formula in float64",
        difference=max(found.values()),
        allowed=5e-7,
    )
