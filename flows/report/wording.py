"""Puts numbers and settings into words.

Invariant: the result is plain text; the caller escapes it for the page.
"""

from __future__ import annotations

import json
from typing import Any

from flows.format import amount, in_full
from flows.report.results import number
from flows.report.run_data import StageContent

RESULTS = {
    "loss": "loss {:.3f}",
    "perplexity": "perplexity {}",
    "reward/mean": "reward {:.3g}",
    "vocab_size": "vocabulary {:,}",
    "tokens": "{} tokens",
    "documents": "{} documents",
    "sources": "{:.0f} sources",
    "languages": "{:.0f} languages",
    "lines": "{:,.0f} lines each",
    "parameters": "{} parameters",
    "logit_difference": "logits within {:.1g}",
}
NUMBERS_OF_A_BOX = 2
LISTED = 30  # entries of a long list in the settings


def stage_lines(stage: StageContent) -> list[str]:
    """The main numbers of a stage, the most important first; planned ones where nothing is stored."""
    trained = sum(part.done_tokens for part in stage.parts)
    # the token count of the last part covers that part only
    result = stage.result | ({"tokens": trained} if trained else {})
    lines = [
        text.format(
            amount(value) if text.startswith("{} ") else in_full(value) if text.endswith(" {}") else value
        )
        for name, text in RESULTS.items()
        if (value := number(result.get(name))) is not None
        and not (name == "tokens" and "vocab_size" in stage.result)
    ]
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


def duration(seconds: float) -> str:
    """A duration as `45.2 s`, `3 min 20 s`, `5 h 12 min` or `3 d 4 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    for size, unit, smaller, below in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            whole, rest = divmod(round(seconds), size)
            return f"{whole} {unit} {rest // smaller} {below}"
    raise AssertionError("every duration is below or above a minute")


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
