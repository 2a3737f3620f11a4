"""Which checkpoints stay."""

from pathlib import Path

import pytest

from infra.store import Artifact, Attempt, Store, StoreError
from infra.store.writing.retention import hold, prune, refer, referred_steps
from specs.job import InputRef
from specs.launch import Checkpointing
from tests.jobs import job_at

PATH = "pretrain/f"


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    url = str(tmp_path / "store") if request.param == "local" else f"memory://{tmp_path.name}/store"
    store = Store.open(url)
    store.initialise()
    return store


def attempt(
    store: Store, folder: Path, path: str = PATH, inputs: dict[str, InputRef] | None = None
) -> Attempt:
    return Attempt(job_at(path, store, folder, inputs=inputs or {}), store)


@pytest.fixture
def trained(store: Store, tmp_path: Path) -> Artifact:
    """Checkpoints at 10, 20, 30, 40 and 50; a segment ended at 20."""
    writing = attempt(store, tmp_path)
    writing.begin()
    for step in (10, 20, 30, 40, 50):
        with store.writer(writing.folder(f"{Attempt.checkpoint_folder(step)}/shard.bin")) as file:
            file.write(f"weights {step}".encode())
        writing.commit_checkpoint(step, {}, files={"shard.bin": file.record})
        if step == 20:
            writing.commit(metrics={}, step=20)
    return writing.artifact


def test_the_last_the_milestones_every_nth_and_the_ends_of_segments_stay(trained: Artifact) -> None:
    spec = Checkpointing(interval=10, keep=1, keep_every=30, milestones=[10])
    assert prune(trained, keep=spec.keep, kept=spec.kept) == [40]
    assert trained.checkpoint_steps() == [10, 20, 30, 50]
    assert prune(trained, keep=1, kept=lambda step: False) == [10, 30]
    assert trained.checkpoint_steps() == [20, 50]
    assert not trained.store.exists(f"{PATH}/attempts/first/step-00000030")
    trained.checkpoint(20).check()


def test_what_another_artifact_or_run_starts_from_stays(trained: Artifact, tmp_path: Path) -> None:
    store = trained.store
    child = attempt(
        store,
        tmp_path,
        "sft/child",
        {"parent": InputRef(kind="pretrain", fingerprint="f", path=PATH, step=30)},
    )
    child.begin()
    child.begin()  # each attempt does
    refer(store, PATH, 40, "cooldown/planned")
    assert referred_steps(store, PATH) == {30, 40}
    assert store.read_json(f"{PATH}/references/00000030-child.json") == {"referrer": "sft/child"}
    assert prune(trained, keep=1, kept=lambda step: False) == [10]
    assert trained.checkpoint_steps() == [20, 30, 40, 50]


def test_whoever_lost_the_right_to_prune_removes_nothing(trained: Artifact) -> None:
    def lost() -> None:
        raise RuntimeError("taken over")

    with pytest.raises(RuntimeError, match="taken over"):
        prune(trained, keep=1, kept=lambda step: False, before=lost)
    assert trained.checkpoint_steps() == [10, 20, 30, 40, 50]
    # nothing to remove, nothing asked
    assert prune(trained, keep=5, kept=lambda step: False, before=lost) == []


def test_the_right_to_prune_is_asked_for_before_each_removal(trained: Artifact) -> None:
    asked: list[int] = []

    def lost_after_one() -> None:
        asked.append(len(trained.checkpoint_steps()))
        if len(asked) == 2:
            raise RuntimeError("taken over")

    with pytest.raises(RuntimeError, match="taken over"):
        prune(trained, keep=1, kept=lambda step: False, before=lost_after_one)
    assert (asked, trained.checkpoint_steps()) == ([5, 4], [20, 30, 40, 50])


def test_a_checkpoint_referenced_during_removal_is_kept_or_its_reader_gets_an_error(
    trained: Artifact,
) -> None:
    store = trained.store
    asked: list[None] = []

    def refer_meanwhile() -> None:
        asked.append(None)
        if len(asked) == 2:  # 10 is gone, and it is the turn of 30
            hold(store, PATH, 30, "cooldown/a")
            with pytest.raises(
                StoreError, match=f"checkpoint 10 of {PATH} is no longer in the store .*: it was pruned"
            ):
                hold(store, PATH, 10, "cooldown/a")

    assert prune(trained, keep=1, kept=lambda step: False, before=refer_meanwhile) == [10, 40]
    assert trained.checkpoint_steps() == [20, 30, 50]
    trained.checkpoint(30).check()


def test_the_newest_checkpoint_is_kept_by_every_setting(trained: Artifact) -> None:
    prune(trained, keep=0, kept=lambda step: False)
    assert trained.checkpoint_steps() == [20, 50]
