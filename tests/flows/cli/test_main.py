"""Errors that nobody expected, at the end of the command line."""

from __future__ import annotations

import logging
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
