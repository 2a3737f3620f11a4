from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from apertus_model.evaluation import sandbox
from apertus_model.evaluation.sandbox import INSTALL, Limits, Outcome, Sandbox, SandboxError, _outcome
from apertus_model.evaluation.sandbox_filter import REFUSED

LEFT = "the program left before the end of its tests"
CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *5 * [ctypes.c_long]]
def call(name, *arguments):
    result = getattr(libc, name)(*arguments)
    if result in (-1, 2**64 - 1):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
"""
"""The start of a program that calls the C library."""
NOT_PERMITTED = "PermissionError: [Errno 1] Operation not permitted"


@pytest.fixture(scope="module")
def box() -> Sandbox:
    if shutil.which("bwrap") is None:
        pytest.skip(f"bubblewrap is not installed: {INSTALL}")
    return Sandbox()


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("def double(x):\n    return 2 * x\nassert double(3) == 6", Outcome(outcome="passed")),
        ("assert 1 == 2, 'differs'", Outcome(outcome="wrong", reason="AssertionError: differs")),
        ("f(1)", Outcome(outcome="crashed", reason="NameError: name 'f' is not defined")),
        (
            "import ctypes; ctypes.string_at(0)",
            Outcome(outcome="crashed", reason="killed by signal 11"),
        ),
        (f"text = '{'ü' * 200_000}'; assert len(text) == 200_000", Outcome(outcome="passed")),
        # As in the published scorer, whose programs have no name.
        ("if __name__ == '__main__':\n    assert False", Outcome(outcome="passed")),
        ("assert list({'a', 'b', 'c', 'd'}) == list({'d', 'c', 'b', 'a'})", Outcome(outcome="passed")),
        ("input()", Outcome(outcome="crashed", reason="EOFError: EOF when reading a line")),
    ],
)
def test_outcomes(box: Sandbox, program: str, outcome: Outcome) -> None:
    assert box.run(program) == outcome


def test_a_program_that_cannot_be_parsed_crashed(box: Sandbox) -> None:
    outcome = box.run("def f(:\n    pass")
    assert (outcome.outcome, outcome.reason[:12]) == ("crashed", "SyntaxError:")


def test_outcomes_have_the_order_of_the_programs(box: Sandbox) -> None:
    outcomes = box.run_all(["pass", "assert 0", "pass", "1 / 0"], workers=2)
    assert [one.outcome for one in outcomes] == ["passed", "wrong", "passed", "crashed"]
    assert box.run_all([]) == []


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("while True: pass", "over 1 s of computing"),
        ("while True: print('x' * 10_000)", "over 1 s of computing"),
        (
            "import signal\nfor one in signal.valid_signals() - {9, 19}:\n"
            "    try: signal.signal(one, signal.SIG_IGN)\n    except OSError: pass\nwhile True: pass",
            "over 1 s of computing",
        ),
    ],
    ids=["loop", "output", "every signal ignored"],
)
def test_a_program_that_computes_for_too_long_timed_out(box: Sandbox, program: str, reason: str) -> None:
    outcome = Sandbox(Limits(cpu_seconds=1, wall_seconds=60)).run(program)
    assert outcome == Outcome(outcome="timed_out", reason=reason)


def test_a_program_killed_before_its_limit_of_computing_crashed() -> None:
    """As by the kernel when the machine has no memory left."""
    limits = Limits(cpu_seconds=3)
    assert _outcome(137, 0.5, b"", "", limits) == Outcome(outcome="crashed", reason="killed by signal 9")
    assert _outcome(137, 2.9, b"", "", limits).outcome == "timed_out"


REAPING = """
import ctypes, os
from apertus_model.evaluation.sandbox import Limits, Sandbox
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans become children of this process, which reaps none
box = Sandbox(Limits(wall_seconds=2))
for program in ("pass", "import time; time.sleep(1000)", "import os; os._exit(1)"):
    print(box.run(program).outcome)
try:
    print(os.wait())
except ChildProcessError:
    print("no process is left")
