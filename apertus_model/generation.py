"""Samples completions from the model in a Hugging Face folder, exported or any causal language model, by
transformers, vLLM or a server.

Invariants: no file is fetched and no code of the folder is run; the random numbers of a batch follow from the
seed and the index of its first prompt.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from apertus_model.completion_server import ServerGenerator
from apertus_model.data.rows import Row
from apertus_model.model.hf_classes import register_own_classes
from apertus_model.pretrained import own_device, read_pretrained
from apertus_model.prompt_format import Completion, OtherFormat, OwnFormat, TextFormat, TokenFormat, config_of
from apertus_model.vllm_client import Vllm
from infra.store import Artifact, Attempt
from specs.launch import Launch
from specs.stages.preference_data import Sampling


class Generator(Protocol):
    """An opened model."""

    def complete(self, prompts: Sequence[Row], *, first: int) -> list[list[Completion]]:
        """`n` completions of each prompt, which is a row of `prompts`. `first`: index of the first prompt
        among all; with the seed of the spec it seeds the batch."""


def open_generator(
    attempt: Attempt, sampling: Sampling, launch: Launch, *, end_of_turn_id: int, pad_id: int
) -> Generator:
    """Opens the model of a part with the inputs of `CompletionsPart`. GenerationError when it cannot be
    asked, VllmError when vLLM is not installed."""
    inputs = attempt.job.inputs
    served = sampling.engine == "server"

    def seed_of(index: int) -> int:
        return batch_seed(sampling.seed, index)

    if "model" not in inputs:
        chat = TextFormat(attempt.input_artifact("tokenizer").local("tokenizer.json"))
        return ServerGenerator(sampling, chat, seed_of)
    folder = local_folder(attempt.input_artifact("model"), attempt.workdir / "model", weights=not served)
    written: OwnFormat | OtherFormat
    if "tokenizer" in inputs:
        tokenizer = attempt.input_artifact("tokenizer").local("tokenizer.json")
        written = OtherFormat(folder, tokenizer, sampling.max_new_tokens)
    else:
        room = config_of(folder).context - sampling.max_new_tokens
        written = OwnFormat(folder / "tokenizer.json", end_of_turn_id, pad_id, room)
    if served:
        return ServerGenerator(sampling, written, seed_of)
    return open_folder(folder, sampling, written, launch)


def open_folder(folder: Path, sampling: Sampling, written: TokenFormat, launch: Launch) -> Generator:
    """Opens the model of a local folder. VllmError when vLLM is not installed."""
    if sampling.engine == "vllm":
        return VllmGenerator(folder, sampling, written, launch.tensor_parallel)
    return TransformersGenerator(folder, sampling, written)


def prompts_at_once(sampling: Sampling, unit: int) -> int:
    """The number of prompts of a unit of work that one call of `complete` is given: for transformers the
    batch size, which changes the results; other engines have a seed for every prompt, and get all at once."""
    return sampling.batch_size if sampling.engine == "transformers" else max(1, unit)


def local_folder(artifact: Artifact, folder: Path, *, weights: bool = True) -> Path:
    """A local folder with the files of an artifact, as links to their checked local copies; without
    `weights`, only those that say how the model is asked."""
    for name in artifact.manifest.files:
        if weights or not name.endswith(".safetensors"):
            link = folder / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(artifact.local(name))
    return folder


def batch_seed(seed: int, first: int) -> int:
    """A 63-bit seed for the batch whose first prompt has index `first`."""
    digest = hashlib.blake2b(json.dumps([seed, first]).encode(), digest_size=8, person=b"apertus-sampling")
    return int.from_bytes(digest.digest(), "little") >> 1


class TransformersGenerator:
    """A generator that calls transformers' `generate`, on one GPU or none: prompts padded on the left, all
    completions of a batch in parallel, until the last one has ended."""

    def __init__(self, folder: Path, sampling: Sampling, written: TokenFormat) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        register_own_classes()
        self._model: Any = read_pretrained(AutoModelForCausalLM, folder).to(own_device())
        self._format, self._sampling = written, sampling
        drawn = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        self._config = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            num_return_sequences=sampling.distinct,
            eos_token_id=list(written.end_ids) or None,
            pad_token_id=written.pad_id,
            **({"do_sample": False} if sampling.greedy else drawn),
        )
        self._model.generation_config = GenerationConfig()  # not the folder's defaults

    @torch.inference_mode()
    def complete(self, prompts: Sequence[Row], *, first: int) -> list[list[Completion]]:
        rows = [self._format.tokens(prompt) for prompt in prompts]
        longest = max(map(len, rows))
        tokens = torch.full((len(prompts), longest), self._format.pad_id)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(rows):
            tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        torch.manual_seed(batch_seed(self._sampling.seed, first))
        tokens, mask = tokens.to(self._model.device), mask.to(self._model.device)
        output = self._model.generate(input_ids=tokens, attention_mask=mask, generation_config=self._config)
        new, each = output[:, longest:].tolist(), self._sampling.distinct
        return [
            [self._format.completion(row) for row in new[begin : begin + each]] * (self._sampling.n // each)
            for begin in range(0, len(new), each)
        ]


class VllmGenerator:
    """A generator that samples with vLLM. Each prompt has its own seed."""

    def __init__(self, folder: Path, sampling: Sampling, written: TokenFormat, gpus: int) -> None:
        self._format, self._seed = written, sampling.seed
        self._copies = sampling.n // sampling.distinct  # vLLM refuses several greedy completions
        self._sampling = {
            "n": sampling.distinct,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(written.end_ids),
            "ignore_eos": True,
            "detokenize": False,
        }
        self._vllm = Vllm(folder, gpus)

    def complete(self, prompts: Sequence[Row], *, first: int) -> list[list[Completion]]:
        seeds = [batch_seed(self._seed, first + index) for index in range(len(prompts))]
        answers = self._vllm.complete([*map(self._format.tokens, prompts)], seeds, self._sampling)
        return [[self._format.completion(tokens) for tokens in answer] * self._copies for answer in answers]
