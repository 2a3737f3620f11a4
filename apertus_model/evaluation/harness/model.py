"""Exported models as models of lm-evaluation-harness, run by transformers or by vLLM.

Invariant: the size of a batch follows from the lengths of its requests and from the vocabulary, so the same
requests are computed in the same batches everywhere. A GPU whose memory is too small for them computes
smaller ones, which may change the last bits of a likelihood.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM

from apertus_model.evaluation.harness.tasks import installed_version
from apertus_model.model.hf_classes import register_own_classes
from apertus_model.pretrained import own_device
from apertus_model.prompt_format import config_of
from apertus_model.tokenizer_files import open_folder
from apertus_model.vllm_client import VllmProcess
from specs.stages.harness import MOST_ROWS, HarnessPart

LOGITS = 4 * 2**30
"""The bytes that the logits of a batch and their log-probabilities may need, in float32."""
Answer = Callable[[list[Instance], bool], list[Any]]


def open_model(folder: Path, part: HarnessPart, gpus: int = 1) -> LM:
    """An exported folder as the harness's model. With several `gpus` the layers, or each layer with vLLM,
    are spread over all that this process sees. VllmError when vLLM is not installed."""
    if part.engine == "vllm":
        return VllmModel(folder, part, gpus)
    register_own_classes()
    return BatchedModel(
        pretrained=str(folder),
        tokenizer=open_folder(folder),
        device=own_device(),
        dtype="auto",
        parallelize=gpus > 1,
        batch_size="auto",
        max_length=part.suite.max_length,
        trust_remote_code=False,
    )


def rows_in(longest: int, vocab_size: int) -> int:
    """The requests of one batch, the longest of `longest` tokens: a power of two, at most `MOST_ROWS`."""
    tokens = LOGITS // (2 * 4 * vocab_size)
    rows = max(1, min(MOST_ROWS, tokens // max(1, longest)))
    return 1 << (rows.bit_length() - 1)


class BatchedModel(HFLM):
    """A transformers model that finds the sizes of its batches by `rows_in`."""

    _texts: Sequence[str] = ()
    _next = 0  # request that begins the next batch
    _rows = 1  # of a batch
    _parts = 1  # into which batches are divided

    @cached_property
    def _vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        """The size of all batches for whole texts; for generation 0: the harness asks `_batch_scheduler`."""
        if not self._texts:
            return 0
        longest = max(len(text.encode()) for text in self._texts)  # every token has at least a byte
        return self._rows_in(min(longest + 1, self.max_length))

    def _batch_scheduler(self, pos: int, n_reordered_requests: Sequence[Any]) -> int:
        """The size of the batch that request `pos` is in. Called for every request, the longest first."""
        if pos == 0:
            self._next = 0
        if pos == self._next:
            self._next += self._rows_in(self._length(n_reordered_requests[pos]))
        return self._rows

    def _rows_in(self, longest: int) -> int:
        self._rows = max(1, rows_in(longest, self._vocabulary) // self._parts)
        return self._rows

    def tok_encode(self, string: str, *args: Any, **kwargs: Any) -> list[int]:
        """The ids of a text, without the BOS of a text whose likelihood is asked for as a whole: the harness
        puts one before it, and would score the second."""
        ids: list[int] = super().tok_encode(string, *args, **kwargs)
        return ids[1:] if self._texts and ids[:1] == [self.prefix_token_id] else ids

    def _length(self, request: Any) -> int:
        if len(request) == 3:  # (texts, context, continuation)
            return min(len(request[1]) + len(request[2]), self.max_length)
        context, arguments = request
        new = int(arguments.get("max_gen_toks", self.max_gen_toks))
        return min(len(self.tok_encode(context)) + new, self.max_length)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        return self._within_memory(super().loglikelihood, requests, disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        return self._within_memory(super().generate_until, requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        self._texts = [request.args[0] for request in requests]
        try:
            return self._within_memory(super().loglikelihood_rolling, requests, disable_tqdm)
        finally:
            self._texts = ()

    def _within_memory(self, answer: Answer, requests: list[Instance], disable_tqdm: bool) -> list[Any]:
        """The answers, with half as many rows in a batch each time that the GPU has too little memory. Later
        requests begin with whole batches again, so that no answer depends on earlier requests."""
        self._parts = 1
        while True:
            try:
                with torch.random.fork_rng(range(torch.cuda.device_count())):  # another try draws the same
                    return answer(requests, disable_tqdm)
            except torch.OutOfMemoryError as error:
                if self._rows == 1:
                    raise
                self._parts *= 2
                print(
                    f"{self._rows} requests at once exceed the memory: {error}; now half as many", flush=True
                )


class VllmModel(LM):
    """The harness's own model for vLLM, in the environment that has both; all requests are in flight."""

    def __init__(self, folder: Path, part: HarnessPart, gpus: int) -> None:
        super().__init__()
        self.tokenizer = open_folder(folder)
        harness, length = installed_version(), part.suite.max_length
        longer = length is not None and length > config_of(folder).context
        self._process = VllmProcess(
            {
                "lm_eval": harness,
                "pretrained": str(folder),
                "dtype": "auto",
                "tensor_parallel_size": gpus,
                "batch_size": "auto",
                "max_length": length,
                # vLLM refuses a length that the folder does not state
                "hf_overrides": {"max_position_embeddings": length} if longer else None,
                "trust_remote_code": False,
                "load_format": "safetensors",
                "seed": part.suite.seed,
            },
            f"vllm lm_eval=={harness}",
        )

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        return self._ask("loglikelihood", requests)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        return self._ask("loglikelihood_rolling", requests)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        """Generates greedily unless sampling is stated, as transformers does: if a task states no
        temperature, the harness leaves vLLM its own, which is 1."""
        for request in requests:
            prompt, settings = request.args
            if not settings.get("do_sample"):
                request.arguments = prompt, {"temperature": 0.0} | settings
        return self._ask("generate_until", requests)

    def _ask(self, kind: str, requests: list[Instance]) -> list[Any]:
        return self._process.ask({"kind": kind, "requests": [request.args for request in requests]})
