"""Rewards of completions, by name and version; the functions are in `apertus_model.rewards`.

Invariant: a reward is identified by its name and version, by the digest of its model, or by what a judge is
asked (`specs.judge`). The version is raised when its values change.
"""

import re
from collections.abc import Iterator
from typing import Any

from pydantic import model_validator

from specs.base import Spec, execution, location, option, reference
from specs.judge import Judge
from specs.launch import HeldModel
from specs.sources import FUNCTION, Url
from specs.units import Reference

CLASSIFIER_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
"""Files of the folder of a sequence classifier."""
REWARDS: dict[str, int] = {"grounded-answer": 1, "reference-overlap": 1}


class RewardSpec(Spec):
    """A reward: one of `function`, `model`, `from` and `judge`."""

    function: str | None = option(
        None, description=f"{', '.join(REWARDS)}, or `package.module:name` of an installed package"
    )
    version: int | None = option(None, ge=1, description="version of an installed function")
    model: Url | None = location(
        None,
        description="folder (any fsspec URL) with a Hugging Face sequence classifier of one output",
    )
    from_: Reference | None = reference(
        None, alias="from", to="reward_model", description="a `reward_model` stage of this recipe"
    )
    judge: Judge | None = option(None, description="a language model that is asked, with a constitution")
    max_tokens: int = option(
        4096, ge=1, description="maximum tokens of the model's input; a longer input is an error"
    )

    parameters: int | None = execution(
        None,
        ge=1,
        description="number of parameters of the model, for estimates while its folder is unavailable",
    )

    @property
    def name(self) -> str:
        if self.judge is not None:
            return f"of the judge {self.judge.from_ or self.judge.revision}"
        return self.function or self.model or str(self.from_)

    @property
    def held_model(self) -> HeldModel | None:
        """The model that a process holds in order to score; None if it holds none."""
        if (judge := self.judge) is None:
            return HeldModel("reward_model") if self.function is None else None
        vllm = judge.engine == "vllm"
        return HeldModel("judge", vllm=vllm, shared=vllm) if judge.server is None else None

    @model_validator(mode="before")
    @classmethod
    def _fill_version(cls, data: Any) -> Any:
        data = {"function": data} if isinstance(data, str) else data
        version = REWARDS.get(str(data.get("function"))) if isinstance(data, dict) else None
        return {"version": version, **data} if version else data

    def conflicts(self) -> Iterator[str]:
        if [self.function, self.model, self.from_, self.judge].count(None) != 3:
            yield (
                "a reward is a function, a model, a stage or a judge; set one of function, model, from, judge"
            )
        if self.parameters is not None and self.model is None and self.judge is None:
            yield "parameters are those of a model's folder; leave them out, or set model or judge"
        if self.function is None:
            return
        if self.function in REWARDS:
            if self.version != REWARDS[self.function]:
                yield (
                    f"reward {self.function} has version {REWARDS[self.function]} here, not {self.version};"
                    " leave version out"
                )
        elif not re.fullmatch(FUNCTION, self.function):
            yield (
                f"there is no reward {self.function!r}; use one of {', '.join(REWARDS)} or"
                " package.module:name"
            )
        elif self.version is None:
            yield (
                f"reward {self.function} states no version; add version: 1, and raise it when its values"
                " change"
            )
