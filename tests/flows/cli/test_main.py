"""What the command line loads, and errors that nobody expected."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from flows.cli import __main__ as cli


@pytest.mark.parametrize("options", [[], ["--debug"]])
def test_what_is_printed_of_an_unexpected_error_and_of_a_warning_holds_no_secret(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
) -> None:
    def fail(*arguments: object) -> None:
        logging.getLogger("infra.store.storage.retry").warning("%s failed", "https://h/x?sig=abc")
        raise RuntimeError("https://user:a/b@h/x")

    monkeypatch.setattr("flows.cli.commands.show.make_plan", fail)
    monkeypatch.setattr(sys, "argv", ["apertus", *options, "status", "mini.yaml"])
    before = logging.getLogRecordFactory()
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        logging.setLogRecordFactory(before)
    printed = capsys.readouterr().err
    assert ended.value.code == 1
    assert "unexpected RuntimeError: https://***@h/x" in printed
    assert ("Traceback" in printed) == bool(options)
    assert "a/b@h" not in printed
    assert caplog.messages == ["https://h/x?sig=*** failed"]


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"]])
def test_help_loads_no_spec_planner_or_store(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom flows.cli.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "names = ('specs.base', 'fsspec', 'yaml', 'infra.store', 'flows.planning', 'torch', 'prefect')\n"
        "print([name for name in names if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
