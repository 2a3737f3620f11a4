"""`apertus inspect`: what is shown is what the model reads."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from typer.testing import CliRunner

from apertus_model.data.preference_samples import PreferenceSamples
from apertus_model.progress import Progress
from apertus_model.stages import conversations, corpus, mixture, packing
from apertus_model.stages import tokenizer as tokenizer_stage
from apertus_model.stop import StopSignal
from flows.cli.__main__ import app
from flows.execution.runner import Runner
from flows.inspection import batch as inspect_batch
from flows.inspection.common import Options
from flows.inspection.inspectors import INSPECTORS, inspector_of
from flows.planning.plan import Plan, make
from infra.store import Artifact, Attempt, Store
from specs.errors import SpecError
from specs.recipe import load
from tests.recipes import CHAT, write_recipe

MODULES: dict[str, Any] = {
    "tokenizer": tokenizer_stage, "corpus": corpus, "mixture": mixture, "packing": packing, "conversations": conversations,
}  # fmt: skip
OVERRIDES = ["stages.pretrain.packing=best-fit", "stages.cooldown.packing=concatenate", "stages.cooldown.goldfish={k: 3, h: 2}"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The chat recipe with its data made, in this process, and nothing trained."""
    folder = tmp_path_factory.mktemp("inspect")
    store = Store.open(str(folder / "store"))
    store.initialise()
    recipe = write_recipe(folder, CHAT)
    plan = make(load(recipe, OVERRIDES), store)
    runner = Runner(plan, None)  # type: ignore[arg-type]  # nobody watches
    for name, node in plan.graph.nodes.items():
        if node.kind in MODULES and not Artifact(store, node.path).complete:
            scratch = folder / "scratch" / name.replace("/", "-")
            scratch.mkdir(parents=True)
            lease = runner._turn(node)
            assert lease is not None
            with lease:
                job = runner._job(node, plan.steps[name], scratch, lease).model_copy(update={"launch": {"workers": 1}})
                attempt = Attempt(job, store)
                attempt.begin()
                MODULES[node.kind].run(job, attempt, Progress(job.progress), StopSignal())
    return make(load(recipe, OVERRIDES), store)


def _look(plan: Plan, name: str, **options: Any) -> tuple[dict[str, Any], str]:
    """What is found, and what is printed of it."""
    inspector, node = inspector_of(plan, name, Options(**options))
    found = inspector.collect(plan, node, Options(**options))
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    inspector.show(console, found)
    return json.loads(json.dumps(found)), console.export_text()


def test_a_mixture_shows_asked_and_realised_shares_within_the_bound(built: Plan) -> None:
    found, text = _look(built, "main", samples=1000)
    (source,) = found["sources"]
    assert (source["source"], source["share"], source["drawn"], source["off_by"]) == ("corpus/notes", 1.0, 1000, 0.0)
    assert source["bound"] == 0
    assert {use["stage"] for use in source["uses"]} >= {"pretrain", "cooldown"}
    assert "corpus/notes" in text
    assert "passes, at the end of a stage" in text and "cooldown" in text


def test_a_batch_shows_what_the_trainer_would_read(built: Plan) -> None:
    from apertus_model.data.samples import MixtureSamples
    from apertus_model.data.stream import IGNORE_INDEX, split_shards
    from specs.stages.training import Goldfish

    found, text = _look(built, "cooldown", step=2, limit=3)
    # 8 steps of 4 were drawn from this mixture before, in packed rows, which are other samples: the cooldown begins at 0.
    assert [sample["index"] for sample in found["samples"]] == [8, 9, 10]
    recipe = Artifact(built.store, built.graph.nodes["main"].path).json("recipe.json")
    corpora = [Artifact(built.store, source["path"]) for source in recipe["sources"]]
    shards = [split_shards(corpus, "train") for corpus in corpora]
    samples = MixtureSamples.open(recipe, shards, sequence_length=32, goldfish=Goldfish(k=3, h=2))
    masked = 0
    tokenizer = Tokenizer.from_str(Artifact(built.store, built.graph.nodes["tokenizer"].path).bytes("tokenizer.json").decode())
    for shown in found["samples"]:
        sample = samples[shown["index"]]
        assert (shown["input"], shown["labels"], shown["positions"]) == tuple(array.tolist() for array in sample[:3])
        assert sum(document["tokens"] for document in shown["documents"]) == 32
        assert [document["begin"] for document in shown["documents"]] == [t for t in range(32) if sample.positions[t] == 0]
        untrained = sum(
            piece["tokens"] for document in shown["documents"] for piece in document["pieces"] if piece["status"] == "untrained"
        )
        inside = [t for t in range(1, 32) if sample.positions[t] > 0]
        assert untrained == sum(int(sample.labels[t - 1]) == IGNORE_INDEX for t in inside)
        masked += untrained
        pieces = [piece["text"] for document in shown["documents"] for piece in document["pieces"]]
        assert "".join(pieces) == tokenizer.decode(shown["input"], skip_special_tokens=False)
        assert max(pieces, key=len).splitlines()[0] in text
    assert masked
    assert "corpus/notes (sequence" in text


def test_packed_rows_show_their_padding_as_such(built: Plan) -> None:
    found, _ = _look(built, "pretrain", step=1, limit=4)
    assert found["packing"] == "best-fit"
    for shown in found["samples"]:
        for document in shown["documents"]:
            assert (document["source"] == "padding") == all(piece["status"] == "padding" for piece in document["pieces"])


