"""`from: hf:...`: which parts are planned, what they depend on, what is refused. Planning opens no
weights, so there are none here."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flows.cli.next_steps import show_next_steps
from flows.cli.tables.lineage import tree
from flows.planning.plan import Plan, make
from flows.provenance import lineage
from flows.report import render
from infra.store import Store
from specs.errors import SpecError
from specs.recipe import load
from specs.stages.export import ExportPart
from specs.stages.hugging_face import ImportModelPart
from specs.stages.training import Segment
from tests.flows.conftest import finish
from tests.models import MODEL, model_folder
from tests.recipes import write_recipe

REVISION = "0123456789abcdef" * 2 + "01234567"
RECIPE = """\
name: continued
sources:
  notes: {{url: "{documents}", format: text, include: ["*.txt"]}}
  questions: {{url: "{documents}", format: chat, include: ["*.jsonl"]}}
stages:
  tokenizer: {{kind: tokenizer, from: "hf:HF"}}
  corpus: {{kind: corpus, tokenizer: tokenizer, sources: {{notes: {{holdout: 0.2}}}}}}
  main: {{kind: mixture, weights: {{corpus/notes: 1}}, max_repetition: 100}}
  chat: {{kind: conversations, tokenizer: tokenizer, sources: {{questions: {{holdout: 0.2}}}}}}
  cooldown:
    kind: cooldown
    from: hf:HF
    carry: [weights]
    mixture: main
    sequence_length: 32
    global_batch_size: 4
    budget: 6 steps
    optimizer: &lr {{lr: 1e-3}}
  longer:
    kind: long_context
    from: hf:HF
    steps:
      - {{sequence_length: 64, rope_theta: 1e6, global_batch_size: 4, budget: 4 steps, mixture: main,
          carry: [weights], optimizer: *lr}}
      - {{sequence_length: 128, rope_theta: 2e6, global_batch_size: 2, budget: 3 steps, mixture: main}}
  sft: {{kind: sft, from: "hf:HF", conversations: chat, sequence_length: 64, global_batch_size: 4,
    budget: 8 steps, optimizer: *lr}}
  preferences: {{kind: preference_data, from: "hf:HF", prompts: [chat], completions: {{max_new_tokens: 8}},
    reward: reference-overlap}}
  qrpo: {{kind: qrpo, from: "hf:HF", preferences: preferences, global_batch_size: 4, budget: 4 steps,
    optimizer: *lr}}
  merged: {{kind: merge, checkpoints: [cooldown, "hf:HF"]}}
  evaluate: {{kind: evaluate, from: "hf:HF", sources: [corpus/notes]}}
  compared: {{kind: evaluate, from: sft, sources: [corpus/notes], against: evaluate}}
  export: {{kind: export, from: "hf:HF"}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


Planned = Callable[..., Plan]


@pytest.fixture
def planned(tmp_path: Path, folder: Path, store: Store) -> Planned:
    """The plan of the recipe with overrides; `hf` is what stands behind `hf:`."""

    def plan(*overrides: str, hf: object = folder, text: str = RECIPE) -> Plan:
        return make(load(write_recipe(tmp_path, text.replace("HF", str(hf))), overrides), store)

    return plan


def refused(planned: Planned, *overrides: str, **changes: Any) -> str:
    with pytest.raises(SpecError) as caught:
        planned(*overrides, **changes)
    return str(caught.value)


def fingerprints(plan: Plan) -> dict[str, str]:
    return {name: node.fingerprint for name, node in plan.graph.nodes.items()}


def test_every_kind_that_reads_a_checkpoint_takes_one_from_hugging_face(planned: Planned) -> None:
    plan = planned()
    imports = [node for node in plan.graph.nodes.values() if isinstance(node.part, ImportModelPart)]
    stages = ["cooldown", "longer", "sft", "preferences", "qrpo", "merged", "evaluate", "export"]
    assert [node.name for node in imports] == [
        f"{stage}/import{'-2' if stage == 'merged' else ''}" for stage in stages
    ]
    assert len({node.path for node in imports}) == 1  # and is made once
    assert plan.to_json()["totals"]["to_do"]["parts"] == len(
        {(node.path, node.end_step) for node in plan.graph.nodes.values()}
    )
    for name, role in (
        ("cooldown", "parent"),
        ("longer/1", "parent"),
        ("sft", "parent"),
        ("evaluate", "checkpoint"),
        ("export", "checkpoint"),
    ):
        assert (plan.graph.nodes[name].inputs[role].kind, plan.graph.nodes[name].inputs[role].step) == (
            "import_model",
            1,
        )
    assert plan.graph.nodes["compared"].inputs["against_checkpoint"].kind == "import_model"
    part = plan.graph.nodes["sft"].part
    assert isinstance(part, Segment)
    assert part.model == MODEL and part.seed is None and part.carry == ["weights"]
    exported = plan.graph.nodes["export"].part
    assert isinstance(exported, ExportPart) and exported.sequence_length == 128


def test_tokenizer_of_a_model_is_one_artifact(planned: Planned) -> None:
    plan = planned()
    assert plan.graph.nodes["evaluate/tokenizer"].path == plan.graph.nodes["tokenizer"].path
    assert plan.graph.nodes["tokenizer"].part.vocab_size == 512  # type: ignore[attr-defined]  # that of config.json
    assert plan.graph.nodes["sft"].inputs["tokenizer"].name == "tokenizer"


def test_a_finished_recipe_is_reused_and_moving_the_folder_reruns_nothing(
    planned: Planned, folder: Path, tmp_path: Path
) -> None:
    finish(planned())
    moved = shutil.copytree(folder, tmp_path / "elsewhere" / "moved")
    os.utime(moved / "config.json", (1, 1))
    assert {step.action for step in planned(hf=moved).steps.values()} == {"reuse"}


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("model-00002-of-00002.safetensors", "weights"),
        ("chat_template.jinja", "tokenizer"),
        ("README.md", ""),
        ("training_args.bin", ""),
    ],
)
def test_only_relevant_files_of_a_model_folder_enter_the_fingerprint(
    planned: Planned, folder: Path, file: str, what: str
) -> None:
    before = fingerprints(planned())
    (folder / file).write_bytes(b"something else")
    after = fingerprints(planned())
    changed = {name for name in before if before[name] != after[name]}
    assert ("sft/import" in changed) is (what == "weights")
    assert ("tokenizer" in changed) is (what == "tokenizer")
    assert bool(changed) is bool(what)


