"""An exported folder opens in transformers with the trained weights, and training goes on from it."""

import importlib.resources
import inspect
import json
import os
import subprocess
import warnings
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch

from apertus_model.model import modeling_apertus_reward
from apertus_model.model_card import judge_of
from apertus_model.stages import export
from apertus_model.stages.training_data import RewardData
from infra.store import Artifact
from specs.errors import StageError
from specs.hugging_face import HYBRID, LEAST_TRANSFORMERS, SCHEDULED, OwnClass, architecture, model_of
from specs.launch import Validation
from specs.layer_schedule import DepthAverage
from specs.mamba import Mamba
from specs.model import RopeScaling
from specs.settings import Lora
from specs.stages.export import ExportPart
from specs.stages.hugging_face import ImportModelPart
from specs.stages.preference_data import RewardsPart
from tests.apertus_model.harness import segment
from tests.apertus_model.stages.training import SPEC, Stages, weights_of
from tests.machine import slow

EXPORT = ExportPart(model=SPEC.model, sequence_length=16, max_shard_size=20_000, tolerance=1e-4)


def test_the_exported_folder_opens_in_transformers_with_the_trained_weights(
    stages: Stages, trained: Artifact, transformers_log: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    inputs = {"checkpoint": stages.ref("pretrain/trained", 6), "tokenizer": stages.ref("tokenizer/tokenizer")}
    artifact = stages.run("export", "folder", EXPORT, inputs=inputs)
    files = artifact.manifest.files
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        "README.md",
    } <= files.keys()
    assert sum(name.endswith(".safetensors") for name in files) > 1
    folder = Path(stages.store.full(artifact.stored_name("config.json"))).parent
    transformers_log.clear()
    logging.set_verbosity_warning()  # the export has silenced it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = AutoModelForCausalLM.from_pretrained(folder)
    told = [
        message
        for message in transformers_log.messages
        if not message.startswith("CUDA-fused xIELU not available")
    ]
    assert told == []
    assert type(model).__name__ == "ApertusForCausalLM"
    assert model.config.rope_parameters["rope_theta"] == 500_000
    assert model.config.max_position_embeddings == 16
    assert artifact.manifest.metrics["logit_difference"] < 1e-5
    assert "needs transformers 4.56 or later" in artifact.bytes("README.md").decode()
    embeddings = weights_of(trained, 6)["tok_embeddings.weight"]
    assert model.get_input_embeddings().weight.flatten().tolist() == embeddings
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("t5 t7")["input_ids"] == [5, 7]


