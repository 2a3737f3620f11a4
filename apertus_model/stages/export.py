"""The `export` stage: a checkpoint becomes a Hugging Face folder, which is opened again and compared with the trained model.

Artifact: `config.json`, `generation_config.json`, `model*.safetensors` (with an index where there are several), tokenizer files with the
chat template, and `README.md`, the model card.

Invariant: nothing is committed that transformers does not open as `ApertusForCausalLM` with the logits of the trained model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from apertus_model.model.hf import hugging_face_config, to_hugging_face
from apertus_model.model.model import ApertusModel, model_config
from apertus_model.model_card import model_card
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.trainer.checkpoint import load_tensors
from apertus_model.trainer.process import engine_process
from infra.store import Artifact, Attempt
from specs.errors import StageError
from specs.job import Job
from specs.launch import Launch
from specs.stages.export import ExportPart

PROBED_TOKENS = 512


class ExportError(StageError):
    """The folder does not compute what the trained model computes."""


def run(job: Job, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Writes, verifies and commits the folder. ExportError when the logits differ by more than the tolerance."""
    part = ExportPart.model_validate(job.spec)
    checkpoint = job.inputs["checkpoint"]
    assert checkpoint.checkpoint is not None, "the launcher gives the folder"
    tokenizer = Artifact(attempt.store, job.inputs["tokenizer"].path or "")
    folder = attempt.workdir / "model"
    with engine_process(threads=Launch.model_validate(job.launch).threads or 2):
        with attempt.store.timed():
            model = load_model(part, attempt.store.location(checkpoint.checkpoint))
        progress.update(1, 4, "steps")
        write_folder(model, part, tokenizer, folder)
        evaluations = [read for role, read in job.inputs.items() if role.startswith("evaluation:")]
        card = model_card(attempt.store, checkpoint, evaluations, model=part.model, sequence_length=part.sequence_length)
        (folder / "README.md").write_text(card)
        check_tokenizer(folder, part)
        progress.update(2, 4, "steps")
        difference = largest_difference(model, folder, part)
        progress.update(3, 4, "steps")
    if not difference <= part.tolerance:
        raise ExportError(
            f"the logits of the exported model differ from those of the trained one by up to {difference:.3g}; allowed is "
            f"{part.tolerance:g} (tolerance of the stage). The folder was not committed"
        )
    for path in sorted(folder.iterdir()):
        attempt.put(path, path.name)
    progress.log(f"largest difference of logits: {difference:.2g}; {part.model.parameters:,} parameters")
    progress.update(4, 4, "steps")
    attempt.commit(metrics={"logit_difference": difference, "parameters": part.model.parameters})


def load_model(part: ExportPart, location: str) -> ApertusModel:
    """The trained model on the CPU, in float32, from a checkpoint of any layout."""
    config = model_config(part.model, sequence_length=part.sequence_length, attention="sdpa")
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    state = dict(model.state_dict())
    load_tensors(state, location)
    model.load_state_dict(state)
    return model.eval()


def write_folder(model: ApertusModel, part: ExportPart, tokenizer: Artifact, folder: Path) -> None:
    """Writes weights, configs and tokenizer files, as transformers does."""
    from transformers import ApertusConfig, ApertusForCausalLM, GenerationConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    facts = tokenizer.manifest["facts"]
    tokens: dict[str, Any] = {f"{role}_token_id": facts[f"{role}_id"] for role in ("bos", "eos", "pad") if f"{role}_id" in facts}
    if part.chat:
        tokens["eos_token_id"] = end_of_turn(facts)
    config = ApertusConfig(
        architectures=["ApertusForCausalLM"],
        **hugging_face_config(part.model, max_position_embeddings=part.sequence_length, **tokens),
    )
    with torch.device("meta"):
        theirs = ApertusForCausalLM(config)
    theirs.load_state_dict(to_hugging_face(model.state_dict()), strict=True, assign=True)
    theirs.generation_config = GenerationConfig(**tokens, **({"do_sample": True, "temperature": 1.0, "top_p": 1.0} if part.chat else {}))
    theirs.save_pretrained(folder, max_shard_size=part.max_shard_size)
    for name in tokenizer.manifest["files"]:
        (folder / name).write_bytes(tokenizer.bytes(name))


def end_of_turn(facts: dict[str, Any]) -> int:
    """The token that ends an answer. ExportError when the tokenizer has none."""
    if facts.get("end_of_turn_id") is None:
        raise ExportError("the model was trained on conversations, and its tokenizer has no end-of-turn token <|assistant_end|>")
    return int(facts["end_of_turn_id"])


def check_tokenizer(folder: Path, part: ExportPart) -> None:
    """ExportError when transformers opens a tokenizer with ids that the model has no embedding for."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if len(tokenizer) > part.model.vocab_size:
        raise ExportError(f"the tokenizer has {len(tokenizer):,} ids, the model {part.model.vocab_size:,} embeddings")


def largest_difference(model: ApertusModel, folder: Path, part: ExportPart) -> float:
    """Largest absolute difference of float32 logits between the trained model and what transformers reads from the folder.

    Raises:
        ExportError: the folder is opened as something else than `ApertusForCausalLM`.
    """
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    if type(theirs).__name__ != "ApertusForCausalLM":
        raise ExportError(f"the exported folder is opened as {type(theirs).__name__}, not as ApertusForCausalLM")
    length = min(part.sequence_length, PROBED_TOKENS)
    tokens = torch.randint(0, part.model.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return (model(tokens) - theirs(tokens).logits).abs().max().item()
