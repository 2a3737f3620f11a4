"""The offline completions of a prompt: those of its conversations and those of generators.

Invariant: completions are in the order of their rewards: first those of the conversations, then those of each
generator, in the order of the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from apertus_model.data.rows import Row, Rows
from infra.store import Attempt


def generated_by(attempt: Attempt) -> list[Rows]:
    """The completions of each generator among the inputs of a part, `generated:<i>`."""
    roles = [role for role in attempt.job.inputs if role.startswith("generated:")]
    return [Rows(attempt.input_artifact(f"generated:{number}")) for number in range(len(roles))]


def offline_completions(
    prompt: Row, generated: Sequence[Row] = (), models: Sequence[str] = ()
) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Yields each completion with its `model` and `persona`, where they are known.

    Args:
        prompt: a row of `prompts`.
        generated: each generator's row for that prompt.
        models: the name of each generator; empty where names do not matter.
    """
    yield from ((completion, {}) for completion in prompt["completions"])
    for number, row in enumerate(generated):
        assert row["id"] == prompt["id"]
        made: dict[str, Any] = {"model": models[number]} if models else {}
        if "persona" in row:
            made["persona"] = row["persona"]
        yield from ((completion, made) for completion in row["completions"])
