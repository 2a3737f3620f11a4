"""`hf:` with a model of another architecture: what is planned of it, and which uses are refused. Planning
opens no weights, so there are none here."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.planning.plan import Plan, make
from flows.provenance import lineage
from infra.store import Store
from specs.errors import SpecError
from specs.recipe import load
from specs.stages.hugging_face import ModelFolderPart
from tests.flows.conftest import finish
from tests.models import model_folder, other_model_folder
from tests.recipes import write_recipe

RECIPE = """\
name: sampled
sources:
  notes: {{url: "{documents}", format: text, include: ["*.txt"]}}
  questions: {{url: "{documents}", format: chat, include: ["*.jsonl"]}}
stages:
  tokenizer: {{kind: tokenizer, from: "hf:OURS"}}
  corpus: {{kind: corpus, tokenizer: tokenizer, sources: {{notes: {{holdout: 0.2}}}}}}
  main: {{kind: mixture, weights: {{corpus/notes: 1}}, max_repetition: 100}}
  chat: {{kind: conversations, tokenizer: tokenizer, sources: {{questions: {{holdout: 0.2}}}}}}
  sft: {{kind: sft, from: "hf:OURS", conversations: chat, sequence_length: 64, global_batch_size: 4,
    budget: 8 steps, optimizer: {{lr: 1e-3}}}}
  preferences: {{kind: preference_data, from: sft, sampler: "hf:OTHER", prompts: [chat],
    completions: {{max_new_tokens: 8}}, reward: reference-overlap}}
  ours: {{kind: evaluate, from: sft, generation: &answers {{prompts: chat, sampling: {{max_new_tokens: 8}},
    reward: reference-overlap}}}}
  other: {{kind: evaluate, from: "hf:OTHER", against: ours, generation: *answers,
    harness: {{include: "installed:examples/tasks", suites: {{own: {{tasks: [stdlib_functions]}}}}}},
    gates: [{{metric: reward/difference, min: 0}}, {{metric: own/stdlib_functions/acc, min: 0.1}}]}}
