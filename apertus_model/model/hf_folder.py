"""Weights in a Hugging Face folder: safetensors, in shards with an index, written and read module by module.

A module here is one step of the forward pass: the embedding, a layer, the last norm or the output layer.

Invariants:
- Writing holds at most one shard in memory, and one module in float32. Reading holds one tensor.
- Files, names and order are those that transformers' `save_pretrained` writes for the same model and
  `max_shard_size`.
- Nothing but safetensors is read: no pickle, no code.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

from apertus_model.model.hf import CONSTANTS, check_constants, constant, hugging_face_name, our_name
from apertus_model.model.model import shapes
from infra.store.hugging_face import INDEX, SINGLE, read_small
from specs.foreign import MAX_BYTES, ForeignError, checked, parse_json
from specs.hugging_face import HuggingFaceError
from specs.hugging_face_files import Index
from specs.model import ModelSpec

PATTERN = "model{suffix}.safetensors"
Tensors = dict[str, torch.Tensor]


def module_of(name: str) -> str:
    """The module of one of our weights: `tok_embeddings`, `layers.3`, `norm`, `lm_head`, `schedule`."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def modules(spec: ModelSpec) -> dict[str, dict[str, torch.Size]]:
    """The weights of every module with their shapes, by our names, in the order in which the model computes;
    the weights of a schedule, which belong to all layers, come first."""
    by_module = groupby(shapes(spec).items(), key=lambda item: module_of(item[0]))
    weights = {module: dict(members) for module, members in by_module}
    return {"schedule": weights.pop("schedule"), **weights} if "schedule" in weights else weights


