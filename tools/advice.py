"""Makes the page `docs/advice.md` from the codes of advice: `python -m tools.advice > docs/advice.md`."""

from __future__ import annotations

from specs.advice import CODES

INTRODUCTION = """\
# Advice

Made from `specs/advice.py` (`python -m tools.advice > docs/advice.md`). `apertus plan` prints the advice that
applies to a recipe after its tables, with numbers; `plan --json` has it under `advice`, and silenced advice
under `silenced`. Advice refuses nothing. A code is silenced for a stage or for the whole file:

    silence: [decay-before-sft]
    stages:
      sft: {kind: sft, silence: [sft-optimizer], ...}

An unknown code is an error; a silenced code that does not apply is noted.

What cannot run, such as a layout that does not divide the model or the batch, is no advice but an error with
exit code 2, before anything starts ([parallelism](parallelism.md)).
"""


def markdown() -> str:
    """The page in Markdown."""
    rows = [f"| `{name}` | {code.when} | {code.reason} | {code.source} |" for name, code in CODES.items()]
    return "\n".join(
        [INTRODUCTION, "| code | given when | reason | source |", "|---|---|---|---|", *rows, ""]
    )


if __name__ == "__main__":
    print(markdown(), end="")
