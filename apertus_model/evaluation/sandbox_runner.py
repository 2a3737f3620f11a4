"""Runs one program inside the sandbox. `sandbox.py` hands the text of this file to an isolated interpreter:
nothing here imports the project, or anything outside the standard library.

Standard input: eight bytes with the length of the request, the request as JSON (`program`, `limits` by the
names of `resource`), and a token. Standard output: `started`, then one line of JSON (`outcome`, `reason`).

Invariant: the token is read only after the last statement of the program, and "passed" holds it, so a
program that prints, exits or is killed has not passed. A program that searches its own process for the token
can find it, as it can return values that equal everything: where tests and code share a process, as in the
published tasks, nothing prevents that.
"""

from __future__ import annotations

import json
import os
import resource
from typing import NoReturn

LONGEST_REASON = 200


def describe(error: BaseException) -> str:
    """`ValueError: text`, shortened. The text is made by code of the program, which may fail."""
    try:
        text = str(error)
    except BaseException:
        text = ""
    name = type(error).__name__
    return f"{name}: {text}"[:LONGEST_REASON] if text else name


def main() -> NoReturn:
    """Runs the program of the request with its limits, and ends the process."""
    read, write, leave, dumps = os.read, os.write, os._exit, json.dumps
    with os.fdopen(os.dup(0), "rb", buffering=0) as source:
        request = json.loads(source.read(int.from_bytes(source.read(8), "big")))
    token, verdict, nothing = os.dup(0), os.dup(1), os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.environ.clear()
    for name, (soft, hard) in request["limits"].items():
        resource.setrlimit(getattr(resource, name), (soft, hard))
    write(verdict, b"started\n")
    program = request["program"]
    del request, source
    try:
        # Without names, as in the published scorer: what is below `if __name__ == "__main__"` does not run.
        exec(compile(program, "<program>", "exec", dont_inherit=True), {})
    except AssertionError as error:
        result = {"outcome": "wrong", "reason": describe(error)}
    except SystemExit:
        result = {"outcome": "crashed", "reason": "the program left before the end of its tests"}
    except BaseException as error:
        result = {"outcome": "crashed", "reason": describe(error)}
    else:
        result = {"outcome": "passed", "reason": "", "token": read(token, 64).decode()}
    write(verdict, dumps(result).encode())
    leave(0)


if __name__ == "__main__":
    main()
