"""Opens the reward of a spec. Functions of other packages are imported only here, when the stage runs."""

import importlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from apertus_model.files import read_text
from apertus_model.rewards.base import Reward, RewardError, Scored, TooLongError
from apertus_model.rewards.judge import AskedModel, Judge, beginnings
from apertus_model.rewards.stored_answers import StoredAnswers
from apertus_model.rewards.text import grounded_answer, reference_overlap
from apertus_model.server_client import ServerFailure
from apertus_model.vllm_client import Vllm
from infra.store import Attempt
from specs.base import canonical_json
from specs.judge import clauses
from specs.rewards import REWARDS, RewardSpec

FUNCTIONS: dict[str, Callable[[Scored], float]] = {
    "grounded-answer": grounded_answer,
    "reference-overlap": reference_overlap,
}
assert set(FUNCTIONS) == set(REWARDS)


class PerCompletion:
    """A reward that looks at one completion at a time."""

    def __init__(self, function: Callable[[Scored], float]) -> None:
        self._function = function

    def score(self, items: Sequence[Scored]) -> list[float]:
        return [self._function(item) for item in items]


class Imported:
    """The reward `package.module:name` of an installed package: from a prompt's `Scored` to numbers."""

    def __init__(self, function: str) -> None:
        module, _, name = function.partition(":")
        try:
            self.score_all = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise RewardError(
                f"reward {function} cannot be imported: {error}. Fix: install its package, or correct the"
                " name"
            ) from error

    def score(self, items: Sequence[Scored]) -> list[float]:
        return list(self.score_all(list(items)))


def open_reward(spec: RewardSpec, scratch: Path, exported: Path | None = None) -> Reward:
    """The reward of a spec. RewardError when its function or model cannot be opened. `scratch`: a local
    folder that the files of a model are copied to; `exported`: that of the reward model of a stage."""
    if spec.function is None:
        from apertus_model.rewards.classifier import Classifier

        if spec.model is not None:
            return Classifier.open(spec.model, scratch, spec.max_tokens)
        assert exported is not None, "the plan adds the folder"
        return Classifier(exported, str(spec.from_), spec.max_tokens)
    return PerCompletion(FUNCTIONS[spec.function]) if spec.function in FUNCTIONS else Imported(spec.function)


def open_of_part(spec: RewardSpec, attempt: Attempt) -> Reward:
    """The reward of a part with the inputs of `RewardsPart`. RewardError as for `open_reward`."""
    from apertus_model.generation import local_folder

    if spec.judge is not None:
        return open_judge(spec, attempt)
    exported = None
    if spec.from_ is not None:
        exported = local_folder(attempt.input_artifact("reward_model"), attempt.workdir / "reward-model")
    return open_reward(spec, attempt.workdir, exported)


def open_judge(spec: RewardSpec, attempt: Attempt) -> Judge:
    """The judge of a part, with the answers in the store."""
    from apertus_model.generation import local_folder
    from apertus_model.rewards.judge_model import ChatTokens, ServerJudge, TransformersJudge, VllmJudge

    judge = spec.judge
    assert judge is not None, "checked by the caller"
    constitution = read_constitution(judge.constitution)
    model: AskedModel
    stored = attempt.job.inputs["judge"].fingerprint if judge.server is None else None
    if judge.server is not None:
        model = ServerJudge(judge)
        identity: Any = [judge.server.identity_fields(), judge.revision]
    else:
        folder = local_folder(attempt.input_artifact("judge"), attempt.workdir / "judge")
        title = str(judge.from_)
        chat = ChatTokens(folder, title, spec.max_tokens, judge.chat_template_kwargs)
        if judge.engine == "vllm":
            model = VllmJudge(Vllm(folder, attempt.job.launch.tensor_parallel, spec.max_tokens + 1), chat)
        else:
            model = TransformersJudge(folder, title, chat, beginnings(judge, constitution))
        identity = stored if judge.engine == "transformers" else [stored, judge.engine]
    name = canonical_json([identity, judge.chat_template_kwargs])
    known = StoredAnswers(attempt.store, attempt.workdir, stored)
    return Judge(judge, constitution, model, name, known)


def read_constitution(url: str) -> str:
    """The text of a constitution. RewardError when it cannot be read, or has no clauses."""
    text = read_text(url)
    try:
        clauses(text)
    except ValueError as error:
        raise RewardError(f"the constitution {url} cannot be used: {error}") from error
    return text


def score_prompt(reward: Reward, items: Sequence[Scored], prompt: str) -> list[float]:
    """Rewards of the completions of one prompt. RewardError, which names `prompt`, when the reward raises
    or is not a finite number; TooLongError when a completion is too long for it."""
    try:
        values = [float(value) for value in reward.score(items)]
    except ServerFailure:  # another attempt may succeed
        raise
    except Exception as error:  # a user's function can raise anything
        own = isinstance(error, RewardError)
        reason = str(error) if own else f"{type(error).__name__}: {error}"
        kind = TooLongError if isinstance(error, TooLongError) else RewardError
        raise kind(f"no reward for prompt {prompt}: {reason}") from error
    if len(values) != len(items):
        raise RewardError(
            f"the reward gave {len(values)} values for the {len(items)} completions of prompt {prompt}"
        )
    for item, value in zip(items, values, strict=True):
        if not math.isfinite(value):
            raise RewardError(
                f"the reward of prompt {prompt} is {value} for the completion {item.completion[:80]!r}"
            )
    return values
