"""Training, evaluation and export as stages: from token files in a store to a verified Hugging Face folder."""

import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import in_processes, segment

import apertus_model.stages.train
from apertus_model.data.megatron import TokenFileWriter
from apertus_model.evaluation.memorisation import compare
from apertus_model.progress import Progress
from apertus_model.stages import evaluate, export, import_model
from apertus_model.stop import StopSignal
from infra.store import Artifact, Attempt, Store
from specs.hugging_face import model_of
from specs.job import InputRef, Job
from specs.launch import Validation
from specs.stages.evaluate import EvaluatePart
from specs.stages.export import ExportPart
from specs.stages.import_model import ImportModelPart
from specs.stages.training import Segment

BOS, EOS, PAD = 1, 2, 3
PROBE = list(range(40, 72))


class Stages:
    """A store, in the folder or elsewhere, with a tokenizer, two corpora and a mixture; runs stages in processes of their own."""

    def __init__(self, folder: Path, url: str | None = None) -> None:
        self.folder = folder
        self.store = Store.open(url or str(folder / "store"))
        self.store.initialise()
        self._tokenizer()
        for name, step in (("steady", 1), ("striding", 3)):
            self._corpus(name, step)
        self._artifact("mixture", "mixture", {}, {}, {"recipe.json": self._recipe()})

    def _tokenizer(self) -> None:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import Whitespace

        words = {f"t{index}": index for index in range(128)} | {"<unk>": 0}
        tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
        tokenizer.pre_tokenizer = Whitespace()
        content = tokenizer.to_str()
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t1", "eos_token": "t2"}
        files = {"tokenizer.json": json.loads(content), "tokenizer_config.json": config}
        facts = {"vocab_size": 128, "bos_id": BOS, "eos_id": EOS, "pad_id": PAD}
        self._artifact("tokenizer", "tokenizer", {}, facts, files)

    def _corpus(self, name: str, step: int) -> None:
        attempt = self._attempt("corpus", name)
        for split, documents in (("train-00000", 60), ("validation-00000", 6)):
            with TokenFileWriter(attempt.workdir / split, np.uint16) as writer:
                for document in range(documents):
                    tokens = (np.arange(20) * step + document) % 100 + 20
                    writer.write([BOS, *tokens.tolist(), EOS])
            for suffix in (".bin", ".idx"):
                attempt.put(attempt.workdir / f"{split}{suffix}", f"{split}{suffix}")
        probes = [{"bucket": bucket, "token_ids": PROBE} for bucket in (0, 8)] + [{"bucket": 8, "token_ids": [1, 2, 3]}]
        attempt.write_json("probes.json", {"length": len(PROBE), "probes": probes})
        facts = {"vocab_size": 128, "bos_id": BOS, "eos_id": EOS, "train": ["train-00000"], "validation": ["validation-00000"]}
        attempt.commit(metrics={}, facts=facts)

    def _recipe(self) -> dict[str, Any]:
        sources = [{"fingerprint": name, "path": f"corpus/{name}", "weight": 1} for name in ("steady", "striding")]
        return {"format": 1, "seed": 3, "vocab_size": 128, "bos_id": BOS, "eos_id": EOS, "sources": sources}

    def _artifact(self, kind: str, name: str, metrics: Any, facts: Any, files: dict[str, Any]) -> None:
        attempt = self._attempt(kind, name)
        for file, content in files.items():
            attempt.write_json(file, content)
        attempt.commit(metrics=metrics, facts=facts)

    def _attempt(self, kind: str, name: str) -> Attempt:
        attempt = Attempt(self.job(kind, name, {}))
        attempt.begin()
        return attempt

    def job(self, kind: str, name: str, spec: Any, *, attempt: str = "first", **fields: Any) -> Job:
        scratch = self.folder / "scratch" / name / attempt
        scratch.mkdir(parents=True, exist_ok=True)
        return Job(
            node=name, kind=kind, version=1, fingerprint=name, spec=spec, identity={}, store=self.store.url,
            path=f"{kind}/{name}", attempt=attempt, scratch=str(scratch), progress=str(scratch / "progress.jsonl"),
            **{"inputs": {}, "launch": {"threads": 1}, **fields},
        )  # fmt: skip

    def ref(self, path: str, step: int | None = None) -> InputRef:
        checkpoint = Artifact(self.store, path).checkpoint(step).folder if step is not None else None
        kind, fingerprint = path.split("/")
        return InputRef(kind=kind, fingerprint=fingerprint, path=path, step=step, checkpoint=checkpoint)

    def run(self, module: Any, job: Job, *, processes: int = 1, stop_after: int | None = None) -> None:
        def work(rank: int) -> None:
            os.environ.pop("RANK") if processes == 1 else None
            stop = CountedStop(stop_after)
            attempt = Attempt(job)
            attempt.begin()
            module.run(job, attempt, Progress(job.progress), stop)

        in_processes(Path(job.scratch), work, processes)

    def train(self, name: str, spec: Segment, *, processes: int = 1, stop_after: int | None = None, **fields: Any) -> Artifact:
        inputs = {"mixture": self.ref("mixture/mixture")} | fields.pop("inputs", {})
        job = self.job("pretrain", name, spec.model_dump(mode="json"), inputs=inputs, **fields)
        self.run(apertus_model.stages.train, job, processes=processes, stop_after=stop_after)
        return Artifact(self.store, f"pretrain/{name}", spec.end_step)


