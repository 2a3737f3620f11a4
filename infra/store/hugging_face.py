"""A Hugging Face model as a source: where its folder is, what its small files say. Its weights are not touched here.

`hf:<folder>` is a folder, by path or fsspec URL, as for any other source. Where there is no such folder, `hf:<owner>/<name>` and
`hf:<owner>/<name>@<revision>` are a model of the Hub: first from the local cache, then, unless `HF_HUB_OFFLINE` is set, by a download into
it.

Invariants: nothing but JSON, text and safetensors is asked for, and no code that comes with a model is run. Neither torch nor
transformers is needed.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from infra.store.inputs import SourceError
from specs.hugging_face import HuggingFaceError, model_of
from specs.model import ModelSpec
from specs.sources import resolve_url, without_credentials

TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
SMALL_FILES = ["*.json", "*.jinja", "README.md"]
END_OF_TURN = "<|assistant_end|>"  # as in the chat template
_HUB_ID = re.compile(r"^(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?$")


@dataclass(frozen=True)
class HubModel:
    """A folder with a model. `files` are config.json and what holds the weights; `chat`: it ends its turns; `context`: in tokens."""

    reference: str
    url: str
    model: ModelSpec
    files: tuple[str, ...]
    context: int
    chat: bool
    license: str
    language: str
    tokenizer_digest: str

    @property
    def facts(self) -> dict[str, str]:
        """What lineage and report show of a source."""
        return {"url": self.url, "format": "Hugging Face model", "language": self.language, "license": self.license}


def open_model(reference: str, *, download: bool = True) -> HubModel:
    """Finds and describes a model.

    Args:
        reference: what stands behind `hf:`.
        download: from the Hub, where it is neither a folder nor in the local cache.

    Raises:
        SourceError: there is no such folder or id, or a file of it cannot be read.
        HuggingFaceError: it is not a model that this program can represent, or one without safetensors or tokenizer.
    """
    url = locate(reference, download=download)
    fs, root = fsspec.core.url_to_fs(url)

    def read(name: str) -> bytes | None:
        try:
            data: bytes = fs.cat_file(f"{root.rstrip('/')}/{name}")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SourceError(f"cannot read '{name}' of {url}: {error}") from error
        return data

    config, tokenizer = _json("config.json", read("config.json"), reference), read("tokenizer.json")
    if not config:
        raise SourceError(f"there is no config.json in {url}")
    if tokenizer is None:
        raise HuggingFaceError(
            f"{url} has no tokenizer.json, so nobody knows what its ids mean; put the tokenizer's files beside the weights"
        )
    files = _weight_files(url, [entry.rsplit("/", 1)[-1] for entry in fs.ls(root, detail=False)], read)
    generation = _json("generation_config.json", read("generation_config.json"), reference)
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    added = _json("tokenizer.json", tokenizer, reference).get("added_tokens", [])
    turn = {token["id"] for token in added if token.get("content") == END_OF_TURN}
    card = _front_matter((read("README.md") or b"").decode(errors="replace"))
    return HubModel(
        reference=reference,
        url=url,
        model=model_of(config),
        files=("config.json", *files),
        context=int(config.get("max_position_embeddings", 65_536)),
        chat=bool(turn & set(ends if isinstance(ends, list) else [ends])),
        license=card.get("license", ""),
        language=card.get("language", ""),
        tokenizer_digest=hashlib.sha256(tokenizer).hexdigest(),
    )


def locate(reference: str, *, download: bool = True) -> str:
    """The folder, as local path or fsspec URL, of what stands behind `hf:`. SourceError when there is none."""
    try:
        url = resolve_url(without_credentials(reference))
    except ValueError as error:
        raise SourceError(str(error)) from error
    hub = _HUB_ID.match(reference)
    if "://" in url:
        return url.rstrip("/")
    if Path(url).is_dir():
        return str(Path(url).absolute())
    if hub is None:
        raise SourceError(f"there is no folder {reference}")
    return _snapshot(hub["name"], hub["revision"], download)


def _snapshot(name: str, revision: str | None, download: bool) -> str:
    from huggingface_hub import constants

    missing = f"there is no folder '{name}', and the local Hugging Face cache has no model '{name}'{f' at {revision}' if revision else ''}"
    if not download and not (Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir():
        raise SourceError(missing)  # for a plan, which does not have the time to import what downloads
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted: dict[str, Any] = {"revision": revision, "allow_patterns": [*SMALL_FILES, "*.safetensors"]}
    try:
        return str(snapshot_download(name, local_files_only=True, **wanted))
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise SourceError(f"{missing}; HF_HUB_OFFLINE forbids a download") from error
        if not download:
            raise SourceError(missing) from error
    try:
        return str(snapshot_download(name, **wanted))
    except Exception as error:  # of several libraries, none of which states all that it raises
        reason = (str(error).splitlines() or [""])[0]
        raise SourceError(f"{missing}; its download failed: {type(error).__name__}: {reason}") from error


def _weight_files(url: str, names: list[str], read: Any) -> list[str]:
    """Names of the files with weights, and of their index. HuggingFaceError when one is missing, or when there are only pickles."""
    index = "model.safetensors.index.json"
    if index in names:
        files = sorted({str(file) for file in _json(index, read(index), url).get("weight_map", {}).values()})
        if lost := [file for file in files if file not in names]:
            raise HuggingFaceError(f"{url} lacks {len(lost)} of {len(files)} files that its index names, the first '{lost[0]}'")
        return [index, *files]
    if "model.safetensors" in names:
        return ["model.safetensors"]
    pickles = [name for name in sorted(names) if name.endswith((".bin", ".pt", ".pth"))]
    found = f"it has {pickles[0]}, a pickle, which is never read" if pickles else "there are no weights"
    raise HuggingFaceError(f"{url} has no model.safetensors: {found}; save the model with safetensors")


def _json(name: str, data: bytes | None, where: str) -> dict[str, Any]:
    try:
        document = json.loads(data or b"{}")
    except ValueError as error:
        raise SourceError(f"{name} of {where} is not JSON: {error}") from error
    return document if isinstance(document, dict) else {}


def _front_matter(card: str) -> dict[str, str]:
    """License and language of a model card; empty where it states none."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    parts = card.split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        stated = YAML(typ="safe", pure=True).load(parts[1])
    except YAMLError:
        return {}
    fields = stated if isinstance(stated, dict) else {}
    return {
        name: ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in fields.items()
        if name in ("license", "language") and value
    }
