from __future__ import annotations

from pathlib import Path

import pytest

from apertus_model.evaluation.harness.code_needs import CodeNeeds, code_needs
from apertus_model.evaluation.harness.tasks import Catalogue, Function, functions

pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")


def needs(folder: Path, code: str, name: str = "used") -> CodeNeeds:
    (folder / "utils.py").write_text(code)
    return code_needs([Function(f"utils.{name}", folder)])


def test_only_reachable_code_counts(tmp_path: Path) -> None:
    found = needs(
        tmp_path,
        "import datasets as d\nimport requests\n"
        "def used(doc): return helper(doc)\n"
        "def helper(doc): return d.load_dataset('a/b', 'c', split='train')\n"
        "def unused(): return requests.post('https://example.org/score')\n",
    )
    assert found.datasets == {("a/b", "c", "train")} and found.services == set()


def test_a_service_a_file_of_the_web_and_a_metric_of_the_hub_differ(tmp_path: Path) -> None:
    for name, code in {
        "a": "import requests\ndef used(x): return requests.post('https://example.org')\n",
        "b": "import requests\ndef used(url='https://example.org/x.json'): return requests.get(url).json()\n",
        "c": "import evaluate as e\nm = e.load('bleu')\ndef used(x): return m\n",
    }.items():
        (tmp_path / name).mkdir()
        found = needs(tmp_path / name, code)
        assert (found.services, found.urls, found.hub_metrics) == {
            "a": ({"requests"}, set(), set()),
            "b": (set(), {"https://example.org/x.json"}, set()),
            "c": (set(), set(), {"bleu"}),
        }[name]


def test_packages_that_are_not_installed_count_unless_they_are_optional(tmp_path: Path) -> None:
    found = needs(
        tmp_path,
        "import no_such_package\n"
        "try:\n    import optional_package\nexcept ImportError:\n    optional_package = None\n"
        "try:\n    import needed_package\nexcept ImportError:\n    raise ImportError('pip')\n"
        "def used(x): return x\n",
    )
    assert found.packages == {"no_such_package", "needed_package"}


@pytest.mark.parametrize(
    ("task", "field", "expected"),
    [
        ("ruler_qa_hotpot", "datasets", set()),
        ("niah_single_2", "datasets", {("baber/paul_graham_essays", None, "train")}),
        ("niah_single_2", "nltk", {"punkt_tab"}),
        ("ifeval", "nltk", {"punkt_tab"}),
        ("realtoxicityprompts", "services", {"requests"}),
        ("humaneval", "hub_metrics", {"code_eval"}),
    ],
)
def test_needs_of_tasks_of_the_harness(task: str, field: str, expected: set[object]) -> None:
    (found,) = Catalogue().tasks(task)
    assert getattr(code_needs(functions(found.config)), field) == expected


def test_files_that_ruler_fetches() -> None:
    (found,) = Catalogue().tasks("ruler_qa_squad")
    hosts = {url.split("/")[2] for url in code_needs(functions(found.config)).urls}
    assert hosts == {"rajpurkar.github.io", "huggingface.co"}
