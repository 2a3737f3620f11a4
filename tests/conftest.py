"""For all tests: Hypothesis tries the same examples in every run, so that a red run is red again; HYPOTHESIS_PROFILE=random looks for new
ones."""

import os

from hypothesis import settings

from tests.numerics import numerics, pytest_addoption, pytest_sessionfinish

__all__ = ["numerics", "pytest_addoption", "pytest_sessionfinish"]

settings.register_profile("fixed", derandomize=True)
settings.register_profile("random")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