"""
Planned = Callable[..., Plan]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return other_model_folder(tmp_path / "other")


@pytest.fixture
def planned(tmp_path: Path, other: Path, store: Store) -> Planned:
    """The plan of the recipe, with more text and overrides; `hf` is what stands for the other model."""
    ours = model_folder(tmp_path / "ours")

    def plan(*overrides: str, more: str = "", hf: Path = other) -> Plan:
        text = (RECIPE + more).replace("OURS", str(ours)).replace("OTHER", str(hf))
        return make(load(write_recipe(tmp_path, text), overrides), store)

    return plan


def refused(planned: Planned, *overrides: str, more: str = "") -> str:
    with pytest.raises(SpecError) as caught:
        planned(*overrides, more=more)
    return str(caught.value)


def test_the_folder_is_one_artifact_that_answers_and_is_evaluated(planned: Planned) -> None:
    graph = planned().graph
    folder, sampled = graph.nodes["other/model"], graph.nodes["preferences/model"]
    assert isinstance(folder.part, ModelFolderPart) and folder.path == sampled.path
    assert graph.nodes["preferences/completions"].inputs["model"].name == "preferences/model"
    assert graph.nodes["preferences/completions"].inputs["tokenizer"].name == "tokenizer"
    assert graph.nodes["preferences/log_probabilities"].inputs["checkpoint"].name == "sft"
    assert graph.nodes["other/harness/own"].inputs["model"].name == "other/model"
    roles = {
        "prompts",
        "completions",
        "rewards",
        "harness:own",
        "against",
        "against_rewards",
        "against_completions",
    }
    assert set(graph.nodes["other"].inputs) == roles
    assert graph.nodes["ours/completions"].inputs.keys() == {"model", "prompts"}  # with its old fingerprint


def test_both_models_answer_the_same_prompts(planned: Planned) -> None:
    graph = planned().graph
    assert graph.nodes["other/prompts"].fingerprint == graph.nodes["ours/prompts"].fingerprint


def test_a_judge_may_have_another_architecture_than_the_sampled_model(
    planned: Planned, tmp_path: Path
) -> None:
    (tmp_path / "c.md").write_text("1. Be kind.")
    judge = f'{{{{judge: {{{{from: "hf:OTHER", constitution: {tmp_path}/c.md}}}}, max_tokens: 256}}}}'
    more = (
        f"  judged: {{{{kind: preference_data, from: sft, prompts: [chat], reward: {judge},\n"
        "    completions: {{max_new_tokens: 8}}}}\n"
        "  answered: {{kind: evaluate, from: sft, sources: [corpus/notes], generation: {{prompts: chat,\n"
        f"    sampling: {{{{max_new_tokens: 8}}}}, reward: {judge}}}}}}}}}\n"
    )
    graph = planned(more=more).graph
    for name, sampled in (("judged", "judged/model"), ("answered", "answered/model")):
        folder = graph.nodes[f"{name}/judge"]
        assert isinstance(folder.part, ModelFolderPart)
        assert folder.path == graph.nodes["other/model"].path != graph.nodes[sampled].path
        assert graph.nodes[f"{name}/rewards"].inputs["judge"].name == f"{name}/judge"


@pytest.mark.parametrize(
    ("file", "rerun"),
    [
        ("model-00002-of-00002.safetensors", True),
        ("chat_template.jinja", True),
        ("README.md", False),
        ("modeling_llama.py", False),
    ],
)
def test_contents_identify_the_folder_and_its_place_does_not(
    planned: Planned, other: Path, tmp_path: Path, file: str, rerun: bool
) -> None:
    finish(planned())
    moved = shutil.copytree(other, tmp_path / "elsewhere" / "moved")
    assert {step.action for step in planned(hf=moved).steps.values()} == {"reuse"}
    (moved / file).write_bytes(b"---\nlicense: mit\n---\n")
    changed = {name for name, step in planned(hf=moved).steps.items() if step.action != "reuse"}
    assert ("preferences/completions" in changed) is ("other/model" in changed) is rerun
    assert "ours" not in changed


def test_lineage_of_the_answers_names_the_folder_and_its_licence(planned: Planned, other: Path) -> None:
    plan = planned()
    found = lineage.of_plan(plan, ["other"])
    read = found.to_json(found.roots[0])["inputs"]["completions"]["inputs"]["model"]["inputs"]["folder"]
    assert read["source"] == {
        "url": str(other),
        "format": "Hugging Face model",
        "language": "de, rm",
        "license": "apache-2.0",
    }


@pytest.mark.parametrize(
    ("more", "path", "message"),
    [
        (
            '  bad: {{kind: sft, from: "hf:OTHER", conversations: chat, budget: 1 steps}}\n',
            "stages.bad.from",
            "is a LlamaForCausalLM, which sft cannot read: it can be sampled from",
        ),
        (
            '  bad: {{kind: cooldown, from: "hf:OTHER", mixture: main, budget: 1 steps}}\n',
            "stages.bad.from",
            "which cooldown cannot read",
        ),
        ('  bad: {{kind: export, from: "hf:OTHER"}}\n', "stages.bad.from", "which export cannot read"),
        (
            '  bad: {{kind: merge, checkpoints: [sft, "hf:OTHER"]}}\n',
            "stages.bad.checkpoints[1]",
            "which merge cannot read",
        ),
        (
            '  bad: {{kind: probe, from: "hf:OTHER", sources: [corpus/notes]}}\n',
            "stages.bad.from",
            "which probe cannot read",
        ),
        ('  bad: {{kind: tokenizer, from: "hf:OTHER"}}\n', "stages.bad.from", "set path: and its folder"),
        (
            "  bad: {{kind: select, evaluations: [ours, other], metric: reward/mean}}\n",
            "stages.other.from",
            "'bad' chooses a checkpoint, and 'hf:",
        ),
        (
            '  bad: {{kind: preference_data, from: "hf:OTHER", prompts: [chat], reward: reference-overlap,\n'
            "    completions: {{max_new_tokens: 8}}}}\n",
            "stages.bad.from",
            "and set sampler: hf:",
        ),
        (
            '  bad: {{kind: evaluate, from: "hf:OTHER", sources: [corpus/notes]}}\n',
            "stages.bad.sources",
            "it measures generation and harness",
        ),
    ],
)
def test_any_other_use_names_the_field_and_what_to_do(
    planned: Planned, more: str, path: str, message: str
) -> None:
    told = refused(planned, more=more)
    assert path in told and message in told, told


def test_a_model_without_a_chat_template_cannot_be_asked_but_does_tasks(
    planned: Planned, other: Path
) -> None:
    (other / "chat_template.jinja").unlink()
    told = refused(planned)
    assert "stages.preferences.sampler" in told and "stages.other.generation" in told
    assert told.count("has no chat template, so it cannot be asked") == 2
    assert "put its chat_template.jinja into the folder" in told
    planned("stages.preferences.sampler=sft", "stages.other.generation=null", "stages.other.gates=[]")


def test_answers_need_room_in_its_context(planned: Planned) -> None:
    told = refused(planned, "stages.preferences.completions.max_new_tokens=256")
    assert "max_new_tokens 256 leaves no room for a prompt in the context of 'hf:" in told


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "bert", "architectures": ["BertModel"]},
            "is no causal language model of the installed",
        ),
        (
            {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": {"AutoConfig": "own.Own"}},
            "its auto_map names code that comes with the model, which is never run",
        ),
    ],
)
def test_an_architecture_that_transformers_does_not_have_is_refused(
    planned: Planned, tmp_path: Path, config: dict[str, object], message: str
) -> None:
    folder = other_model_folder(tmp_path / "unknown", **config)
    with pytest.raises(SpecError, match=message):
        planned(hf=folder)


def test_a_checkpoint_can_sample_for_another(planned: Planned) -> None:
    graph = planned("stages.preferences.sampler=sft").graph
    assert graph.nodes["preferences/model"].path == graph.nodes["ours/model"].path


def test_completions_of_a_server_with_its_own_model_read_no_model(planned: Planned) -> None:
    server = "engine: server, server: {url: 'http://host/v1', model: big, api: MODE}"
    stated = f"stages.preferences.completions={{max_new_tokens: 8, {server}}}"
    chat = planned(stated.replace("MODE", "chat")).graph
    assert chat.nodes["preferences/completions"].inputs.keys() == {"prompts", "tokenizer"}
    assert "preferences/model" not in chat.nodes
    own = planned(stated.replace("MODE", "completions")).graph
    assert own.nodes["preferences/completions"].inputs.keys() == {"model", "prompts", "tokenizer"}
    told = refused(
        planned, f"stages.ours.generation.sampling={{max_new_tokens: 8, {server.replace('MODE', 'chat')}}}"
    )
    assert "stages.ours.generation.sampling.server.api" in told and "set api: completions" in told


def test_a_key_in_the_place_of_its_name_is_refused_and_not_repeated(planned: Planned) -> None:
    server = "{{url: 'http://host/v1', model: big, key: sk-hunter2hunter2}}"
    told = refused(
        planned,
        more="  bad: {{kind: preference_data, from: sft, prompts: [chat], reward: reference-overlap,\n"
        f"    completions: {{{{max_new_tokens: 8, engine: server, server: {server}}}}}}}}}\n",
    )
    assert "not the name of an environment variable" in told and "hunter2" not in told


GENERATORS = """\
  offline: {{kind: preference_data, from: sft, prompts: [chat], reward: reference-overlap,
    completions: {{n: 4, max_new_tokens: 8}}, generators: {{
      big: {{from: "hf:OTHER", completions: &few {{n: 2, max_new_tokens: 8}}}},
      persona: {{from: "hf:OTHER", completions: *few,
        personas: {{url: "{documents}", format: text, include: ["note-0*.txt"], license: CC0-1.0}}}},
      own: {{from: sft@step=4, completions: *few}}}}}}
