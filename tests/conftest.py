from tests.numerics import numerics, pytest_addoption, pytest_sessionfinish

__all__ = ["numerics", "pytest_addoption", "pytest_sessionfinish"]
