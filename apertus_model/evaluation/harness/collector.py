"""The harness's model in the process of a stage: it computes nothing itself, and has all requests of a suite
answered elsewhere, at once.

Invariant: the harness's own code decides what is asked and how answers are scored, whoever computes them.
"""

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.models.huggingface import HFLM

from apertus_model.evaluation.harness.tasks import HarnessError
from apertus_model.tokenizer_files import open_folder


class TaskRequests(NamedTuple):
    """The requests of one task and of one type, in the harness's order."""

    kind: str  # loglikelihood, loglikelihood_rolling or generate_until
    arguments: list[Sequence[Any]]


Answering = Callable[[list[TaskRequests]], list[list[Any]]]
"""A function that answers all requests, in their order."""


class Collector(LM):
    """A model that collects the requests of all tasks while the harness builds them, within `collecting`.
    When the harness asks for the first answer, all requests are answered."""

    apply_chat_template = HFLM.apply_chat_template
    tokenizer_name = HFLM.tokenizer_name

    def __init__(self, folder: Path, chat_template: bool, answering: Answering) -> None:
        """`folder`: the exported model, whose tokenizer writes prompts. HarnessError when `chat_template` is
        asked for, and the tokenizer has none."""
        super().__init__()
        self.chat_template_args: dict[str, Any] = {}
        self.tokenizer = open_folder(folder)
        if chat_template and not self.tokenizer.chat_template:
            raise HarnessError(
                "chat_template is on, and the tokenizer of the model has no chat template. Fix: set"
                " chat_template: false for this suite"
            )
        self._answering = answering
        self._asked: list[list[Instance]] = []
        self._answers: dict[int, deque[Any]] = {}  # by the identity of the request, one for each repeat

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        build = Task.build_all_requests

        def build_all_requests(task: Task, **kwargs: Any) -> None:
            build(task, **kwargs)
            kinds: defaultdict[str, list[Instance]] = defaultdict(list)
            for instance in task.instances:
                kinds[instance.request_type] += [instance] * instance.repeats
            self._asked += kinds.values()

        with mock.patch.object(Task, "build_all_requests", build_all_requests):
            yield

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        """The answers to requests of any type."""
        if not self._answers:
            asked = [
                TaskRequests(some[0].request_type, [request.args for request in some]) for some in self._asked
            ]
            for some, answers in zip(self._asked, self._answering(asked), strict=True):
                for request, answer in zip(some, answers, strict=True):
                    self._answers.setdefault(id(request), deque()).append(answer)
        return [self._answers[id(request)].popleft() for request in requests]

    loglikelihood_rolling = generate_until = loglikelihood