"""


def test_no_process_of_an_ended_sandbox_waits_for_the_first_process_of_the_machine(box: Sandbox) -> None:
    done = subprocess.run([sys.executable, "-c", REAPING], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["passed", "timed_out", "crashed", "no process is left"]


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit(0)",
        "import ctypes; ctypes.string_at(0)",
        "import os\nfor fd in range(64):\n    try: os.close(fd)\n    except OSError: pass",
        "import os; os.execv('/bin/true', ['true'])",
    ],
)
def test_an_end_before_the_tests_is_no_pass(box: Sandbox, program: str) -> None:
    assert box.run(f"{program}\nassert False").outcome == "crashed"


@pytest.mark.parametrize(
    "program",
    [
        # The form of a verdict without its token, on all that is open.
        'import os\nfor fd in range(32):\n    try: os.write(fd, b\'{"outcome": "passed", "token": "1"}\')\n'
        "    except OSError: pass\nos._exit(0)",
        "print('passed'); import atexit; atexit.register(lambda: print('passed'))\nassert False",
        "import builtins; builtins.AssertionError = int; builtins.BaseException = int\nassert False",
        "import builtins; builtins.exec = builtins.compile = lambda *a, **k: None\nassert False",
        "import os, json; os.write = json.dumps = os._exit = lambda *a: None\nassert False",
        "import sys; sys.excepthook = lambda *a: None; sys.stderr = None\nassert False",
        "import sys; sys.settrace(lambda *a: sys.exit(0))\ndef f(): pass\nf()\nassert False",
        "import os, signal\nsignal.signal(14, lambda *a: os._exit(0))\nsignal.raise_signal(14)\nassert False",
        # Tests that became part of a text.
        "tests = '''",
    ],
)
def test_a_program_does_not_pass_by_pretending(box: Sandbox, program: str) -> None:
    outcome = box.run(f"{program}\nassert False")
    assert outcome.outcome in ("wrong", "crashed"), outcome


@pytest.mark.parametrize("filtered", [True, False])
def test_the_network_is_out_of_reach(monkeypatch: pytest.MonkeyPatch, box: Sandbox, filtered: bool) -> None:
    """By the filter of system calls, and by the namespace without it."""
    if not filtered:
        (group,) = (calls for calls in REFUSED.values() if "socket" in calls)
        monkeypatch.delitem(group, "socket")
        box = Sandbox()
    abstract = f"\0apertus-test-{os.getpid()}"
    refused, outside = "ConnectionRefusedError: [Errno 111] Connection refused", ("192.0.2.1", 80)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(abstract)
        local.listen()
        for one in (server, local):
            one.setblocking(False)
        for family, address, reason in (
            (socket.AF_INET, server.getsockname(), refused),
            (socket.AF_UNIX, abstract, refused),
            (socket.AF_INET, outside, "OSError: [Errno 101] Network is unreachable"),
        ):
            found = box.run(f"import socket; socket.socket({int(family)}).connect({address!r})").reason
            assert found == (NOT_PERMITTED if filtered else reason)
        for one in (server, local):
            with pytest.raises(BlockingIOError):
                one.accept()
    assert box.run("import asyncio; asyncio.run(asyncio.sleep(0))").outcome == "passed"


def test_files_outside_cannot_be_read_or_written(box: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("outside")
    for path in (secret, Path(__file__), Path("/etc/passwd"), Path("/proc/1/environ"), Path("/sys/kernel")):
        assert box.run(f"open({str(path)!r})").reason.startswith("FileNotFoundError"), path
        assert box.run(f"import os; os.listdir({str(path.parent)!r})").reason.startswith(
            "FileNotFoundError"
        ) or path.parent == Path("/"), path
    assert box.run("import os; assert os.listdir(os.path.expanduser('~')) == []").outcome != "passed"
    library = os.__file__
    for new in ("/new", "/usr/lib/new", "/dev/new", library, f"{Path(library).parent}/new.py"):
        assert box.run(f"open({new!r}, 'a')").reason.startswith("OSError: [Errno 30] Read-only file system")
    assert box.run("open('note', 'w').write('x'); assert open('/tmp/note').read() == 'x'").outcome == "passed"
    assert box.run("import os; assert os.listdir('/tmp') == []").outcome == "passed"
    assert secret.read_text() == "outside"


def test_only_the_standard_library_can_be_imported(box: Sandbox) -> None:
    assert box.run("import torch").reason == "ModuleNotFoundError: No module named 'torch'"
    assert box.run("import apertus_model").reason == "ModuleNotFoundError: No module named 'apertus_model'"
    used = "bisect, collections, datetime, decimal, fractions, functools, hashlib, heapq, itertools, math, re"
    assert box.run(f"import {used}, random, statistics, string, typing").outcome == "passed"


def test_the_environment_is_empty(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APERTUS_SECRET", "s")
    program = """
