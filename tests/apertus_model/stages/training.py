"""Stages of training over a store of two tiny corpora, in processes of their own."""

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel

from apertus_model.data.tokens.megatron import TokenFileWriter
from apertus_model.stop import StopSignal
from infra.store import Artifact, Attempt, Store
from specs.job import InputRef, Job
from specs.stages.training import Segment
from tests.apertus_model.harness import segment
from tests.apertus_model.mixtures import recipe_of
from tests.apertus_model.ranks import in_kept_processes
from tests.jobs import checkpoint_at, input_at, job_at, run_stage, stage_of

BOS, EOS, PAD = 1, 2, 3
PROBE = list(range(40, 72))
SPEC = segment(
    goldfish={"k": 5, "h": 3}, source_names=["steady", "striding"], validation={"interval": 4, "samples": 2}
)


class Stages:
    """A store, in the folder or elsewhere, with a tokenizer, two corpora and a mixture; runs stages in other
    processes, with `classes` of data."""

    def __init__(
        self,
        folder: Path,
        url: str | None = None,
        classes: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.folder, self.classes = folder, classes
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
        attempt = self.attempt("corpus", name)
        for split, documents in (("train-00000", 60), ("validation-00000", 6)):
            with TokenFileWriter(attempt.workdir / split, np.uint16) as writer:
                for document in range(documents):
                    tokens = (np.arange(20) * step + document) % 100 + 20
                    writer.write([BOS, *tokens.tolist(), EOS])
            for suffix in (".bin", ".idx"):
                attempt.put(attempt.workdir / f"{split}{suffix}", f"{split}{suffix}")
        probes = [{"bucket": bucket, "token_ids": PROBE} for bucket in (0, 8)] + [
            {"bucket": 8, "token_ids": [1, 2, 3]}
        ]
        attempt.write_json("probes.json", {"length": len(PROBE), "probes": probes})
        codes = [
            {"name": str(number), "bucket": bucket, "text": f"t5 t{number} t6{digit}", "secret": str(digit)}
            | {"token_ids": [BOS, 5, number, 60 + digit]}
            for number, (bucket, digit) in enumerate([(0, 3), (8, 4)], start=1)
        ]
        attempt.write_json("planted.json", {"codes": codes})
        facts = {
            "vocab_size": 128,
            "bos_id": BOS,
            "eos_id": EOS,
            "train": ["train-00000"],
            "validation": ["validation-00000"],
        }
        attempt.commit(metrics={}, facts=facts)

    def _recipe(self) -> dict[str, Any]:
        recipe = recipe_of({"steady": 1, "striding": 1}, seed=3, vocab_size=128, eos_id=EOS)
        return recipe.model_dump()

    def _artifact(self, kind: str, name: str, metrics: Any, facts: Any, files: dict[str, Any]) -> None:
        attempt = self.attempt(kind, name)
        for file, content in files.items():
            attempt.write_json(file, content)
        attempt.commit(metrics=metrics, facts=facts)

    def attempt(self, kind: str, name: str) -> Attempt:
        attempt = Attempt(self.job(kind, name))
        attempt.begin()
        return attempt

    def job(self, kind: str, name: str, spec: BaseModel | None = None, **fields: Any) -> Job:
        """The job of an attempt; `attempt` may name it."""
        fields = {"node": name, "launch": {"threads": 1}, "name": fields.pop("attempt", "first")} | fields
        if spec is not None:
            fields["spec"] = spec.model_dump(mode="json")
        return job_at(f"{kind}/{name}", self.store, self.folder, **fields)

    def ref(self, path: str, step: int | None = None) -> InputRef:
        return input_at(path) if step is None else checkpoint_at(Artifact(self.store, path), step)

    def run(
        self,
        kind: str,
        name: str,
        spec: BaseModel,
        *,
        processes: int = 1,
        stop_after: int | None = None,
        **fields: Any,
    ) -> Artifact:
        """The artifact that the stage has made; `fields` are of the job."""
        classes, job = self.classes, self.job(kind, name, spec, **fields)
        stage_of(kind)  # imported before processes are forked

        def work(rank: int) -> None:
            os.environ.pop("RANK") if processes == 1 else None
            with classes():
                run_stage(job, stop=CountedStop(stop_after))

        in_kept_processes(Path(job.scratch), work, processes)
        return Artifact(self.store, job.path, getattr(spec, "end_step", None))

    def train(
        self,
        name: str,
        spec: Segment,
        kind: str = "pretrain",
        inputs: dict[str, InputRef] | None = None,
        **fields: Any,
    ) -> Artifact:
        """Training on the mixture."""
        inputs = {"mixture": self.ref("mixture/mixture")} | (inputs or {})
        return self.run(kind, name, spec, inputs=inputs, **fields)


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


def weights_of(artifact: Artifact, step: int) -> dict[str, list[float]]:
    from torch.distributed.checkpoint import load

    from apertus_model.trainer.checkpoint_reader import CheckpointReader

    storage = CheckpointReader(artifact.checkpoint(step))
    index = storage.read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in index.items()}
    load(state, storage_reader=storage, no_dist=True)
    return {name: value.flatten().tolist() for name, value in state.items()}
