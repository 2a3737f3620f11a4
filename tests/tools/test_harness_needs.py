from __future__ import annotations

from pathlib import Path

import pytest

import apertus_model.evaluation.harness
from apertus_model.evaluation.harness.needs import CodeNeeds
from apertus_model.evaluation.harness.tasks import Function
from tools.harness_needs import code_needs, page

pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")
TABLE = Path(apertus_model.evaluation.harness.__path__[0]) / "code_needs.json"


def needs(folder: Path, code: str, name: str = "used") -> CodeNeeds:
    (folder / "utils.py").write_text(code)
    return code_needs([Function(f"utils.{name}", folder)])


def test_only_reachable_code_counts(tmp_path: Path) -> None:
    needed = needs(
        tmp_path,
        "import datasets as d\nimport requests\n"
        "def used(doc): return helper(doc)\n"
        "def helper(doc): return d.load_dataset('a/b', 'c', split='train')\n"
        "def unused(): return requests.post('https://example.org/score')\n",
    )
    assert needed.datasets == (("a/b", "c", "train"),) and needed.services == ()


def test_a_service_a_file_of_the_web_and_a_metric_of_the_hub_differ(tmp_path: Path) -> None:
    for name, code in {
        "a": "import requests\ndef used(x): return requests.post('https://example.org')\n",
        "b": "import requests\ndef used(url='https://example.org/x.json'): return requests.get(url).json()\n",
        "c": "import evaluate as e\nm = e.load('bleu')\ndef used(x): return m\n",
    }.items():
        (tmp_path / name).mkdir()
        needed = needs(tmp_path / name, code)
        assert (needed.services, needed.urls, needed.hub_metrics) == {
            "a": (("requests",), (), ()),
            "b": ((), ("https://example.org/x.json",), ()),
            "c": ((), (), ("bleu",)),
        }[name]


def test_packages_that_do_not_come_with_the_harness_count_unless_they_are_optional(tmp_path: Path) -> None:
    needed = needs(
        tmp_path,
        "import json, numpy, no_such_package\n"
        "try:\n    import optional_package\nexcept ImportError:\n    optional_package = None\n"
        "try:\n    import needed_package\nexcept ImportError:\n    raise ImportError('pip')\n"
        "def used(x): return x\n",
    )
    assert needed.packages == ("needed_package", "no_such_package")


def test_the_table_is_of_the_installed_harness() -> None:
    assert page() == TABLE.read_text(), "python -m tools.harness_needs > " + str(TABLE)
