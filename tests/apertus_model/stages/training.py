"""Stages of training over a store of two tiny corpora, in processes of their own."""

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

import apertus_model.stages.train
from apertus_model.data.tokens.megatron import TokenFileWriter
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from infra.store import Artifact, Attempt, Store
from specs.job import InputRef, Job
from specs.stages.training import Segment
from tests.apertus_model.harness import segment
from tests.apertus_model.mixtures import recipe_of
from tests.apertus_model.ranks import in_kept_processes

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
        attempt = Attempt(self.job(kind, name, {}))
        attempt.begin()
        return attempt

    def job(self, kind: str, name: str, spec: Any, *, attempt: str = "first", **fields: Any) -> Job:
        scratch = self.folder / "scratch" / name / attempt
        scratch.mkdir(parents=True, exist_ok=True)
        return Job(
            node=name, kind=kind, version=1, fingerprint=name, spec=spec, identity={}, store=self.store.url,
            path=f"{kind}/{name}", attempt=attempt, scratch=str(scratch),
            progress=str(scratch / "progress.jsonl"),
            **{"inputs": {}, "launch": {"threads": 1}, **fields},
        )  # fmt: skip

    def ref(self, path: str, step: int | None = None) -> InputRef:
        checkpoint = Artifact(self.store, path).checkpoint(step).folder if step is not None else None
        kind, fingerprint = path.split("/")
        return InputRef(kind=kind, fingerprint=fingerprint, path=path, step=step, checkpoint=checkpoint)

    def run(self, module: Any, job: Job, *, processes: int = 1, stop_after: int | None = None) -> None:
        classes = self.classes

        def work(rank: int) -> None:
            os.environ.pop("RANK") if processes == 1 else None
            stop = CountedStop(stop_after)
            attempt = Attempt(job)
            attempt.begin()
            with classes():
                module.run(job, attempt, Progress(job.progress), stop)

        in_kept_processes(Path(job.scratch), work, processes)

    def train(
        self, name: str, spec: Segment, *, processes: int = 1, stop_after: int | None = None, **fields: Any
    ) -> Artifact:
        inputs = {"mixture": self.ref("mixture/mixture")} | fields.pop("inputs", {})
        kind = fields.pop("kind", "pretrain")
        job = self.job(kind, name, spec.model_dump(mode="json"), inputs=inputs, **fields)
        self.run(apertus_model.stages.train, job, processes=processes, stop_after=stop_after)
        return Artifact(self.store, f"{kind}/{name}", spec.end_step)


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

    from apertus_model.trainer.checkpoint_reader import reader

    storage = reader(artifact.checkpoint(step))
    index = storage.read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in index.items()}
    load(state, storage_reader=storage, no_dist=True)
    return {name: value.flatten().tolist() for name, value in state.items()}