class CountedStop(StopSignal):
    """Asks for a stop when it is looked at for the n-th time."""

    def __init__(self, after: int | None) -> None:
        super().__init__()
        self._left = after

    @property
    def requested(self) -> bool:
        if self._left is None:
            return False
        self._left -= 1
        return self._left < 0


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    return Stages(tmp_path_factory.mktemp("stages"))


SPEC = segment(goldfish={"k": 5, "h": 3}, source_names=["steady", "striding"], validation={"interval": 4, "samples": 2})


@pytest.fixture(scope="module")
def trained(stages: Stages) -> Artifact:
    return stages.train("trained", SPEC)


def test_a_trained_segment_is_a_checkpoint_with_its_history(trained: Artifact) -> None:
    manifest = trained.manifest
    assert manifest.step == 6
    assert trained.checkpoint_steps() == [3, 6]
    metrics = manifest.metrics
    assert (metrics["tokens"], metrics["samples"]) == (6 * 64, 24)
    assert set(metrics["validation"]) == {"steady", "striding"}
    rows = [row for row in trained.history() if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["loss"] == metrics["loss"]
    assert [row["step"] for row in trained.history() if "validation" in row] == [4, 6]
    assert all(0 < row["masked_share"] < 0.5 for row in rows)


def test_an_interrupted_segment_goes_on_to_the_same_bits_and_the_same_history(stages: Stages, trained: Artifact) -> None:
    stages.train("interrupted", SPEC, stop_after=4)
    interrupted = Artifact(stages.store, "pretrain/interrupted", 6)
    assert not interrupted.complete
    assert interrupted.checkpoint_steps() == [3, 4]
    resumed = stages.train("interrupted", SPEC, attempt="second", resume_step=4)
    assert weights_of(resumed, 6) == weights_of(trained, 6)
    ours, theirs = ([(r["step"], r["loss"]) for r in a.history() if "loss" in r] for a in (resumed, trained))
    assert ours == theirs


def test_a_checkpoint_is_not_gone_on_from_with_other_data(stages: Stages) -> None:
    stages.train("moved", SPEC, stop_after=2)
    checkpoint = Artifact(stages.store, "pretrain/moved", 6).checkpoint(2)
    assert checkpoint.facts["data"]["sources"]["steady"]["weight"] == 1
    recipe = stages._recipe()
    recipe["sources"][0]["weight"] = 3
    stages._artifact("mixture", "other", {}, {}, {"recipe.json": recipe})
    other = {"mixture": stages.ref("mixture/other")}
    with pytest.raises(RuntimeError, match=r"checkpoint of step 2 was trained on other data: sources\.steady\.weight: 1 -> 3"):
        stages.train("moved", SPEC, attempt="second", resume_step=2, inputs=other)


def weights_of(artifact: Artifact, step: int) -> dict[str, list[float]]:
    from torch.distributed.checkpoint import load

    from apertus_model.trainer.checkpoint_reader import reader

    storage = reader(artifact.checkpoint(step))
    index = storage.read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in index.items()}
    load(state, storage_reader=storage, no_dist=True)
    return {name: value.flatten().tolist() for name, value in state.items()}


