"""Options: identity fields that enter a fingerprint only where a recipe changes them."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticUndefined

from specs.base import identity


def option(default: Any = PydanticUndefined, **options: Any) -> Any:
    """An identity field whose default is neutral, so that adding it invalidates nobody's store."""
    if (factory := options.get("default_factory")) is not None:
        default = factory()
    else:
        options["default"] = default
    return identity(neutral=default, **options)
