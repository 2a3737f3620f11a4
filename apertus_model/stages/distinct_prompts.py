"""The `distinct_prompts` part: which pairs of several sets are trained on when sets share prompts.

Artifact: `kept-<i>.npy`, bool of shape (pairs,), for each set.

Invariant: a prompt is trained on in one set only, with all of its pairs there.
"""

import json
from collections import Counter

import numpy as np

from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from infra.store import Attempt
from specs.errors import StageError
from specs.stages.preference_training import DistinctPromptsPart


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the part. StageError when sets share prompts and the spec forbids it."""
    part = DistinctPromptsPart.model_validate(attempt.job.spec)
    owner: dict[str, int] = {}  # by prompt: the first set that has it
    dropped: list[int] = []
    for number, name in enumerate(part.names):
        pairs = attempt.input_artifact(f"pairs:{number}")
        file = "pairs.jsonl" if "pairs.jsonl" in pairs.manifest.files else "completions.jsonl"
        with open(pairs.local(file), "rb") as lines:
            prompts = [json.loads(line)["id"] for line in lines]  # of every pair, or single completion
        owners = [owner.setdefault(prompt, number) for prompt in prompts]
        shared = {prompt: first for prompt, first in zip(prompts, owners, strict=True) if first != number}
        if shared and part.repeated_prompts == "error":
            (first, count), *_ = Counter(shared.values()).most_common(1)
            example = next(prompt for prompt, other in shared.items() if other == first)
            raise StageError(
                f"'{part.names[first]}' and '{name}' both have pairs of {count} prompts, such as {example}."
                f" Fix: set repeated_prompts: first, which keeps them in '{part.names[first]}', or"
                " use other prompts"
            )
        kept = np.array([first == number for first in owners], np.bool_)
        dropped.append(int((~kept).sum()))
        np.save(attempt.workdir / f"kept-{number}.npy", kept, allow_pickle=False)
        attempt.put(attempt.workdir / f"kept-{number}.npy", f"kept-{number}.npy")
        progress.update(number + 1, len(part.names), "sets")
    progress.log(", ".join(f"{name}: {n} pairs dropped" for name, n in zip(part.names, dropped, strict=True)))
    attempt.commit(metrics={"prompts": len(owner), "dropped": dict(zip(part.names, dropped, strict=True))})