import ctypes, os
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
assert not os.environ and getenv(b"APERTUS_SECRET") is None and getenv(b"PATH") is None
"""
    assert box.run(program) == Outcome(outcome="passed")


def test_open_files_are_not_inherited(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("outside")
    with (tmp_path / "secret").open() as held:
        os.set_inheritable(held.fileno(), True)
        program = """
import os
for descriptor in range(1024):
    try:
        found = os.pread(descriptor, 1000, 0)
    except OSError:
        continue
    assert b"out" + b"side" not in found
"""
        assert box.run(program) == Outcome(outcome="passed")


@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True: os.fork()",
        "import os\nwhile True: os.posix_spawn('/bin/true', ['true'], {})",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
        "import subprocess\nwhile True: subprocess.Popen(['/bin/true'])",
    ],
    ids=["fork", "spawn", "threads", "subprocess"],
)
def test_a_fork_bomb_ends_with_its_first_process(box: Sandbox, program: str) -> None:
    outcome = box.run(program)
    assert outcome.outcome == "crashed"
    assert outcome.reason.startswith(("PermissionError", "BlockingIOError", "RuntimeError: can't start new"))


def test_other_processes_get_no_signals(box: Sandbox) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        for pid in (other.pid, os.getpid()):
            assert (
                box.run(f"import os; os.kill({pid}, 9)").reason
                == "ProcessLookupError: [Errno 3] No such process"
            )
        box.run("import os; os.kill(os.getppid(), 9)")
        box.run("import os; os.killpg(0, 9)")
        box.run("import os; os.kill(-1, 9)")
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("x = bytearray(2 << 30)", "MemoryError"),
        (
            "from mmap import mmap\nparts = [mmap(-1, 600 << 20, 0x22), mmap(-1, 600 << 20, 0x22)]",
            "OSError: [Errno 12] Cannot allocate memory",
        ),
        ("f = open('a', 'wb')\nwhile True: f.write(bytes(1 << 20))", "OSError: [Errno 27] File too large"),
        (
            "for i in range(10**6): open(str(i), 'wb').write(bytes(1 << 20))",
            "OSError: [Errno 28] No space left on device",
        ),
        ("kept = [open(f'{i}', 'w') for i in range(99)]", "OSError: [Errno 24] Too many open files: "),
        (
            "import os\nfor i in range(2000): os.mkdir(str(i))",
            "OSError: [Errno 28] No space left on device: '1023'",
        ),
        (
            "import os\nfor i in range(2000): os.symlink('x' * 200, str(i))",
            "OSError: [Errno 28] No space left",
        ),
        ("import os\nfor i in range(2000): os.mkfifo(str(i))", "OSError: [Errno 28] No space left on device"),
        (
            "for i in range(2000): open(str(i), 'w').close()",
            "OSError: [Errno 28] No space left on device: '1023'",
        ),
        (
            "import os\nopen('a', 'w')\nfor i in range(2000): os.link('a', str(i))",
            "OSError: [Errno 28] No space",
        ),
        (
            "import os\nopen('a', 'w')\nfor i in range(40): os.setxattr('a', f'user.{i}', bytes(1 << 15))",
            NOT_PERMITTED,
        ),
        (f"{CALL}while True: call('semget', 0, 32000, 0o1600)", NOT_PERMITTED),
        # What is unmapped stays in memory while its first page is mapped.
        (f"{CALL}while True: call('mmap', None, 64 << 20, 3, 0x21, -1, 0)", NOT_PERMITTED),
        (f"{CALL}call('prctl', 78, 1, 1 << 22, 0, 0)", NOT_PERMITTED),  # a table of futexes: 256 MiB
        ("import socket; socket.socketpair()[0].setsockopt(1, 7, 1 << 30)", NOT_PERMITTED),  # a buffer
        (f"{CALL}while True: call('timer_create', 1, None, bytes(8))", "BlockingIOError: [Errno 11]"),
        (f"{CALL}call('mount', b'x', b'/tmp', b'tmpfs', 32, b'nr_inodes=0')", NOT_PERMITTED),
        (
            "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))",
            "ValueError: not allowed to raise maximum limit",
        ),
    ],
)
def test_a_program_that_wants_more_than_its_limits_crashed(box: Sandbox, program: str, reason: str) -> None:
    outcome = box.run(program)
    assert outcome.outcome == "crashed"
    assert outcome.reason.startswith(reason)


def test_programs_run_from_any_thread(box: Sandbox) -> None:
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(box.run("assert True")))
    thread.start()
    thread.join()
    assert outcomes == [Outcome(outcome="passed")]


def test_without_bubblewrap_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SandboxError, match=r"bubblewrap is not installed\. Fix: apt-get install bubblewrap"):
        Sandbox()


@pytest.fixture
def refusing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bubblewrap on a machine that allows it nothing."""
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(program))


