"""The `export` stage: writes a checkpoint as a Hugging Face folder, and compares it with the trained model.

Artifact: `config.json`, `generation_config.json`, `model*.safetensors` (with an index where there are
several), tokenizer files with the chat template, and `README.md`, the model card.

Invariants:
- A folder is committed only if transformers opens it with the logits of the trained model: as
  `ApertusForCausalLM`; a reward model as `ApertusForTokenClassification` with one output (a file in the
  folder adds sequence classification); a model that is not a plain stack as the class of the modelling file
  in the folder and, if opened as a whole, with the key-value cache too. The metric `verified` says how.
- Memory use is that of one shard, for any size of the model.
"""

import importlib.resources
import json
from pathlib import Path
from typing import Any

import torch

from apertus_model.model.hf_classes import config_class, model_class, register_own_classes
from apertus_model.model.hf_folder import FolderWeights, modules, write_shards
from apertus_model.model.hf_layers import SideBySide
from apertus_model.model.model import ApertusModel, empty_model
from apertus_model.model_card import model_card
from apertus_model.pretrained import quieten_transformers, read_pretrained
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.tokenizer_files import open_folder
from apertus_model.trainer.checkpoint import load_tensors
from apertus_model.trainer.process import engine_process
from infra.store import Artifact, Attempt, Checkpoint
from specs.errors import StageError
from specs.hugging_face import architecture, hugging_face_config, older_rope, own_class, own_file
from specs.model import ModelSpec
from specs.stages.export import ExportPart


class ExportError(StageError):
    """The folder and the trained model differ."""


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Writes, verifies and commits the folder. ExportError when the logits differ too much."""
    part = ExportPart.model_validate(attempt.job.spec)
    checkpoint = attempt.input_checkpoint("checkpoint")
    tokenizer = attempt.input_artifact("tokenizer")
    folder = attempt.workdir / "model"
    with engine_process(threads=attempt.job.launch.cpu_threads):
        with attempt.store.timed():
            write_folder(checkpoint, part, tokenizer, folder)
        progress.update(1, 4, "steps")
        job, length = attempt.job, part.sequence_length
        exported = job.inputs["checkpoint"]
        evaluations = [ref for role, ref in job.inputs.items() if role.startswith("evaluation:")]
        card = model_card(
            attempt.store, exported, evaluations, title=job.pipeline, model=part.model, sequence_length=length
        )
        (folder / "README.md").write_text(card)
        if (ids := len(open_folder(folder))) > part.model.vocab_size:
            sizes = f"the tokenizer has {ids:,} ids, the model {part.model.vocab_size:,} embeddings"
            raise ExportError(sizes)
        progress.update(2, 4, "steps")
        difference, how = verify(checkpoint, folder, part)
        progress.update(3, 4, "steps")
    if not difference <= part.tolerance:
        raise ExportError(
            "the logits of the exported model differ from those of the trained one by up to "
            f"{difference:.3g}, above the tolerance {part.tolerance:g} of the stage. The folder was not "
            "committed"
        )
    for path in sorted(folder.iterdir()):
        attempt.put(path, path.name)
    progress.log(
        f"largest difference of logits: {difference:.2g} ({how}); {part.model.parameters:,} parameters"
    )
    progress.update(4, 4, "steps")
    attempt.commit(
        metrics={"logit_difference": difference, "parameters": part.model.parameters, "verified": how}
    )


def write_folder(checkpoint: Checkpoint, part: ExportPart, tokenizer: Artifact, folder: Path) -> None:
    """Writes weights, configs and tokenizer files as transformers does, a shard in memory at a time."""
    quieten_transformers()
    facts = tokenizer.manifest.facts
    tokens: dict[str, Any] = {
        f"{role}_token_id": facts[f"{role}_id"] for role in ("bos", "eos", "pad") if f"{role}_id" in facts
    }
    if part.chat:  # answers end with the turn
        if facts.get("end_of_turn_id") is None:
            missing = "its tokenizer has no end-of-turn token <|assistant_end|>"
            raise ExportError(f"the model was trained on conversations, but {missing}")
        tokens["eos_token_id"] = int(facts["end_of_turn_id"])
    length = part.sequence_length
    fields = hugging_face_config(part.model, max_position_embeddings=length, dtype=part.dtype, **tokens)
    config = config_class(part.model)(architectures=[architecture(part.model)], **fields)
    with torch.device("meta"):
        theirs = model_class(part.model)(config)
    write_shards(
        theirs,
        folder,
        max_shard_size=part.max_shard_size,
        dtype=getattr(torch, part.dtype),
        fill=lambda tensors: load_tensors(tensors, checkpoint),
    )
    document = json.loads(config.to_json_string())  # what `save_pretrained` writes
    if own_class(part.model) is None:  # others need a later release
        document |= older_rope(document["rope_parameters"])
    (folder / "config.json").write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    if (file := own_file(part.model)) is not None:
        code = importlib.resources.files("apertus_model.model") / file
        (folder / file).write_bytes(code.read_bytes())
    if part.model.head == "vocabulary":
        from transformers import GenerationConfig

        sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0} if part.chat else {}
        GenerationConfig(**tokens, **sampling).save_pretrained(folder)
    for name in tokenizer.manifest.files:
        (folder / name).write_bytes(tokenizer.bytes(name))


def verify(checkpoint: Checkpoint, folder: Path, part: ExportPart) -> tuple[float, str]:
    """The largest difference of logits between the checkpoint and the folder, and the method: whole models if
    both are no larger than a shard, else by layer. ExportError: the folder has another model."""
    if 2 * 4 * part.model.parameters <= part.max_shard_size:  # both in float32
        return largest_difference(load_model(part, checkpoint), folder, part), "opened as a whole"
    return compare_by_layer(checkpoint, folder, part), "every weight bit by bit, logits layer by layer"


def load_model(part: ExportPart, checkpoint: Checkpoint) -> ApertusModel:
    """The trained model on the CPU in float32, with its weights rounded as in the export."""
    model = empty_model(part.model, part.sequence_length)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    state = dict(model.state_dict())
    load_tensors(state, checkpoint)
    model.load_state_dict({name: weight.to(getattr(torch, part.dtype)) for name, weight in state.items()})
    return model.eval()


def largest_difference(model: ApertusModel, folder: Path, part: ExportPart) -> float:
    """Largest absolute difference of float32 logits between the trained model and the folder as transformers
    opens it. ExportError when that is a class other than the config's."""
    theirs = read_pretrained(auto_class(part.model), folder, torch.float32)
    _refuse_another_class(theirs, part.model)
    tokens = _probe(part, rows=2, longest=512)
    with torch.no_grad():
        ours = model(tokens)
        compared = [theirs(tokens).logits]
        if not part.model.stock:  # with our own code, the cache is checked as well
            compared.append(by_cache(theirs, tokens))
        return max((ours - logits).abs().max().item() for logits in compared)


