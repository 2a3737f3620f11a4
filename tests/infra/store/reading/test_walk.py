"""What a store holds, as verification, garbage collection, transfer and lineage see it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.store import Store
from infra.store.maintenance.garbage import survey
from infra.store.maintenance.verify import verify
from infra.store.reading.walk import artifacts, list_files, open_contents, reach
from tests.infra.maker import Maker
from tests.infra.store.attempts import attempt


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = Store.open(str(tmp_path / "store"))
    opened.initialise()
    return opened


@pytest.fixture
def maker(store: Store, tmp_path: Path) -> Maker:
    return Maker(store, tmp_path / "scratch")


def test_inputs_come_before_what_was_made_from_them_with_all_the_steps_at_which_they_are_read() -> None:
    made_from = {"d": [("b", 10), ("c", None)], "b": [("a", None)], "c": [("a", None), ("b", 20)], "a": []}
    asked: list[str] = []

    def inputs_of(path: str) -> list[tuple[str, int | None]]:
        asked.append(path)
        return made_from[path]

    assert reach(inputs_of, [("d", None), ("b", 5)]) == {
        "a": {None},
        "b": {10, 20, 5},
        "c": {None},
        "d": {None},
    }
    assert list(reach(inputs_of, [("d", None)])) == ["a", "b", "c", "d"]
    assert asked == [*"dbac", *"dbac"], "each is asked once"


@given(st.dictionaries(st.integers(1, 30), st.sets(st.integers(0, 29), max_size=4), max_size=30))
def test_whatever_is_reached_comes_after_its_inputs(graph: dict[int, set[int]]) -> None:
    made_from = {
        str(node): [(str(read), None) for read in reads if read < node] for node, reads in graph.items()
    }
    found = list(reach(lambda path: made_from.get(path, ()), [(path, None) for path in made_from]))
    assert {*made_from} <= {*found} and len(found) == len({*found})
    place = {path: number for number, path in enumerate(found)}
    assert all(place[read] < place[path] for path in made_from for read, _ in made_from[path])


def test_a_chain_of_any_length_and_a_circle_have_an_end() -> None:
    chain = reach(lambda path: [(str(int(path) - 1), None)] if int(path) else (), [("20000", None)])
    assert list(chain) == [str(number) for number in range(20001)]
    assert set(reach(lambda path: [("b" if path == "a" else "a", None)], [("a", 1)])) == {"a", "b"}


@pytest.mark.parametrize("folder", ["runs", "inputs", "reports", "protected", "damaged"])
def test_a_folder_of_the_store_is_no_artifact_whatever_is_in_it(store: Store, folder: str) -> None:
    """A run may have a name that looks like a fingerprint."""
    name = f"{folder}/{'a' * 32}/20200101T000000.000000Z-1.json"
    store.write_once(name, b'{"parts": {}, "spec": {}}')
    assert artifacts(list_files(store)) == {}
    assert survey(store, now=4e9).items == []


def test_markers_say_which_files_are_whose(store: Store, maker: Maker) -> None:
    trained = maker.training("b", [10, 20], [20], (maker.data("corpus", "a"), None))
    contents = open_contents(store, trained)
    steps = [(marker.kind, marker.step) for marker in contents.markers]
    assert steps == [("checkpoint", 10), ("checkpoint", 20), ("manifest", 20)]
    shards, rows = ([sorted(path.rsplit("/", 2)[-2] for path in found) for found in pair] for pair in zip(
        *((marker.files, marker.rows) for marker in contents.markers), strict=True
    ))  # fmt: skip
    assert shards == [["step-00000010"], ["step-00000020"], ["step-00000020"]]
    assert rows == [["history"], ["history", "history"], ["history", "history"]]
    assert contents.damaged == {} and [place.split("/")[0] for place, _ in contents.inputs] == ["corpus"]


@pytest.mark.parametrize(
    "name",
    ["manifest.json", "identity.json", "units/task.json", "checkpoints/00000010.json", "references/1-a.json"],
)
@pytest.mark.parametrize("how", ["folder", "folder with a file", "text", "list"])
def test_a_document_that_is_something_else_is_damaged_for_every_reader(
    store: Store, tmp_path: Path, name: str, how: str
) -> None:
    made = attempt(store, tmp_path)
    made.begin()
    made.commit(metrics={})
    path = made.job.path
    place = Path(store.full(f"{path}/{name}"))
    place.unlink(missing_ok=True)
    place.parent.mkdir(exist_ok=True)
    if how.startswith("folder"):
        place.mkdir()
        if how != "folder":
            (place / "inside.json").write_text("{}")
    else:
        place.write_text({"text": "no JSON", "list": "[]"}[how])
    assert list(open_contents(store, path).damaged) == [f"{path}/{name}"]
    assert [damage.markers[0] for damage in verify(store).damages] == [f"{path}/{name}"]
    assert [item for item in survey(store, now=4e9).items if item.path == path] == []


@pytest.mark.parametrize("name", ["manifest-x.json", "checkpoints/last.json", "manifests.json"])
def test_a_marker_whose_name_has_no_step_is_damaged(store: Store, maker: Maker, name: str) -> None:
    path = maker.data("corpus", "a")
    store.write_once(f"{path}/{name}", b"{}")
    assert "its name has no step" in open_contents(store, path).damaged[f"{path}/{name}"]


@pytest.mark.parametrize(
    "name",
    ["checkpoints/.tmp-claim-0-00000010.json", "units/.tmp-1.json", "attempts/a/manifest.json", "notes.json"],
)
def test_a_file_that_is_being_written_and_one_of_an_attempt_are_no_documents(
    store: Store, maker: Maker, name: str
) -> None:
    path = maker.data("corpus", "a")
    Path(store.full(f"{path}/{name}")).parent.mkdir(parents=True, exist_ok=True)
    Path(store.full(f"{path}/{name}")).write_text("half a file")
    assert open_contents(store, path).damaged == {}