@pytest.mark.parametrize(
    ("name", "field", "own_class", "stored", "weight"),
    [
        ("summed", DepthAverage(), SCHEDULED, "xielu_in_a_layer_schedule", "schedule.sums.2.weight"),
        ("hybrid", Mamba(layers=[1], chunk=8), HYBRID, "xielu_beside_mamba_2", "layers.1.attention.out_norm"),
    ],
)
def test_what_no_class_of_transformers_computes_is_exported_with_its_code_and_only_opened_by_it(
    stages: Stages,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    field: Any,
    own_class: OwnClass,
    stored: str,
    weight: str,
) -> None:
    """Whole, and a layer at a time; by the file of this package and by its copy in the folder; never by the
    class of Apertus."""
    from transformers import ApertusForCausalLM, dynamic_module_utils

    changed = {"depth_average" if isinstance(field, DepthAverage) else "mamba": field}
    model = SPEC.model.model_copy(update=changed)
    spec = SPEC.model_copy(update={"model": model, "end_step": 3})
    artifact = stages.train(name, spec)
    checkpoint = artifact.checkpoint(3)
    part = EXPORT.model_copy(update={"model": spec.model})
    inputs = {"checkpoint": stages.ref(f"pretrain/{name}", 3), "tokenizer": stages.ref("tokenizer/tokenizer")}
    exported = stages.run("export", name, part, inputs=inputs)
    folder = Path(stages.store.full(exported.stored_name("config.json"))).parent
    assert exported.manifest.metrics["logit_difference"] < 1e-5
    code = importlib.resources.files("apertus_model.model") / own_class.file
    assert (folder / own_class.file).read_bytes() == code.read_bytes()
    assert "trust_remote_code=True" in exported.bytes("README.md").decode()
    assert export.compare_by_layer(checkpoint, folder, part) < 1e-5

    own = export.load_model(part, checkpoint)
    trained = own.get_parameter(weight)
    assert trained[-1] != 1.0, "trained, so not as it began"
    path = f"{own_class.module}.{own_class.model}"
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    shipped = dynamic_module_utils.get_class_from_dynamic_module(path, folder)
    assert Path(inspect.getfile(shipped)).is_relative_to(tmp_path)
    theirs = shipped.from_pretrained(folder).eval()
    tokens = torch.arange(5, 17)[None]
    with torch.no_grad():
        expected = own(tokens)
        assert (theirs(tokens).logits - expected).abs().max() < 1e-5
        assert (export.by_cache(theirs, tokens, steps=7) - expected).abs().max() < 1e-5
        greedy = theirs.generate(tokens, max_new_tokens=3, do_sample=False)
        assert greedy[0, 12] == expected[0, -1].argmax()
    with pytest.raises(KeyError, match=stored):
        ApertusForCausalLM.from_pretrained(folder)

    # and imported again, without its code
    described = model_of(exported.json("config.json"))
    assert described == model
    again = ImportModelPart(model=described, url=str(folder), reference=str(folder))
    stages.run("import_model", name, again)
    before = weights_of(artifact, 3)
    imported = weights_of(Artifact(stages.store, f"import_model/{name}"), 1) | {"progress.step": [3]}
    assert imported == {key: before[key] for key in imported} and weight in imported

    with torch.no_grad():
        trained[0] += 0.5  # what the comparison is for
    assert export.largest_difference(own, folder, part) > 1e-4


def test_training_from_an_exported_folder_equals_training_from_its_checkpoint(
    stages: Stages, trained: Artifact
) -> None:
    """The loss before the first update, and held-out losses after each, bit by bit."""
    inputs = {"checkpoint": stages.ref("pretrain/trained", 6), "tokenizer": stages.ref("tokenizer/tokenizer")}
    exported = stages.run("export", "again", EXPORT, inputs=inputs)
    folder = Path(stages.store.full(exported.stored_name("config.json"))).parent
    part = ImportModelPart(
        model=model_of(exported.json("config.json")), url=str(folder), reference=str(folder)
    )
    assert part.model == SPEC.model
    stages.run("import_model", "imported", part)
    branch = SPEC.model_copy(
        update={
            "seed": None,
            "end_step": 2,
            "carry": ["weights"],
            "validation": Validation(interval=1, samples=2),
        }
    )
    rows = []
    for name, parent in (
        ("of-checkpoint", stages.ref("pretrain/trained", 6)),
        ("of-folder", stages.ref("import_model/imported", 1)),
    ):
        history = list(stages.train(name, branch, inputs={"parent": parent}).history())
        rows.append(
            [
                (row["step"], row.get("loss"), row.get("validation"))
                for row in history
                if "loss" in row or "validation" in row
            ]
        )
    assert len(rows[0]) == 4
    assert rows[0] == rows[1]
    assert weights_of(Artifact(stages.store, "pretrain/of-folder"), 2) == weights_of(
        Artifact(stages.store, "pretrain/of-checkpoint"), 2
    )


def test_an_export_that_computes_something_else_is_refused(stages: Stages, trained: Artifact) -> None:
    inputs = {"checkpoint": stages.ref("pretrain/trained", 6), "tokenizer": stages.ref("tokenizer/tokenizer")}
    unreachable = EXPORT.model_copy(update={"tolerance": -1.0})
    with pytest.raises(
        RuntimeError, match=r"ExportError: the logits .* differ .* above the tolerance -1 of the stage"
    ):
        stages.run("export", "refused", unreachable, inputs=inputs)
    assert not Artifact(stages.store, "export/refused").complete