@torch.no_grad()
def write_shards(
    theirs: torch.nn.Module,
    folder: Path,
    *,
    max_shard_size: int,
    dtype: torch.dtype,
    fill: Callable[[Tensors], None],
) -> list[str]:
    """Writes the weights, shard by shard, and an index if there is more than one shard. Returns the names of
    the files with weights.

    Args:
        theirs: transformers' model on the meta device, for names, shapes and order.
        folder: local folder, created if missing.
        max_shard_size: maximum bytes of tensors in a file; a larger tensor has a file of its own.
        dtype: of the stored tensors.
        fill: writes the trained weights into float32 tensors, given by our names.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    planned = {name: tensor.to(dtype) for name, tensor in theirs.state_dict().items()}
    split = split_torch_state_dict_into_shards(
        planned, filename_pattern=PATTERN, max_shard_size=max_shard_size
    )
    for file, names in split.filename_to_tensors.items():
        shard: Tensors = {}
        for _, members in groupby(names, key=lambda name: module_of(our_name(name) or name)):
            shard |= _in_dtype({name: planned[name].shape for name in members}, dtype, fill)
        save_file({name: shard[name] for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        total = sum(parameter.numel() for parameter in theirs.parameters())
        index = {
            "metadata": {"total_parameters": total, **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return list(split.filename_to_tensors)


def _in_dtype(
    wanted: Mapping[str, torch.Size], dtype: torch.dtype, fill: Callable[[Tensors], None]
) -> Tensors:
    """The weights, rounded once to `dtype`, and the constants of xIELU, by their names in transformers."""
    exact = {
        ours: torch.empty(shape) for name, shape in wanted.items() if (ours := our_name(name)) is not None
    }
    if exact:
        fill(exact)
    rounded = {hugging_face_name(ours): weight.to(dtype) for ours, weight in exact.items()}
    return rounded | {name: constant(name, dtype) for name in wanted if our_name(name) is None}


class FolderWeights:
    """The weights of a folder by our names, read one at a time. A file of a remote folder is copied to
    `scratch` while it is read. HuggingFaceError when a weight is missing, unknown or of another shape, or the
    folder has only pickles."""

    def __init__(self, url: str, spec: ModelSpec, scratch: Path) -> None:
        self._fs, self._root = fsspec.core.url_to_fs(url)
        self._scratch = scratch
        self._local = isinstance(self._fs, LocalFileSystem)
        self._file: tuple[str, Any] | None = None
        self.url = url
        self._shapes = {hugging_face_name(name): shape for name, shape in shapes(spec).items()}
        self.files = self._weight_map()
        self._check_names()

    def _weight_map(self) -> dict[str, str]:
        """The file of every tensor, by the tensor's stored name."""
        if self._fs.exists(f"{self._root}/{INDEX}"):
            try:
                index = checked(Index, parse_json(read_small(self._fs, f"{self._root}/{INDEX}", MAX_BYTES)))
            except ForeignError as error:
                raise HuggingFaceError(f"{INDEX} of {self.url} cannot be read: {error}") from error
            return {name: _plain(file) for name, file in index.weight_map.items()}
        if not self._fs.exists(f"{self._root}/{SINGLE}"):
            raise HuggingFaceError(
                f"{self.url} has neither {INDEX} nor {SINGLE}; only safetensors are read, never pickles"
                " (.bin)"
            )
        return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)

    def _check_names(self) -> None:
        if missing := sorted(self._shapes.keys() - self.files.keys()):
            raise HuggingFaceError(
                f"{self.url} lacks {len(missing)} of {len(self._shapes)} weights, the first {missing[0]!r}"
            )
        further = self.files.keys() - self._shapes.keys()
        if unknown := sorted(name for name in further if not name.endswith(CONSTANTS)):
            raise HuggingFaceError(
                f"{self.url} has {len(unknown)} weights that this model does not have, the first"
                f" {unknown[0]!r}"
            )

    def __iter__(self) -> Iterator[str]:
        """Our names, file by file, so that each file is opened once."""
        ours = [(file, name) for theirs, file in self.files.items() if (name := our_name(theirs)) is not None]
        return (name for _, name in sorted(ours))

    def __getitem__(self, name: str) -> torch.Tensor:
        """A weight as stored. HuggingFaceError when its shape is not the model's or a value is not finite."""
        theirs = hugging_face_name(name)
        tensor: torch.Tensor = self._open(self.files[theirs]).get_tensor(theirs)
        if tensor.shape != self._shapes[theirs]:
            raise HuggingFaceError(
                f"{theirs!r} of {self.url} has shape {tuple(tensor.shape)}, config.json says"
                f" {tuple(self._shapes[theirs])}"
            )
        if not (finite := torch.isfinite(tensor)).all():
            raise HuggingFaceError(
                f"{theirs!r} in {self.files[theirs]} of {self.url} has {int((~finite).sum()):,} values of"
                f" {tensor.numel():,} that are NaN or infinite. Fix: get the file again, or another one"
            )
        return tensor

    def _open(self, file: str) -> Any:
        """Opens the only open file. HuggingFaceError when its constants of xIELU are not this model's."""
        from safetensors import SafetensorError, safe_open

        if self._file is None or self._file[0] != file:
            self._file = None
            try:
                opened = safe_open(self._fetch(file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise HuggingFaceError(f"cannot read {file} of {self.url}: {error}") from error
            check_constants(
                {name: opened.get_tensor(name) for name in opened.keys() if name.endswith(CONSTANTS)}  # noqa: SIM118
            )
            self._file = (file, opened)
        return self._file[1]

    def _fetch(self, file: str) -> str:
        if self._local:
            return f"{self._root}/{file}"
        for old in self._scratch.glob("*.safetensors"):
            old.unlink()
        self._scratch.mkdir(parents=True, exist_ok=True)
        self._fs.get_file(f"{self._root}/{file}", str(self._scratch / file))
        return str(self._scratch / file)


def _plain(file: str) -> str:
    """The file name, if it may be opened. HuggingFaceError if it leads out of the folder, or is a pickle."""
    if "/" in file or "\\" in file or not file.endswith(".safetensors"):
        raise HuggingFaceError(
            f"the index names the file {file!r}; only safetensors in the folder itself are read, never"
            " pickles (.bin)"
        )
    return file
