"""Reads models of Hugging Face folders by transformers.

Invariant: nothing is fetched, no code of a folder is run, and weights are read from safetensors alone.
"""

from pathlib import Path
from typing import Any

import torch


def read_pretrained(kind: Any, folder: Path, dtype: str | torch.dtype = "auto") -> Any:
    """The model of a local folder as a class of transformers (`kind`) opens it, on the CPU, for inference.
    Raises errors of many kinds for a folder that transformers cannot open."""
    quieten_transformers()
    return kind.from_pretrained(
        folder, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
    ).eval()


def quieten_transformers() -> None:
    """Makes transformers log errors only, and show no progress."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def own_device() -> str:
    """The device on which such a model computes in this process."""
    return "cuda" if torch.cuda.is_available() else "cpu"