def test_a_model_that_ends_its_turns_is_exported_as_one_that_does(planned: Planned, tmp_path: Path) -> None:
    chat = model_folder(tmp_path / "instruct", eos=68)
    assert planned(hf=chat).graph.nodes["export"].part.chat is True  # type: ignore[attr-defined]
    assert planned().graph.nodes["export"].part.chat is False  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.cooldown.carry=[weights, optimizer, data]",
        "cooldown.carry: 'hf:{hf}' has weights only; there is no optimizer and"),
        ("stages.longer.steps.0.carry=[weights, data]",
        "longer.steps[0].carry: 'hf:{hf}' has weights only; there is no data to carry"),
        ("stages.sft.optimizer={}",
        "sft.optimizer.lr: 'hf:{hf}' has weights only; there is no optimizer.lr to inherit. Fix: s"),
        ("stages.sft.global_batch_size=null", "there is no global_batch_size to inherit"),
        ("stages.tokenizer.from=sft", "'sft' is not a Hugging Face model"),
        ('stages.sft.from="hf:"', "'hf:' is not a reference"),
        ("stages.main.weights={\"hf:x\": 1}", "there is no stage 'hf:x'"),
        ("stages.sft.from=hf:nowhere/at/all", "/nowhere/at/all. Fix: name a folder"),
        ("stages.merged.checkpoints=[\"hf:{hf}\", \"hf:{hf}\"]", "two of these are the same checkpoint"),
    ],
)  # fmt: skip
def test_unsupported_use_of_a_hugging_face_model_is_refused_with_the_fix(
    planned: Planned, folder: Path, override: str, message: str
) -> None:
    assert message.format(hf=folder) in refused(planned, override.replace("{hf}", str(folder)))


def test_data_of_another_tokenizer_are_refused_with_both_digests(planned: Planned) -> None:
    text = RECIPE.replace(
        '{{kind: tokenizer, from: "hf:HF"}}', "{{kind: tokenizer, sources: [notes], vocab_size: 512}}"
    )
    error = refused(planned, text=text)
    assert "stages.sft.conversations: 'chat/questions' is tokenised by 'tokenizer'" in error
    assert "(tokenizer.json not made yet and " in error
    assert "Fix: use data made with a tokenizer stage that states from: hf:" in error
    assert (
        "stages.evaluate.sources[0]: 'corpus/notes' is tokenised by 'tokenizer', the model was trained with"
        " that of 'hf:" in error
    )