def test_a_changed_weight_shows_in_the_comparison_of_logits(
    stages: Stages, trained: Artifact, tmp_path: Path
) -> None:
    checkpoint = trained.checkpoint(6)
    model = export.load_model(EXPORT, checkpoint)
    export.write_folder(checkpoint, EXPORT, Artifact(stages.store, "tokenizer/tokenizer"), tmp_path)
    assert export.largest_difference(model, tmp_path, EXPORT) < 1e-5
    with torch.no_grad():
        model.layers["1"].attention.k_norm.weight += 0.5
    assert export.largest_difference(model, tmp_path, EXPORT) > 1e-4


OLDEST = os.environ.get("OLDEST_TRANSFORMERS_PYTHON", "")
IN_OLDEST = """
import json, sys, torch, transformers
transformers.logging.set_verbosity_error()
tokens, messages, *folders = map(json.loads, sys.argv[1:])
for folder, auto in folders:
    model = getattr(transformers, auto).from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits.tolist()
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    told = [transformers.__version__, type(model).__name__, logits, text, tokenizer(text)["input_ids"]]
    print(json.dumps(told))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not OLDEST,
    reason=f"needs transformers {LEAST_TRANSFORMERS}: make oldest-transformers, which says how to name it",
)
def test_the_oldest_supported_transformers_computes_the_same_logits_and_tokens(
    trained_tokenizer: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters of xIELU are 24, whose softplus is 24 in bfloat16 too, in which releases below 5 compute
    it."""
    from transformers import AutoTokenizer

    def fill(tensors: dict[str, torch.Tensor], _: Any) -> None:
        for name, tensor in tensors.items():
            tensor.normal_(std=0.3, generator=torch.Generator().manual_seed(crc32(name.encode())))
            if ".act.alpha" in name:
                tensor.fill_(24.0)

    monkeypatch.setattr(export, "load_tensors", fill)
    checkpoint: Any = None
    tokens = torch.randint(0, 128, (2, 64), generator=torch.Generator().manual_seed(0))
    messages = [{"role": "user", "content": "What is 12, and é?"}]
    models = [
        SPEC.model.model_copy(update=changes)
        for changes in ({"rope_scaling": None}, {"rope_scaling": RopeScaling()}, {"head": "reward"})
    ]
    parts = [EXPORT.model_copy(update={"model": model, "sequence_length": 64}) for model in models]
    asked = [tokens.tolist(), messages]
    for index, part in enumerate(parts):
        export.write_folder(checkpoint, part, trained_tokenizer, tmp_path / str(index))
        asked.append([str(tmp_path / str(index)), export.auto_class(part.model).__name__])
    program = [OLDEST, "-c", IN_OLDEST, *map(json.dumps, asked)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for index, (part, line) in enumerate(zip(parts, done.stdout.splitlines(), strict=True)):
        version, opened, logits, text, ids = json.loads(line)
        assert version.startswith(f"{LEAST_TRANSFORMERS}.") and opened == architecture(part.model)
        with torch.no_grad():
            expected = export.load_model(part, checkpoint)(tokens)
        assert (torch.tensor(logits) - expected).abs().max() < 1e-5 * expected.abs().max()
        ours = AutoTokenizer.from_pretrained(tmp_path / str(index))
        assert text == ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ids == ours(text)["input_ids"]


def put_pairs(stages: Stages) -> None:
    """Eight training pairs and two held-out ones: prompts of two tokens, completions of one to five."""
    attempt, random = stages.attempt("labelled_pairs", "pairs"), np.random.default_rng(0)
    for split, pairs in (("train", 8), ("validation", 2)):
        lengths = 2 + random.integers(1, 6, 2 * pairs)
        arrays = {
            "tokens": random.integers(4, 128, lengths.sum()).astype(np.int32),
            "lengths": lengths,
            "prompt_lengths": np.full(2 * pairs, 2),
            "margins": np.zeros(pairs, np.float32),
            "sources": np.zeros(pairs, np.int32),
        }
        for name, array in arrays.items():
            np.save(attempt.workdir / f"{split}-{name}.npy", array)
            attempt.put(attempt.workdir / f"{split}-{name}.npy", f"{split}-{name}.npy")
    attempt.commit(metrics={}, facts={"pad_id": 3})


@pytest.mark.parametrize("lora", [None, slow(Lora(rank=2))])
def test_a_reward_model_is_trained_from_a_checkpoint_and_opens_in_transformers_with_its_rewards(
    stages: Stages, trained: Artifact, lora: Lora | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    if not Artifact(stages.store, "labelled_pairs/pairs").complete:
        put_pairs(stages)
    name = "adapted" if lora else "whole"
    spec = segment(
        "reward_model", seed=None, end_step=2, global_batch_size=2, source_names=["prefs"], lora=lora,
        validation={"interval": 2, "samples": 4},
    )  # fmt: skip
    parent = stages.ref("pretrain/trained", 6)
    inputs = {"pairs": stages.ref("labelled_pairs/pairs"), "parent": parent}
    artifact = stages.run("reward_model", name, spec, inputs=inputs)
    assert artifact.checkpoint(2).facts["validation"].keys() == {"prefs"}
    begun, ended = weights_of(trained, 6), weights_of(artifact, 2)
    assert "lm_head.weight" not in ended and len(ended["lm_head.score"]) == spec.model.dim
    same = begun["layers.0.attention.wo.weight"] == ended["layers.0.attention.wo.weight"]
    assert same == (lora is not None)

    part = EXPORT.model_copy(update={"model": spec.model, "sequence_length": 32})
    read = {
        "checkpoint": stages.ref(f"reward_model/{name}", 2),
        "tokenizer": stages.ref("tokenizer/tokenizer"),
    }
    exported = stages.run("export", name, part, inputs=read)
    assert exported.manifest.metrics["logit_difference"] < 1e-5
    folder = Path(stages.store.full(exported.stored_name("config.json"))).parent
    theirs = AutoModelForTokenClassification.from_pretrained(folder).eval()
    assert type(theirs).__name__ == "ApertusForTokenClassification"
    code = Path(modeling_apertus_reward.__file__)
    assert (folder / code.name).read_bytes() == code.read_bytes()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(classifier).__name__ == "ApertusForSequenceClassification"
    tokens = torch.tensor([[5, 9, 77, 30, 8]])
    own = export.load_model(part, artifact.checkpoint(2))
    with torch.no_grad():
        expected = own(tokens)[0, -1, 0].item()
        assert theirs(tokens).logits[0, -1, 0].item() == pytest.approx(expected, abs=1e-5)
        padded = torch.cat([tokens, torch.full((1, 3), 3)], dim=1)
        assert classifier(padded).logits[0, 0].item() == pytest.approx(expected, abs=1e-5)


def test_a_budget_of_more_than_one_pass_is_refused_with_the_steps_of_one(stages: Stages) -> None:
    if not Artifact(stages.store, "labelled_pairs/pairs").complete:
        put_pairs(stages)
    spec = segment("reward_model", end_step=9, global_batch_size=2)
    with pytest.raises(StageError, match=r"passes over . sequences .* set budget: . samples \(. steps\)"):
        RewardData(stages.store, {"pairs": stages.ref("labelled_pairs/pairs")}, spec)


def test_the_card_names_the_judge_and_its_constitution() -> None:
    stated = {"from": "hf:owner/judge@1", "constitution": "charter.md"}
    served = {"server": {"model": "theirs", "url": "http://host/v1", "api": "chat"}, "revision": "7"}
    for judge, model in (
        (stated, "hf:owner/judge@1"),
        (served | {"constitution": "charter.md"}, "theirs (revision 7)"),
    ):
        part = RewardsPart.model_validate({"reward": {"judge": judge}})
        assert judge_of(part.to_json()) == {"judge": model, "constitution": "charter.md", "scale": "1 to 9"}
    assert judge_of(RewardsPart.model_validate({"reward": "grounded-answer"}).to_json()) == {}
