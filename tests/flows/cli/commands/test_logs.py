from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from flows.cli.__main__ import app
from flows.planning.plan import Plan


def test_lines_of_several_parts_begin_with_the_part(recipe: Path, planned: Callable[..., Plan]) -> None:
    plan = planned()
    for name in ("pretrain/1", "pretrain/2"):
        plan.store.write_bytes(f"{plan.graph.nodes[name].path}/logs/a.txt", f"[{name}] begins\n".encode())

    def printed(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["logs", str(recipe), *arguments, "--store", plan.store.url])
        assert result.exit_code == 0, result.output
        return result.output

    assert printed("pretrain") == "pretrain/1 | [pretrain/1] begins\npretrain/2 | [pretrain/2] begins\n"
    assert printed("pretrain/2") == "[pretrain/2] begins\n"
    assert printed("export") == ""