"""


def test_answers_of_generators_are_parts_that_rewards_and_pairs_read(planned: Planned) -> None:
    plan = planned(more=GENERATORS)
    nodes = plan.graph.nodes
    generated = {
        f"generated:{n}": f"offline/{key}/completions" for n, key in enumerate(("big", "persona", "own"))
    }
    for part in ("offline/rewards", "offline/pairs"):
        assert generated.items() <= {role: read.name for role, read in nodes[part].inputs.items()}.items()
    assert nodes["offline/big/model"].path == nodes["offline/persona/model"].path == nodes["other/model"].path
    assert nodes["offline/own/model"].inputs["checkpoint"].step == 4
    assert nodes["offline/model"].inputs["checkpoint"].step == 8
    roles = {name: nodes[f"offline/{name}/completions"].inputs.keys() for name in ("big", "persona", "own")}
    assert roles["big"] == {"model", "prompts", "tokenizer"} and roles["own"] == {"model", "prompts"}
    assert roles["persona"] == roles["big"] | {"personas"}
    found = lineage.of_plan(plan, ["offline/pairs"]).to_json(nodes["offline/pairs"].path)
    asked = found["inputs"]["generated:1"]["inputs"]
    assert asked["model"]["kind"] == "model_folder" and asked["personas"]["kind"] == "external"
    without = planned("stages.offline.generators={}", more=GENERATORS).graph.nodes
    assert without["offline/completions"].path == nodes["offline/completions"].path
    assert without["offline/rewards"].path != nodes["offline/rewards"].path


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            "generators.big.completions.max_new_tokens=64",
            "max_new_tokens 64 leaves no room for a prompt in max_tokens",
        ),
        ("generators.big.from=nobody", "there is no stage 'nobody'"),
        ("generators.persona.personas.url=/nowhere", "stages.offline.generators.persona.personas.url: "),
        ('generators={"a/b": {from: sft, completions: {max_new_tokens: 8}}}', "a/b"),
    ],
)
def test_a_generator_that_cannot_answer_is_refused_at_its_field(
    planned: Planned, change: str, told: str
) -> None:
    assert told in refused(planned, f"stages.offline.{change}", more=GENERATORS)


def test_a_generator_without_a_chat_template_is_refused(planned: Planned, other: Path) -> None:
    (other / "chat_template.jinja").unlink()
    assert "stages.offline.generators.big.from: 'hf:" in refused(planned, more=GENERATORS)
