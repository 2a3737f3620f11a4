"""What the terminal shows: every number whole, at the widths of usual terminals, and of what was chosen alone."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.markup import escape
from typer.testing import CliRunner

from flows.cli import __main__ as cli
from flows.cli.__main__ import app
from flows.cli.live import Plain
from flows.cli.tables import make_console, table
from flows.cli.tables import plan as plan_tables
from flows.cli.tables.status import status_rows, status_table
from flows.format import headline, in_full, quantity
from flows.planning.plan import Plan
from tests.flows.conftest import finish

Planned = Callable[..., Plan]


def printed(table: object, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value", "text"), [(25_120, "25,120"), (3, "3"), (4.2863, "4.286"), (9999.4, "9,999"), (31_415.9, "31,416"), (3.338e-06, "3.338e-06")]
)
def test_numbers_are_written_in_full(value: float, text: str) -> None:
    assert in_full(value) == text


def test_counts_in_a_headline_are_whole_and_a_sum_of_nothing_is_zero() -> None:
    assert headline({"conversations": 25_120, "loss": 2.17654}) == "loss 2.177, conversations 25,120"
    assert (quantity(0), quantity(25_120)) == ("0", "25.1k")


@pytest.mark.parametrize("options", [[], ["--debug"]])
def test_what_is_printed_of_an_unexpected_error_and_of_a_warning_holds_no_secret(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], options: list[str]
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


def test_lines_of_progress_come_every_few_seconds_and_the_last_one_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("flows.cli.live.time.monotonic", lambda: now[0])
    lines = Plain(Console(file=io.StringIO(), color_system=None))
    for seconds, done in ((0, 1), (1, 2), (60, 3), (61, 4), (62, 4)):
        now[0] = 100.0 + seconds
        lines.progress("sft", {"done": done, "total": 4, "unit": "steps", "metrics": {}})
    said = lines.console.file.getvalue()  # type: ignore[attr-defined]
    assert said.splitlines() == ["sft: steps 1/4", "sft: steps 3/4", "sft: steps 4/4"]


@pytest.mark.parametrize(("width", "ids"), [(60, False), (80, False), (140, True)])
def test_status_cuts_no_result_at_any_width(planned: Planned, width: int, ids: bool) -> None:
    finish(planned(), metrics={"perplexity": 123.4, "validation_loss": 4.567, "pairs": 25_120, "tokens": 7})
    plan = planned()
    text = printed(status_table(plan, width), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    words = text.replace(",", "").split()
    for number in ("123.4", "4.567", "25120"):
        assert words.count(number) == len(plan.steps)
    assert all((row["fingerprint"][:8] in text) == ids for row in status_rows(plan))


def test_the_table_of_a_run_has_the_chosen_stages_alone(planned: Planned) -> None:
    whole, chosen = (printed(plan_tables.plan_table(planned(), chosen=names), 140) for names in (None, {"tokenizer", "corpus"}))
    assert [name for name in planned().steps if name in whole] == list(planned().steps)
    assert [name for name in planned().steps if f" {name} " in chosen] == ["tokenizer", "corpus/notes"]


@pytest.mark.parametrize(
    ("until", "text"), [([], "All 10 parts of tiny are finished"), (["--until", "main"], "The chosen parts (3 of 10) of tiny are finished")]
)
def test_a_finished_run_counts_what_was_chosen(planned: Planned, recipe: Path, until: list[str], text: str) -> None:
    finish(planned())
    result = CliRunner().invoke(app, ["run", str(recipe), "--store", planned().store.url, *until])
    assert text in result.output


def test_a_schema_that_cannot_be_written_is_a_message(tmp_path: Path) -> None:
    target = tmp_path / "none" / "schema.json"
    result = CliRunner().invoke(app, ["schema", "--output", str(target)], env={"COLUMNS": "300"})
    assert (result.exit_code, f"error: {target}: No such file or directory" in result.output) == (2, True)


ODD = ["[red]x[/red]", ":smile:", "[/]", "a:b", "[bold", "\\\\[red]", ":warning:[link=x]"]


@pytest.mark.parametrize("text", ODD)
def test_what_a_recipe_says_is_printed_as_it_is_written(recipe: Path, tmp_path: Path, text: str) -> None:
    store, name = tmp_path / text.replace("/", "-"), text.replace("/", "-")
    quoted = text.replace("\\", "\\\\")
    recipe.write_text(recipe.read_text().replace("sources:\n", f'description: "{quoted}"\nsources:\n', 1))
    overrides = ["--set", f"sources.notes.license='{text}'", "--set", "stages.pretrain.validation.interval=0"]

    def said(*arguments: str) -> str:
        result = CliRunner().invoke(app, [*arguments, "--store", str(store)], env={"COLUMNS": "300"})
        return "".join(result.output.split("\n"))

    assert text in said("plan", str(recipe), *overrides)
    assert str(store) in said("status", str(recipe), *overrides)
    assert text in said("lineage", str(recipe), "export", *overrides)
    assert f"there is no stage '{name}'" in said("plan", str(recipe), "--set", f"stages.export.after=['{name}']")
    renamed = recipe.with_name("renamed.yaml")
    renamed.write_text(recipe.read_text().replace("  notes: {", f'  "{quoted}": {{', 1))
    assert f"sources.{text}" in said("plan", str(renamed))


@pytest.mark.parametrize("text", ODD)
def test_a_cell_is_as_wide_as_it_is_written(text: str) -> None:
    found = table("title", "", ("name", "result"), [[escape(text), escape(text)]])
    assert found.columns[0].min_width == max(len(text), len("name"))
    console = make_console(width=80, file=io.StringIO(), color_system=None)
    console.print(found)
    assert console.file.getvalue().count(text) == 2  # type: ignore[attr-defined]
