"""Every command of the tutorial is run, in order, in one shell, from a folder that looks like a checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
EXAMPLE = ROOT / "examples" / "own_data"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


def test_the_recipe_on_the_page_is_that_of_the_example() -> None:
    assert blocks("yaml") == [(EXAMPLE / "recipe.yaml").read_text()]


def test_no_command_of_the_page_escapes_the_test() -> None:
    """But the two of `make`, which CI runs, and the override that is there to fail."""
    outside = re.sub(r"^```bash\n.*?^```$", "", PAGE, flags=re.M | re.S)
    assert re.findall(r"^    (\w+ \w+)", outside, re.M) == ["make run", "make test"]
    assert re.findall(r"`(apertus [^`]+)`", outside) == []


@pytest.mark.slow
def test_the_commands_do_what_the_page_says(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",
    }
    environment.pop("APERTUS_STORE", None)
    script = "set -e\n" + "".join(
        re.sub(r"^(?=\w)", "echo '>>>'\n", block, flags=re.M) for block in blocks("bash")
    )
    done = subprocess.run(
        ["bash", "-c", script], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (
        _,
        _,
        _,
        _,
        planned,
        ran,
        status,
        corpus,
        batch,
        lineage,
        first,
        _,
        changed,
        _,
        longer,
        workers,
        _,
        branched,
        compared,
        against,
        *_,
    ) = done.stdout.split(">>>\n")[1:]
    assert actions(planned) == dict.fromkeys(
        ("tokenizer", "corpus/notes", "main", "pretrain", "export"), "run"
    )
    assert "export: the model is in" in ran
    assert status.count("finished") == 5
    assert "kept: 5 to train on, 1 held out" in corpus
    assert "step 1, 4 sequences of 64 tokens" in batch
    assert "6 files" in lineage
    assert "CC0-1.0" in lineage
    assert "6 files" in first
    assert "texts/recipe.yaml" in first
    assert set(actions(changed).values()) == {"run"}
    assert "documents of notes changed" in changed
    assert actions(longer)["pretrain"] == "resume"
    assert "at step 40 of 60" in longer
    assert set(actions(workers).values()) == {"reuse"}
    assert actions(branched) == {
        **dict.fromkeys(("tokenizer", "corpus/notes", "main", "pretrain"), "reuse"),
        "slower": "run",
        "export": "run",
    }
    assert re.search(r"optimizer\.lr +0\.005 +0\.001", compared)
    assert re.search(r"10,240 loss", compared)
    assert "fields that differ" in against
    assert done.stdout.rpartition(">>>\n")[2].startswith("<s>A river ")
    assert (tmp_path / "my-model" / "report.html").stat().st_size > 100_000
    (session,) = blocks("python")
    subprocess.run([sys.executable, "-c", session], cwd=tmp_path / "my-model", env=environment, check=True)


def actions(plan: str) -> dict[str, str]:
    """What a printed plan does with each part."""
    return dict(re.findall(r"^ (\S+) +(run|reuse|resume) +[-\d]", plan, re.M))
