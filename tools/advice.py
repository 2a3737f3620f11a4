"""The page `docs/advice.md`, made from the codes: `python -m tools.advice > docs/advice.md`."""

from __future__ import annotations

from specs.advice import CODES

INTRODUCTION = """\
# Advice

Made from `specs/advice.py` (`python -m tools.advice > docs/advice.md`). `apertus plan` prints what applies to a recipe behind its tables,
with numbers; `plan --json` has it under `advice`, and what is silenced under `silenced`. Nothing is refused because of it. What is wanted
as it stands is silenced by its code, for a stage or for the whole file:

    silence: [decay-before-sft]
    stages:
      sft: {kind: sft, silence: [sft-optimizer], ...}

A code that does not exist is an error; one that is silenced and does not apply (any more) is noted.

What cannot run is no advice but an error, with exit code 2, before anything starts. So it is with a layout (`launch.parallel`) that does
not divide the model or the batch: heads, feed-forward or vocabulary by `tp` ("n_kv_heads 8 cannot be divided among 16 tensor-parallel
processes; use a divisor of 8"), layers by the stages of a pipeline, sequences by `cp`, the batch by data-parallel processes and
micro-batches, or degrees whose product is not the number of processes. The message has the numbers and the fix.
"""


def markdown() -> str:
    """The page."""
    rows = [f"| `{name}` | {code.when} | {code.reason} | {code.source} |" for name, code in CODES.items()]
    return "\n".join([INTRODUCTION, "| code | given when | reason | source |", "|---|---|---|---|", *rows, ""])


if __name__ == "__main__":
    print(markdown(), end="")
