"""The `apertus` command line.

Invariants: planning, status, lineage and report import neither torch nor Prefect; help and completion import
no spec, planner or store. Exit code 2 is a user's mistake, with a message; 1 a failed run or an unexpected
error; 130 an interrupted run. Tracebacks are printed with `--debug` only.
"""

import logging
import sys

from flows.cli.app import app

# The commands register on `app`.
from flows.cli.commands import ancestry, keeping, plan, rehearse, run, show, verify  # noqa: F401
from specs.redaction import RedactedRecord


def main() -> None:
    logging.setLogRecordFactory(RedactedRecord)
    try:
        app()
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    main()