def test_a_segment_that_was_at_its_end_already_only_commits(stages: Stages) -> None:
    artifact = stages.train("ended", SPEC.model_copy(update={"end_step": 3}))
    artifact.store.remove(artifact.manifest_path)
    again = stages.train("ended", SPEC.model_copy(update={"end_step": 3}), attempt="second", resume_step=3)
    assert again.manifest.metrics["tokens"] == 3 * 64


def test_two_processes_follow_one(stages: Stages, trained: Artifact) -> None:
    two = stages.train("two", SPEC, processes=2, launch={"threads": 1, "processes": 2})
    losses = [[row["loss"] for row in artifact.history() if "loss" in row] for artifact in (trained, two)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


def test_the_next_segment_takes_over_everything_and_counts_on(stages: Stages, trained: Artifact) -> None:
    parent = stages.ref("pretrain/trained", 6)
    chained = SPEC.model_copy(update={"seed": None, "start_step": 6, "start_tokens": 384, "sample_offset": 24, "end_step": 8})
    longer = stages.train("longer", SPEC.model_copy(update={"end_step": 8}))
    next_segment = stages.train("next", chained, inputs={"parent": parent})
    assert weights_of(next_segment, 8) == weights_of(longer, 8)
    assert next_segment.manifest.metrics["tokens"] == 8 * 64


def test_a_branch_without_optimizer_begins_with_new_moments(stages: Stages, trained: Artifact) -> None:
    parent = stages.ref("pretrain/trained", 6)
    branch = SPEC.model_copy(update={"seed": None, "end_step": 1, "carry": ["weights"]})
    state = weights_of(stages.train("branch", branch, inputs={"parent": parent}), 1)
    assert state["optimizer.state.norm.weight.step"] == [1.0]
    carried = SPEC.model_copy(update={"seed": None, "end_step": 1, "carry": ["weights", "optimizer"]})
    state = weights_of(stages.train("carried", carried, inputs={"parent": parent}), 1)
    assert state["optimizer.state.norm.weight.step"] == [7.0]


EVALUATION = EvaluatePart(
    model=SPEC.model, sequence_length=16, samples=3, prefix=16, suffix=8, source_names=["steady", "striding"], batch_size=2
)


@pytest.mark.parametrize("processes", [1, 2])
def test_evaluation_scores_each_source_and_each_bucket(stages: Stages, trained: Artifact, processes: int) -> None:
    inputs = {
        "checkpoint": stages.ref("pretrain/trained", 6),
        "source:0": stages.ref("corpus/steady"),
        "source:1": stages.ref("corpus/striding"),
        "probes": stages.ref("corpus/steady"),
    }
    name = f"evaluation-{processes}"
    spec = EVALUATION.model_dump(mode="json")
    stages.run(evaluate, stages.job("evaluate", name, spec, inputs=inputs), processes=processes)
    metrics = Artifact(stages.store, f"evaluate/{name}").manifest.metrics
    assert {key for key in metrics if key.startswith("perplexity")} == {
        "perplexity", "perplexity/steady", "perplexity/striding"
    }  # fmt: skip
    assert {key for key in metrics if key.startswith("memorisation/exact") and key[-1].isdigit()} == {
        "memorisation/exact/0", "memorisation/exact/8"
    }  # fmt: skip
    for measure in ("exact", "rouge_l", "common_substring"):
        found = metrics[f"memorisation/{measure}/8"]
        assert metrics[f"memorisation/{measure}/8/low"] <= found <= metrics[f"memorisation/{measure}/8/high"]
    low, high = sorted((metrics["perplexity/steady"], metrics["perplexity/striding"]))
    assert low <= metrics["perplexity"] <= high
    assert all(math.isfinite(value) for value in metrics.values())
    if processes == 2:
        alone = Artifact(stages.store, "evaluate/evaluation-1").manifest.metrics
        assert metrics == pytest.approx(alone, rel=1e-5)


def test_continuations_are_compared_by_equality_subsequence_and_run() -> None:
    assert compare([1, 2, 3, 4], [1, 2, 3, 4]) == (1.0, 1.0, 1.0)
    assert compare([1, 2, 3, 4], [1, 2, 9, 4]) == (0.0, 0.75, 0.5)
    assert compare([1, 2, 3, 4], [5, 6, 7, 8]) == (0.0, 0.0, 0.0)
    assert compare([1, 2, 3, 4], [4, 1, 2, 3]) == (0.0, 0.75, 0.75)


EXPORT = ExportPart(model=SPEC.model, sequence_length=16, max_shard_size=20_000, tolerance=1e-4)


def test_the_exported_folder_opens_in_transformers_with_the_trained_weights(
    stages: Stages, trained: Artifact, transformers_log: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    inputs = {"checkpoint": stages.ref("pretrain/trained", 6), "tokenizer": stages.ref("tokenizer/tokenizer")}
    stages.run(export, stages.job("export", "folder", EXPORT.model_dump(mode="json"), inputs=inputs))
    artifact = Artifact(stages.store, "export/folder")
    files = artifact.manifest.files
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json", "README.md"} <= files.keys()
    assert sum(name.endswith(".safetensors") for name in files) > 1
    folder = Path(stages.store.full(artifact.stored_name("config.json"))).parent
    transformers_log.clear()
    logging.set_verbosity_warning()  # the export has silenced it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = AutoModelForCausalLM.from_pretrained(folder)
    told = [message for message in transformers_log.messages if not message.startswith("CUDA-fused xIELU not available")]
    assert told == []
    assert type(model).__name__ == "ApertusForCausalLM"
    assert model.config.rope_parameters["rope_theta"] == 500_000
    assert model.config.max_position_embeddings == 16
    assert artifact.manifest.metrics["logit_difference"] < 1e-5
    embeddings = weights_of(trained, 6)["tok_embeddings.weight"]
    assert model.get_input_embeddings().weight.flatten().tolist() == embeddings
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("t5 t7")["input_ids"] == [5, 7]


def test_training_goes_on_from_an_exported_folder_as_from_its_checkpoint(stages: Stages, trained: Artifact) -> None:
    """The loss before the first update, and held-out losses after each, bit by bit."""
    inputs = {"checkpoint": stages.ref("pretrain/trained", 6), "tokenizer": stages.ref("tokenizer/tokenizer")}
    stages.run(export, stages.job("export", "again", EXPORT.model_dump(mode="json"), inputs=inputs))
    exported = Artifact(stages.store, "export/again")
    folder = Path(stages.store.full(exported.stored_name("config.json"))).parent
    part = ImportModelPart(model=model_of(exported.json("config.json")), url=str(folder), reference=str(folder))
    assert part.model == SPEC.model
    stages.run(import_model, stages.job("import_model", "imported", part.model_dump(mode="json")))
    branch = SPEC.model_copy(update={"seed": None, "end_step": 2, "carry": ["weights"], "validation": Validation(interval=1, samples=2)})
    rows = []
    for name, parent in (("of-checkpoint", stages.ref("pretrain/trained", 6)), ("of-folder", stages.ref("import_model/imported", 1))):
        history = list(stages.train(name, branch, inputs={"parent": parent}).history())
        rows.append([(row["step"], row.get("loss"), row.get("validation")) for row in history if "checkpoint" not in row])
    assert len(rows[0]) == 4
    assert rows[0] == rows[1]
    assert weights_of(Artifact(stages.store, "pretrain/of-folder"), 2) == weights_of(Artifact(stages.store, "pretrain/of-checkpoint"), 2)


def test_an_export_that_computes_something_else_is_refused(stages: Stages, trained: Artifact) -> None:
    inputs = {"checkpoint": stages.ref("pretrain/trained", 6), "tokenizer": stages.ref("tokenizer/tokenizer")}
    unreachable = EXPORT.model_copy(update={"tolerance": -1.0})
    job = stages.job("export", "refused", unreachable.model_dump(mode="json"), inputs=inputs)
    with pytest.raises(RuntimeError, match=r"ExportError: the logits .* differ .* above the tolerance -1 of the stage"):
        stages.run(export, job)
    assert not Artifact(stages.store, "export/refused").complete


def test_a_changed_weight_shows_in_the_comparison_of_logits(stages: Stages, trained: Artifact, tmp_path: Path) -> None:
    checkpoint = trained.checkpoint(6)
    model = export.load_model(EXPORT, checkpoint)
    export.write_folder(checkpoint, EXPORT, Artifact(stages.store, "tokenizer/tokenizer"), tmp_path)
    assert export.largest_difference(model, tmp_path, EXPORT) < 1e-5
    with torch.no_grad():
        model.layers["1"].attention.k_norm.weight += 0.5
    assert export.largest_difference(model, tmp_path, EXPORT) > 1e-4
