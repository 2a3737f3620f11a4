"""Small snapshots of data sets, with the columns and the layout of the real ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

Rows = list[dict[str, Any]]
ARC, WIKITEXT, GSM8K = "allenai/ai2_arc", "EleutherAI/wikitext_document_level", "openai/gsm8k"
GPQA = "Idavidrein/gpqa"


def write_dataset(datasets: Path, name: str, subsets: Mapping[str, Mapping[str, Rows]]) -> Path:
    """A data set of Parquet files as its repository has it: a README whose `configs:` name the subsets, and
    their splits."""
    folder = datasets / name
    card = ["---", "license: other", "configs:"]
    for subset, splits in subsets.items():
        card += [f"- config_name: {subset}", "  data_files:"]
        for split, rows in splits.items():
            file = folder / subset / f"{split}-00000-of-00001.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
            card += [f"  - split: {split}", f"    path: {subset}/{split}-*"]
    (folder / "README.md").write_text("\n".join([*card, "---", "", f"# {name}", ""]))
    hidden = folder / ".cache" / "huggingface" / "download"  # what `hf download` leaves there
    hidden.mkdir(parents=True)
    (hidden / "README.md.metadata").write_text("a time")
    return folder


def arc_rows(count: int) -> Rows:
    return [
        {
            "id": f"q{index}",
            "question": f"Which of these is number {index}?",
            "choices": {
                "text": [f"number {index}", f"the word {index + 3}", "neither", "both of them"],
                "label": list("ABCD"),
            },
            "answerKey": "ABCD"[index % 4],
        }
        for index in range(count)
    ]


def write_arc(datasets: Path, count: int = 6) -> Path:
    rows = arc_rows(count)
    return write_dataset(
        datasets, ARC, {"ARC-Easy": {"train": rows[:5], "validation": rows[:2], "test": rows}}
    )


def write_wikitext(datasets: Path, count: int = 3) -> Path:
    rows = [
        {"page": f" = Title {index} = \n\n" + "some words , and more . " * (index + 4)}
        for index in range(count)
    ]
    splits = {"train": rows, "validation": rows[:1], "test": rows}
    return write_dataset(datasets, WIKITEXT, {"wikitext-2-raw-v1": splits})


def write_gsm8k(datasets: Path, count: int = 4) -> Path:
    rows = [
        {"question": f"What is {index} and {index}?", "answer": f"It is twice {index}.\n#### {2 * index}"}
        for index in range(8)
    ]
    return write_dataset(datasets, GSM8K, {"main": {"train": rows, "test": rows[:count]}})


def write_gpqa(datasets: Path, count: int = 6) -> Rows:
    """Two subsets, whose tasks shuffle the choices while they load them; the rows of `gpqa_main`."""
    subsets = {
        subset: [
            {"Question": f"Which is {subset} {index}?", "Correct Answer": f"right {index}"}
            | {f"Incorrect Answer {number}": f"wrong {number} of {index}" for number in (1, 2, 3)}
            for index in range(count)
        ]
        for subset in ("gpqa_main", "gpqa_diamond")
    }
    write_dataset(datasets, GPQA, {subset: {"train": rows} for subset, rows in subsets.items()})
    return subsets["gpqa_main"]


def write_jsonl(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
