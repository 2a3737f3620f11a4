"""Runs vLLM for a local folder, in a process of its own (`apertus_model.vllm_process`)."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specs.errors import StageError

VLLM_PYTHON = "APERTUS_VLLM_PYTHON"  # the interpreter of the environment that has vLLM
# Variables that vLLM must not inherit.
OURS = ("PYTHONPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class VllmError(StageError):
    """vLLM cannot be used."""


class VllmProcess:
    """The process that opens a model and then answers questions (`apertus_model.vllm_process`). `packages`:
    those that its environment needs, as pip installs them; VllmError when one is missing."""

    def __init__(self, engine: dict[str, Any], packages: str = "vllm") -> None:
        fix = (
            f"Fix: python -m venv FOLDER && FOLDER/bin/pip install {packages}, on a machine with a GPU, and"
            f" {VLLM_PYTHON}=FOLDER/bin/python; or choose engine: transformers"
        )
        python = os.environ.get(VLLM_PYTHON) or sys.executable
        try:
            self._process = subprocess.Popen(
                [python, "-P", str(Path(__file__).with_name("vllm_process.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={name: value for name, value in os.environ.items() if name not in OURS},
            )
        except OSError as error:
            raise VllmError(f"{VLLM_PYTHON} names {python}, which cannot be run ({error}). {fix}") from error
        answer = self.ask({name: value for name, value in engine.items() if value is not None})
        if "error" in answer:
            raise VllmError(
                f"engine: vllm is chosen, but {python} cannot import vLLM ({answer['error']}). {fix}"
            )

    def ask(self, question: dict[str, Any]) -> Any:
        """Sends a question as one line, and returns the answer."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            print(json.dumps(question), file=process.stdin, flush=True)
        except BrokenPipeError:
            pass  # the process has ended, which is seen below
        if not (line := process.stdout.readline()):
            raise RuntimeError(f"vLLM ended with exit code {process.wait()}; its log above says why")
        return json.loads(line)


class Vllm:
    """A model opened from a folder, in bfloat16, on `gpus` GPUs of this node, which share every layer; none
    of its code is run. `max_tokens`: the most tokens of a prompt and its completion together; by default what
    the model allows. VllmError when vLLM is not installed."""

    def __init__(self, folder: Path, gpus: int, max_tokens: int | None = None) -> None:
        self._process = VllmProcess(
            {
                "model": str(folder),
                "tensor_parallel_size": gpus,
                "dtype": "bfloat16",
                "enable_prefix_caching": True,
                "trust_remote_code": False,
                "load_format": "safetensors",
                "max_model_len": max_tokens,
            }
        )

    def complete(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], sampling: dict[str, Any]
    ) -> list[list[list[int]]]:
        """The ids of the completions of each prompt. `sampling`: arguments of vLLM's `SamplingParams`."""
        return self._process.ask(
            {"prompts": prompts, "sampling": [sampling | {"seed": seed} for seed in seeds]}
        )

    def log_probabilities(self, prompts: Sequence[list[int]], tokens: list[int]) -> list[list[float]]:
        """log p of each of the tokens as the first token after each prompt, over the whole vocabulary.
        VllmError for a release of vLLM that does not return them."""
        answer = self._process.ask({"prompts": prompts, "tokens": tokens})
        if isinstance(answer, dict):
            raise VllmError(f"{answer['error']}. Fix: install a later release of vLLM")
        return answer