def test_data_of_a_tokenizer_with_the_same_file_are_accepted(
    planned: Planned, folder: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "tokenizer"
    copy.mkdir()
    (copy / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    text = RECIPE.replace(
        '{{kind: tokenizer, from: "hf:HF"}}', f'{{{{kind: tokenizer, path: "{copy}", vocab_size: 512}}}}'
    )
    plan = planned(text=text)
    assert plan.graph.nodes["tokenizer"].path != plan.graph.nodes["evaluate/tokenizer"].path
    (copy / "tokenizer.json").write_text("{}")
    assert "is tokenised by 'tokenizer', the model was trained with that of 'hf:" in refused(
        planned, text=text
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: (folder / "config.json").write_text("{}"),
            "describes 'ApertusForCausalLM' of model_type null",
        ),
        (lambda folder: (folder / "config.json").unlink(), "there is no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json of"),
        (
            lambda folder: (folder / "tokenizer.json").unlink(),
            "has no tokenizer.json, so the meaning of its ids is unknown",
        ),
        (
            lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
            "lacks 1 of 2 files that its index names",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").unlink(),
            "has no model.safetensors: there are no weights",
        ),
    ],
)
def test_folder_without_a_model_is_refused_at_its_line(
    planned: Planned, folder: Path, change: Any, message: str
) -> None:
    change(folder)
    error = refused(planned)
    assert message in error
    assert "tiny.yaml:6: stages.tokenizer.from:" in error


def test_a_pickle_is_never_read(planned: Planned, folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert (
        "it has pytorch_model.bin, a pickle, which is never read; save the model with safetensors"
        in refused(planned)
    )


def test_a_config_that_this_model_cannot_represent_is_refused_when_planning(
    planned: Planned, tmp_path: Path
) -> None:
    other = model_folder(tmp_path / "other", attention_bias=True)
    assert "attention_bias is true, this model computes with false" in refused(planned, hf=other)


def test_an_id_is_looked_up_in_the_local_cache(
    planned: Planned, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert (
        "the local Hugging Face cache has no model 'some/model'; HF_HUB_OFFLINE forbids a download"
        in refused(planned, hf="some/model")
    )
    cached = tmp_path / "cache" / "models--some--model"
    (cached / "blobs").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(REVISION)
    (cached / "snapshots" / REVISION).mkdir(parents=True)
    for path in folder.iterdir():
        shutil.copy(path, cached / "blobs" / path.name)
        (cached / "snapshots" / REVISION / path.name).symlink_to(Path("../../blobs") / path.name)
    assert (
        fingerprints(planned(hf="some/model"))
        == fingerprints(planned())
        == fingerprints(planned(hf=f"some/model@{REVISION}"))
    )


def test_lineage_and_report_show_the_model_with_its_licence(planned: Planned, folder: Path) -> None:
    plan = planned()
    found = lineage.of_plan(plan, ["sft"])
    source = found.to_json(found.roots[0])["inputs"]["parent"]["inputs"]["folder"]["source"]
    assert source == {
        "url": str(folder),
        "format": "Hugging Face model",
        "language": "de, rm",
        "license": "apache-2.0",
    }
    console = Console(record=True, width=300, file=io.StringIO())
    console.print(tree(found, found.roots[0]))
    assert "Hugging Face model, de, rm, apache-2.0, 4 files" in console.export_text()
    page = render(plan)
    assert "apache-2.0" in page and "sft/import" in page


def test_a_step_that_only_imports_is_no_example_for_a_learning_rate(planned: Planned, tmp_path: Path) -> None:
    console = Console(record=True, width=300, file=io.StringIO())
    text = RECIPE[: RECIPE.index("  corpus:")] + '  export: {{kind: export, from: "hf:HF"}}\n'
    show_next_steps(console, planned(text=text), "some.yaml", None, [])
    assert "optimizer" not in console.export_text()


def test_a_teacher_and_the_base_of_a_merge_come_from_hugging_face(planned: Planned) -> None:
    text = (
        RECIPE
        + '  student: {{kind: distill, teacher: "hf:HF", from: cooldown, mixture: main, budget: 4 steps}}\n'
    )
    text += '  tied: {{kind: merge, method: ties, checkpoints: [cooldown, sft], base: "hf:HF"}}\n'
    nodes = planned(text=text).graph.nodes
    for name, role, field in (("student", "teacher", "teacher"), ("tied", "base", "base")):
        read = nodes[name].inputs[role]
        assert (read.node, read.kind, read.step) == (f"{name}/import-{field}", "import_model", 1)
