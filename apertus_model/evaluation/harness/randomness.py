"""Isolates the random numbers that tasks draw from the global generators of Python and NumPy: while they load
their documents (gpqa shuffles choices, ruler writes texts), build their requests, or score answers.

Invariant: a task draws the same numbers as in a run of the harness's command line for that task alone; the
other tasks of a suite change nothing.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np


@contextlib.contextmanager
def own_randomness(seed: int, numpy_seed: int) -> Iterator[None]:
    """Within the block, each task of the harness has generators of its own, which are seeded when the task is
    made."""
    from lm_eval.api.task import ConfigurableTask, Task

    turns = _Turns(seed, numpy_seed)

    def in_turn(function: Any, *, first: bool = False) -> Any:
        @functools.wraps(function)  # the harness looks at the arguments of `__init__`
        def called(task: Any, *arguments: Any, **named: Any) -> Any:
            turns.take(task, first=first)
            return function(task, *arguments, **named)

        return called

    with contextlib.ExitStack() as stack:
        for kind, name in (
            (Task, "__init__"),
            (ConfigurableTask, "__init__"),
            (Task, "build_all_requests"),
            (ConfigurableTask, "process_results"),
        ):
            wrapped = in_turn(getattr(kind, name), first=name == "__init__")
            stack.enter_context(mock.patch.object(kind, name, wrapped))
        yield


class _Turns:
    """The task whose turn it is, and the states of the generators of the other tasks."""

    def __init__(self, seed: int, numpy_seed: int) -> None:
        self._seeds = seed, numpy_seed
        self._task: Any = None
        self._states: dict[int, Any] = {}

    def take(self, task: Any, *, first: bool) -> None:
        """Gives this task its turn, for the `first` time or again."""
        if task is self._task:
            return
        self._states[id(self._task)] = random.getstate(), np.random.get_state()
        self._task = task
        if first:
            random.seed(self._seeds[0])
            np.random.seed(self._seeds[1])
        else:
            state, numpy_state = self._states[id(task)]
            random.setstate(state)
            np.random.set_state(numpy_state)
