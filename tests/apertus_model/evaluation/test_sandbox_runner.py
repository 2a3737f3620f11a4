"""What the runner says about programs that do no harm, without a sandbox."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from apertus_model.evaluation import sandbox_runner
from apertus_model.evaluation.sandbox_runner import LONGEST_REASON, confine, describe

WITHOUT_SANDBOX = f"""
from {sandbox_runner.__name__} import main
main.__globals__["confine"] = lambda temporary, instructions: None
main()
"""


def run(program: str) -> tuple[bytes, bytes]:
    """Standard output and standard error."""
    limits = {"RLIMIT_CORE": [0, 0]}
    request = json.dumps({"program": program, "limits": limits, "temporary": "", "filter": ""}).encode()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_SANDBOX],
        input=len(request).to_bytes(8, "big") + request + b"a token",
        capture_output=True,
    )
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("x = 1", {"outcome": "passed", "reason": "", "token": "a token"}),
        ("assert 0", {"outcome": "wrong", "reason": "AssertionError"}),
        ("{}[1]", {"outcome": "crashed", "reason": "KeyError: 1"}),
    ],
)
def test_a_verdict_follows_the_start(program: str, verdict: dict[str, str]) -> None:
    started, line = run(program)[0].splitlines()
    assert (started, json.loads(line)) == (b"started", verdict)


def test_what_a_program_prints_is_dropped() -> None:
    output, errors = run("import sys; print('text'); print('text', file=sys.stderr)")
    assert b"text" not in output + errors


def test_a_program_that_leaves_has_no_verdict() -> None:
    assert run("import os; os._exit(0)") == (b"started\n", b"")


def test_a_reason_is_short() -> None:
    assert len(describe(ValueError("x" * 1000))) == LONGEST_REASON


def test_an_error_whose_text_cannot_be_made_is_named() -> None:
    class Bad(Exception):
        def __str__(self) -> str:
            raise KeyError

    assert describe(Bad()) == "Bad"


def test_it_confines_the_first_process_of_a_namespace_only() -> None:
    """So it mounts nothing over the /tmp of a machine."""
    with pytest.raises(SystemExit, match="bubblewrap made no namespace of processes"):
        confine("nr_inodes=2", b"")