def by_cache(theirs: Any, tokens: torch.Tensor, steps: int = 8) -> torch.Tensor:
    """Logits (batch, seq_len, vocab_size) of a transformers model that reads the last `steps` tokens one
    at a time, with its key-value cache."""
    begin = max(1, tokens.shape[1] - steps)
    output = theirs(tokens[:, :begin], use_cache=True)
    logits = [output.logits]
    for place in range(begin, tokens.shape[1]):
        output = theirs(tokens[:, place : place + 1], past_key_values=output.past_key_values, use_cache=True)
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


def compare_by_layer(checkpoint: Checkpoint, folder: Path, part: ExportPart) -> float:
    """Like `largest_difference`, but with one layer in memory at a time, whose weights are read from the
    folder and compared with the checkpoint bit by bit: ExportError when one differs."""
    from transformers import AutoConfig

    auto = auto_class(part.model)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        opened = auto.from_config(config, trust_remote_code=False)
        _refuse_another_class(opened, part.model)
    stored = FolderWeights(str(folder), part.model, folder)
    sides = SideBySide(part.model, config, _probe(part, rows=1, longest=128))
    difference = 0.0
    for module, members in modules(part.model).items():
        weights = {name: torch.empty(shape) for name, shape in members.items()}
        load_tensors(weights, checkpoint)
        for name, trained in weights.items():
            if not torch.equal(stored[name], trained.to(getattr(torch, part.dtype))):
                raise ExportError(
                    f"'{name}' of the exported folder is not the trained weight; the folder was not committed"
                )
            trained.copy_(stored[name])
        difference = sides.advance(module, weights)
        del weights, trained  # before the next module is read
    return difference


def auto_class(model: ModelSpec) -> Any:
    """The transformers class that opens the folder of a model."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    register_own_classes()
    return AutoModelForTokenClassification if model.head == "reward" else AutoModelForCausalLM


def _refuse_another_class(opened: Any, model: ModelSpec) -> None:
    if type(opened).__name__ != architecture(model):
        raise ExportError(
            f"the exported folder is opened as {type(opened).__name__}, not as {architecture(model)}"
        )


def _probe(part: ExportPart, *, rows: int, longest: int) -> torch.Tensor:
    """Random tokens, the same in each call, as (rows, tokens) int64."""
    shape = (rows, min(part.sequence_length, longest))
    return torch.randint(0, part.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
