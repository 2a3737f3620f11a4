"""Puts numbers and settings into words.

Invariant: the result is plain text; the caller escapes it for the page.
"""

import json
from typing import Any

from flows.format import amount, main_numbers
from flows.report.run_data import StageContent

NUMBERS_OF_A_BOX = 2
LISTED = 30  # entries of a long list in the settings


def stage_lines(stage: StageContent) -> list[str]:
    """The main numbers of a stage, the most important first; planned ones where nothing is stored."""
    trained = sum(part.done_tokens for part in stage.parts)
    # the token count of the last part covers that part only, and that of a tokenizer is of no interest
    tokens = trained or (0 if "vocab_size" in stage.result else stage.result.get("tokens", 0))
    lines = main_numbers(stage.result)
    if tokens:
        lines.insert(1, f"{amount(tokens)} tokens")
    planned = sum(part.node.tokens for part in stage.parts)
    if not lines and planned:
        return [f"{amount(planned)} tokens planned"]
    return lines[:NUMBERS_OF_A_BOX]


def elided(text: str, length: int) -> str:
    """A long name without its middle: siblings (`evaluate-aligned-qrpo`, `-dpo`) differ at the end."""
    if len(text) <= length:
        return text
    end = length // 2
    return f"{text[: length - end - 1]}…{text[-end:]}"


def shown(value: Any) -> str:
    """Any value of a manifest as short text."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(item)}" for name, item in value.items()) or "–"
    if isinstance(value, list):
        more = f", … ({len(value)} in all)" if len(value) > 12 else ""
        return ", ".join(map(shown, value[:12])) + more or "–"
    return str(value)


def signed(value: float | None) -> str:
    """A difference, with its sign."""
    return "–" if value is None else f"{value:+.4g}"


def pretty(settings: Any) -> str:
    """Settings as indented JSON, with long lists, such as the files of a source, shortened."""
    return json.dumps(_shortened(settings), indent=2, ensure_ascii=False)


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shortened(item) for name, item in value.items()}
    if isinstance(value, list):
        more = [f"… and {len(value) - LISTED:,} more"] if len(value) > LISTED else []
        return [_shortened(item) for item in value[:LISTED]] + more
    return value
