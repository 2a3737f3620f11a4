"""Tasks of a stage run by themselves: quietly, and without the network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.store import Artifact
from tests.apertus_model.corpora import corpus_spec


def test_datatrove_says_nothing_in_the_terminal(
    bench: Any, documents: Path, tokenizer: Artifact, capfd: pytest.CaptureFixture[str]
) -> None:
    bench.run("corpus", "c", corpus_spec(documents, files_per_task=20), {"tokenizer": tokenizer}, workers=2)
    captured = capfd.readouterr()
    assert captured.err == ""
    assert len(captured.out.splitlines()) == 1


def test_importing_datatrove_needs_no_network() -> None:
    program = (
        "import socket\n"
        "def refuse(*args, **kwargs):\n"
        "    raise RuntimeError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "import apertus_model.data.corpora.tokenise\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
