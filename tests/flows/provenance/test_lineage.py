"""A lineage leads from an export to the last source file, from a plan and from a store alone."""

from __future__ import annotations

import hashlib
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from flows.planning.plan import Plan, make
from flows.provenance import lineage
from flows.provenance.lookup import find
from flows.provenance.picture import svg
from infra.store import Attempt, Store, StoreError
from infra.store.inputs import lock, recorded_files
from specs.recipe import load
from tests.flows.conftest import finish, job_of
from tests.flows.finished import invoke, read_json, spec_of
from tests.recipes import RECIPE, write_recipe


def auditable(found: lineage.Lineage) -> None:
    (use,) = found.source_uses()
    assert (use.source.name, use.source.license, use.source.language, use.tokens_held) == (
        "notes",
        "CC0-1.0",
        "en",
        40_000,
    )
    # pretrain/1 and cooldown draw from `main`, whose recipe is stored
    assert use.tokens_trained_on == 8 * 128 + 6 * 8 * 32
    text = svg(found, "a <title>")
    root = ElementTree.fromstring(text)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a <title>", "licence: CC0-1.0", "corpus/notes", "pretrain/1", "export"} <= set(texts)
    assert "<script" not in text and "href" not in text


def test_a_lineage_leads_from_the_export_to_the_last_source_file(
    done: Plan, recipe: Path, tmp_path: Path
) -> None:
    url = done.store.url
    facts = ["--set", "sources.notes.license=CC0-1.0", "--set", "sources.notes.language=en"]
    auditable(lineage.of_plan(done, ["export"]))
    text = invoke(
        "lineage",
        str(recipe),
        "export",
        "--store",
        url,
        *facts,
        "--files",
        "--picture",
        str(tmp_path / "l.svg"),
    ).output
    assert "30 read, 20 documents with 40,000 tokens to train on, 4 held out" in text
    assert "filters dropped: length 5, alphabetic 1" in text
    assert (tmp_path / "l.svg").exists()
    for path in sorted((tmp_path / "documents").glob("*.txt")):
        assert (
            f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.stat().st_size:>12,}  {path.name}"
            in text
        )
    document = read_json("lineage", str(recipe), "export", "--store", url, *facts, "--files", "--json")
    corpus = document["inputs"]["checkpoint"]["inputs"]["mixture"]["inputs"]["source:0"]
    assert corpus["metrics"]["dropped"] == {"length": 5, "alphabetic": 1}
    documents = corpus["inputs"]["documents"]
    assert documents["source"]["license"] == "CC0-1.0" and len(documents["files"]) == 30


def test_the_store_alone_is_enough(done: Plan, tmp_path: Path) -> None:
    export = done.graph.nodes["export"]
    folder = tmp_path / "elsewhere"
    shutil.copytree(Path(done.store.full(export.path)) / "attempts" / "attempt-export", folder)
    shutil.rmtree(tmp_path / "documents")
    for name in (export.path, export.fingerprint[:8], "tiny", "tiny:export", str(folder)):
        assert [(found.path, found.step) for found in find(done.store, name)] == [(export.path, None)], name
    auditable(lineage.of_store(done.store, export.path, None))
    document = read_json("lineage", str(folder), "--store", done.store.url, "--json")
    assert (document["name"], document["fingerprint"]) == ("export", export.fingerprint)
    (folder / "model.safetensors").write_bytes(b"Weights")
    result = invoke("lineage", str(folder), "--store", done.store.url)
    assert result.exit_code == 2 and "no export in the store" in result.output


SAME_FILES = RECIPE.replace(
    "stages:",
    """\
  poems: {{url: "{documents}", format: code, include: ["*.txt"], language: de, license: CC-BY-4.0}}
stages:""",
).replace("sources: {{notes: {{holdout: 0.2}}}}", "sources: {{notes: {{holdout: 0.2}}, poems: {{}}}}")


def test_sources_of_the_same_files_stay_apart_with_their_facts(tmp_path: Path, store: Store) -> None:
    weights = "stages.main.weights={corpus/notes: 1, corpus/poems: 3}"
    recipe = load(write_recipe(tmp_path, SAME_FILES), [weights])
    plan = make(recipe, store)
    assert plan.graph.digests["notes"] == plan.graph.digests["poems"]
    finish(plan, *(name for name in plan.graph.nodes if not name.startswith("corpus/")))
    for name in ("corpus/notes", "corpus/poems"):
        job = job_of(plan, plan.graph.nodes[name]).model_copy(update={"spec": spec_of(plan, name)})
        attempt = Attempt(job, store)
        attempt.begin()
        attempt.commit(metrics={"train": {"tokens": 10_000 if name == "corpus/notes" else 20_000}})
    for name, listing in plan.graph.listings.items():
        lock(store, listing, plan.graph.digests[name])
    path = plan.graph.nodes["export"].path
    for found in (lineage.of_plan(make(recipe, store), ["export"]), lineage.of_store(store, path, None)):
        uses = {use.source.name: use for use in found.source_uses()}
        assert {
            name: (use.source.language, use.source.license, use.tokens_held) for name, use in uses.items()
        } == {
            "notes": ("", "", 10_000),
            "poems": ("de", "CC-BY-4.0", 20_000),
        }
        assert {name: use.used_for for name, use in uses.items()} == {
            "notes": ["tokenizer", "corpus/notes"],
            "poems": ["corpus/poems"],
        }
        assert len({use.source.digest for use in uses.values()}) == 1
        text = svg(found, "")
        assert "2 sources of 30 files" in text
        assert "licence: CC-BY-4.0" in text and "licence: not stated" in text


def test_the_record_of_source_files_makes_the_digest_or_is_refused(done: Plan) -> None:
    digest = done.graph.digests["notes"]
    rows = recorded_files(done.store, digest)
    assert rows is not None and len(rows) == 30
    path = f"inputs/{digest}.files.jsonl"
    changed = done.store.read_bytes(path).replace(b"note-00", b"note-99")
    unsealed = re.sub(rb', "checksum": "\w+"', b"", changed)  # as another program may write it
    for data, problem in (
        (changed, "its content does not match its checksum"),
        (unsealed, f"its files do not make the digest {digest}"),
    ):
        done.store.fs.pipe_file(done.store.full(path), data)
        with pytest.raises(StoreError, match=problem):
            recorded_files(done.store, digest)
    assert recorded_files(done.store, "0" * 32) is None
