"""Builds all models of specs that are loaded, so that the children of a process that forks need not do so."""

import specs.job
import specs.stages  # noqa: F401  # with all kinds
from specs.base import Strict


def build(model: type[Strict]) -> None:
    """Builds a model and all that inherit from it."""
    model.model_rebuild()
    for inheriting in model.__subclasses__():
        build(inheriting)


build(Strict)
