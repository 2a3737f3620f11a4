"""Runs one program inside the sandbox. `sandbox.py` hands the text of this file to an isolated interpreter:
nothing here imports the project, or anything outside the standard library.

Standard input: eight bytes with the length of the request, the request as JSON (`program`, `limits` by the
names of `resource`, `temporary` with the mount options of /tmp, `filter` in hexadecimal), and a token.
Standard output: `started`, then one line of JSON (`outcome`, `reason`).

Invariant: the token is read only after the last statement of the program, and "passed" holds it, so a
program that prints, exits or is killed has not passed. A program that searches its own process for the token
can find it, as it can return values that equal everything: where tests and code share a process, as in the
published tasks, nothing prevents that.
"""

import ctypes
import json
import os
import resource
import struct
from typing import NoReturn

LONGEST_REASON = 200
NOSUID_NODEV = 6
SET_SECCOMP, SECCOMP_FILTER = 22, 2
NO_CAPABILITY = struct.pack("II", 0x20080522, 0), bytes(24)


def describe(error: BaseException) -> str:
    """`ValueError: text`, shortened. The text is made by code of the program, which may fail."""
    try:
        text = str(error)
    except BaseException:
        text = ""
    name = type(error).__name__
    return f"{name}: {text}"[:LONGEST_REASON] if text else name


def confine(temporary: str, instructions: bytes) -> None:
    """Mounts an empty /tmp, whose number of files bubblewrap cannot bound; then drops the capability to do
    so, and sets the filter of system calls. Ends the process if it is in no sandbox, or if a call fails."""
    if os.getpid() != 1:
        raise SystemExit("bubblewrap made no namespace of processes")
    libc, flags = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong(NOSUID_NODEV)
    code = ctypes.create_string_buffer(instructions)
    program = struct.pack("HP", len(instructions) // 8, ctypes.addressof(code))
    for call, *arguments in (
        ("mount", b"tmpfs", b"/tmp", b"tmpfs", flags, temporary.encode()),
        ("capset", *NO_CAPABILITY),
        ("prctl", SET_SECCOMP, ctypes.c_ulong(SECCOMP_FILTER), program),
    ):
        if getattr(libc, call)(*arguments) != 0:
            raise SystemExit(f"{call}: {os.strerror(ctypes.get_errno())}")
    os.chdir("/tmp")


def main() -> NoReturn:
    """Runs the program of the request with its limits, and ends the process."""
    receive, write, leave, dumps = os.read, os.write, os._exit, json.dumps
    with os.fdopen(os.dup(0), "rb", buffering=0) as source:
        request = json.loads(source.read(int.from_bytes(source.read(8), "big")))
    confine(request["temporary"], bytes.fromhex(request["filter"]))
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
        result = {"outcome": "passed", "reason": "", "token": receive(token, 64).decode()}
    write(verdict, dumps(result).encode())
    leave(0)


if __name__ == "__main__":
    main()