def test_conversations_show_prompt_and_answer_apart(built: Plan) -> None:
    found, text = _look(built, "sft", sample=0)
    assert found["samples"][0]["source"].startswith("chat/questions (conversation")
    for document in found["samples"][0]["documents"]:
        if document["source"] == "padding":
            continue
        trained = "".join(piece["text"] for piece in document["pieces"] if piece["status"] == "trained")
        untrained = "".join(piece["text"] for piece in document["pieces"] if piece["status"] == "untrained")
        assert trained.endswith("<|assistant_end|>")
        assert "foxes" in trained
        assert "What is note" in untrained
        assert "foxes" not in untrained
    assert "What is note" in text


def test_pairs_show_both_sides_with_their_rewards() -> None:
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(["?", "ask", "yes", "no", "<pad>"])}, unk_token="?"))
    arrays = {
        "tokens": np.array([1, 2, 2, 1, 3], dtype=np.int32),
        "lengths": np.array([3, 2]),
        "prompt_lengths": np.array([1, 1]),
        "rewards": np.array([0.75, 0.25], dtype=np.float32),
    }
    reference = np.array([-1.5, -2.5], dtype=np.float32)
    samples = PreferenceSamples(arrays, reference, sequence_length=8, seed=1, pad_id=4)
    found = inspect_batch.sample_of(SimpleNamespace(samples=samples, names=["pairs"]), words, 0, {4})
    assert [(document["source"], document["trained"]) for document in found["documents"]] == [
        ("pairs (chosen, quantile reward 0.750, reference log-probability -1.50)", 2),
        ("pairs (rejected, quantile reward 0.250, reference log-probability -2.50)", 1),
        ("padding", 0),
    ]
    assert [piece["text"] for piece in found["documents"][0]["pieces"]] == ["ask", "yes yes"]
    assert found["rewards"] == [0.75, 0.25]


def test_what_is_not_there_is_said_with_the_way_to_it(built: Plan, tmp_path: Path) -> None:
    empty = make(built.pipeline, Store.open(str(tmp_path / "empty")))
    with pytest.raises(SpecError, match=r"'main' has not been made yet"):
        _look(empty, "main")
    with pytest.raises(SpecError, match=r"'main' has not been made yet"):
        _look(empty, "cooldown")
    with pytest.raises(SpecError, match=r"'preferences/pairs' has not been made yet"):
        _look(built, "qrpo")
    with pytest.raises(SpecError, match=r"no stage 'mian'\. Fix: did you mean 'main'"):
        _look(built, "mian")
    with pytest.raises(SpecError, match=r"nothing to inspect in an export"):
        _look(built, "export")
    with pytest.raises(SpecError, match=r"'pretrain' has no step 17\. Fix: name one from 1 to 16"):
        _look(built, "pretrain", step=17)
    with pytest.raises(SpecError, match=r"name one: longer/1, longer/2"):
        _look(built, "longer")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("main", {"step": 3}, r"--step is of a stage of training; 'main' is a mixture"),
        ("corpus/notes", {"sample": 3}, r"--sample is of a stage of training; 'corpus/notes' is a corpus"),
        ("pretrain", {"reason": "kept"}, r"--reason is of a corpus; 'pretrain' is a pretrain"),
        ("pretrain", {"step": 1, "sample": 0}, r"--step shows the samples of a step, --sample one by its index"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(built: Plan, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        _look(built, name, **options)


def test_a_sample_that_training_never_draws_is_noted(built: Plan) -> None:
    segment = built.graph.nodes["cooldown"].part
    first, end = segment.sample_offset, segment.sample_offset + segment.global_batch_size * (segment.end_step - segment.start_step)
    assert [bool(_look(built, "cooldown", sample=index)[0]["note"]) for index in (first, end - 1, end)] == [False, False, True]
    assert f"draws the samples {first:,} to {end - 1:,} here; {end:,} is not among them" in _look(built, "cooldown", sample=end)[1]


@pytest.mark.parametrize("terminal", [False, True])
def test_masks_are_marked_where_there_are_no_colours(built: Plan, terminal: bool) -> None:
    found, _ = _look(built, "sft", sample=0)
    console = Console(width=200, file=io.StringIO(), force_terminal=terminal, color_system=None)
    inspect_batch.show(console, found)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    hidden = sum(piece["status"] == "untrained" for document in found["samples"][0]["documents"] for piece in document["pieces"])
    assert hidden
    assert text.count("⟦") == text.count("⟧") == (0 if terminal else hidden + 1)  # and one in the legend


def test_the_command_prints_json_and_writes_a_page(built: Plan, tmp_path: Path) -> None:
    recipe = next(Path(built.store.root).parent.glob("*.yaml"))
    options = [str(recipe), "cooldown", "--store", built.store.url, *(part for override in OVERRIDES for part in ("--set", override))]
    printed = CliRunner().invoke(app, ["inspect", *options, "--step", "1", "--json"])
    assert printed.exit_code == 0, printed.output
    assert json.loads(printed.output)["step"] == 1
    page = tmp_path / "batch.html"
    written = CliRunner().invoke(app, ["inspect", *options, "--html", str(page)])
    assert written.exit_code == 0, written.output
    assert "</html>" in page.read_text()
    assert "quick" in page.read_text()


def test_looking_at_data_needs_no_torch() -> None:
    program = (
        "import sys; import flows.inspection.inspectors, apertus_model.stages.training_data, apertus_model.data.packed; "
        "assert not {'torch', 'torchtitan', 'prefect'} & set(sys.modules); print('light')"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "light\n", done.stderr


def test_every_kind_of_training_has_an_inspector() -> None:
    from specs.stages import TRAINING

    assert {"mixture", *TRAINING} <= set(INSPECTORS)
