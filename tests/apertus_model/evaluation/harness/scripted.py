"""A model of the harness that says what a test wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.model import LM


class Scripted(LM):
    """Answers a prompt by a function of the prompt and of how often it was asked before."""

    def __init__(self, answer: Callable[[str, int], str]) -> None:
        super().__init__()
        self._answer = answer
        self.asked: dict[str, int] = {}

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        answers = []
        for request in requests:
            prompt = request.args[0]
            answers.append(self._answer(prompt, self.asked.setdefault(prompt, 0)))
            self.asked[prompt] += 1
        return answers

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        raise NotImplementedError
