"""Writes the folder that `harness: {datasets: ...}` names: data sets by Hub id, and the files of the web and
the resources of NLTK that the code of tasks reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from apertus_model.evaluation.harness.needs import NLTK, Needs
from tests.apertus_model.evaluation.task_data import write_dataset
from tests.snapshots.table import Table
from tests.snapshots.web import FILES

NLTK_FOLDERS = {"punkt_tab": "tokenizers", "punkt": "tokenizers", "stopwords": "corpora"}


def write(folder: Path, needs: Iterable[Needs], tables: Mapping[str, Table]) -> Path:
    """All that the tasks need, below `folder`. KeyError for a data set or file that has no table."""
    wanted: dict[str, dict[str, set[str]]] = {}  # splits by data set and subset
    for one in needs:
        for reads in one.reads:
            wanted.setdefault(reads.dataset, {}).setdefault(reads.subset or "default", set()).update(
                reads.splits
            )
        for path in one.files:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(json.dumps(FILES[path]), encoding="utf-8")
        for name in one.nltk:
            write_punkt(folder / NLTK / NLTK_FOLDERS[name] / name / "english")
    for dataset, subsets in wanted.items():
        # the first split gives the types of columns, and answers are null in some test splits
        rows = {
            subset: {split: tables[dataset](subset, split) for split in sorted(splits, reverse=True)}
            for subset, splits in subsets.items()
        }
        write_dataset(folder, dataset, rows)
    return folder


def write_punkt(folder: Path) -> None:
    """Parameters of NLTK's sentence tokenizer that know no abbreviation."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (folder / name).write_text("")