@pytest.mark.usefixtures("refusing")
def test_where_bubblewrap_may_do_nothing_the_reason_is_its_own() -> None:
    with pytest.raises(SandboxError, match=r"\(bwrap: No permissions to create a new namespace\)\. Fix: "):
        Sandbox()


@pytest.mark.parametrize(
    ("left_out", "reason"),
    [
        (".*", r"cannot run a program here \(bubblewrap made no namespace of processes\)\. Fix: "),
        (
            "--unshare-pid|--as-pid-1",
            r"cannot run a program here \(bubblewrap made no namespace of processes\)\. Fix: ",
        ),
        ("CAP_SYS_ADMIN|--cap-add", r"cannot run a program here \(mount: Operation not permitted\)\. Fix: "),
        ("--remount-ro|/", "does not isolate programs on this machine"),
    ],
)
def test_a_sandbox_that_does_not_hold_is_refused(
    box: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: str, reason: str
) -> None:
    """A bubblewrap without some of its options; without all, no bubblewrap."""
    real, program = shutil.which("bwrap"), tmp_path / "bwrap"
    program.write_text(
        f"""#!{sys.executable}
import os, re, sys
at = sys.argv.index("--")
kept = [one for one in sys.argv[1:at] if not re.fullmatch({left_out!r}, one)]
os.execv(*(({real!r}, ["bwrap", *kept, *sys.argv[at:]]) if kept else (sys.argv[at + 1], sys.argv[at + 1 :])))
"""
    )
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(program))
    with pytest.raises(SandboxError, match=reason):
        Sandbox()


def test_a_program_has_no_capability_even_if_it_executes_another(box: Sandbox) -> None:
    program = f"""{CALL}
import struct, sys
found = ctypes.create_string_buffer(24)
call("capget", struct.pack("II", 0x20080522, 0), found)
assert found.raw == bytes(24), found.raw
"""
    assert box.run(program) == Outcome(outcome="passed")
    again = f"{program}\nctypes.string_at(0)"
    started = box.run(f"import os, sys; os.execv(sys.executable, ['python', '-c', {again!r}])")
    assert started == Outcome(outcome="crashed", reason="killed by signal 11")


@pytest.mark.usefixtures("box")
def test_another_kind_of_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(SandboxError, match="x86_64 and aarch64; this machine is riscv64"):
        Sandbox()


def test_limits_are_stated_for_one_process() -> None:
    assert Limits(memory=5, cpu_seconds=2).rlimits()["RLIMIT_AS"] == (5, 5)
    assert Limits(cpu_seconds=2).rlimits()["RLIMIT_CPU"] == (2, 2)
    assert sandbox.KINDS == ("passed", "wrong", "crashed", "timed_out")
