"""The offline completions of a prompt: those of its conversations, and those of generators.

Invariant: their order is that of their rewards: the conversations', then each generator's, as in the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from apertus_model.data.rows import Row, Rows
from infra.store import Attempt


def generated_by(attempt: Attempt) -> list[Rows]:
    """The completions of each generator, of a part with the inputs `generated:<i>`."""
    roles = [role for role in attempt.job.inputs if role.startswith("generated:")]
    return [Rows(attempt.input_artifact(f"generated:{number}")) for number in range(len(roles))]


def offline_completions(
    prompt: Row, generated: Sequence[Row] = (), models: Sequence[str] = ()
) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Each completion, and its `model` and `persona` where it has them.

    Args:
        prompt: a row of `prompts`.
        generated: the row of that prompt of each generator.
        models: the name of each; none where they do not matter.
    """
    yield from ((completion, {}) for completion in prompt["completions"])
    for number, row in enumerate(generated):
        assert row["id"] == prompt["id"]
        made: dict[str, Any] = {"model": models[number]} if models else {}
        if "persona" in row:
            made["persona"] = row["persona"]
        yield from ((completion, made) for completion in row["completions"])
