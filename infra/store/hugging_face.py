"""Finds a Hugging Face model that is used as a source, and reads its small files. Its weights are not touched
here. An Apertus model can be trained; a model of another architecture that transformers has is sampled from
and evaluated.

`hf:<folder>` is a folder, by path or fsspec URL, as for any other source. If there is no such folder,
`hf:<owner>/<name>` and `hf:<owner>/<name>@<revision>` name a model of the Hub: it is read from the local
cache, into which it is downloaded if it is missing and `HF_HUB_OFFLINE` is not set.

Invariants: nothing but JSON, text and safetensors is asked for, and no code that comes with a model is run.
Neither torch nor transformers is needed.
"""

import ast
import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from infra.store.inputs import SourceError
from specs.document import parse
from specs.errors import SpecError
from specs.foreign import (
    MAX_BYTES,
    ForeignError,
    M,
    check_length,
    checked,
    parse_json,
    read_local,
    shown,
    trail,
)
from specs.hugging_face import HuggingFaceError, model_of, other_architecture
from specs.hugging_face_files import (
    Card,
    Config,
    GenerationConfig,
    Index,
    OtherConfig,
    Stored,
    TokenizerConfig,
    TokenizerFile,
    Words,
)
from specs.locations import HUB_ID
from specs.model import ModelSpec
from specs.redaction import without_credentials
from specs.sources import resolve_url

TOKENIZER_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]
FOLDER_FILES = [*TOKENIZER_FILES, "generation_config.json"]  # copied with another architecture's folder
SMALL_FILES = ["*.json", "*.jinja", "README.md"]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_BYTES = 2**20  # the longest small file; a tokenizer and an index may be longer
END_OF_TURN = "<|assistant_end|>"  # as in the chat template


@dataclass(frozen=True)
class HubModel:
    """A folder with a model. `files`: config.json and weights; `chat`: the model ends its turns (Apertus), or
    has a chat template; `context`: its length in tokens; `weight_bytes`: as stored, 0 if unknown; `shape`:
    the dimensions of another architecture, if known."""

    reference: str
    url: str
    model: ModelSpec | None  # None: a model of another architecture
    files: tuple[str, ...]
    context: int
    chat: bool
    license: str
    language: str
    tokenizer_digest: str
    architecture: str = "ApertusForCausalLM"
    weight_bytes: int = 0
    shape: ModelSpec | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"

    @property
    def facts(self) -> dict[str, str]:
        """The facts that lineage and report show about a source."""
        card = {"language": self.language, "license": self.license}
        return {"url": self.url, "format": "Hugging Face model", **card}


def open_model(reference: str, *, download: bool = True) -> HubModel:
    """Finds and describes a model. `reference`: what follows `hf:`; `download`: from the Hub, if it is
    neither a folder nor in the local cache.

    Raises:
        SourceError: there is no such folder or id, or one of its files cannot be read.
        HuggingFaceError: this program cannot represent it, or it has no safetensors or no tokenizer.
    """
    url = locate(reference, download=download)
    fs, root = fsspec.core.url_to_fs(url)

    def read(name: str, most: int = MOST_BYTES) -> bytes | None:
        try:
            with _what(f"{name} of {url}"):
                return read_small(fs, f"{root.rstrip('/')}/{name}", most)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SourceError(f"cannot read '{name}' of {url}: {error}") from error

    def stated(model: type[M], name: str, most: int = MOST_BYTES) -> M:
        """The content of a JSON file; the defaults if the file is missing."""
        data = read(name, most)
        with _what(f"{name} of {url}"):
            return checked(model, {} if data is None else parse_json(data, most))

    if (config := read("config.json")) is None:
        raise SourceError(f"there is no config.json in {url}")
    with _what(f"config.json of {url}"):
        document = parse_json(config)
        other = other_architecture(document, f"config.json of {url}", _causal_models())
        model = model_of(document, f"config.json of {url}") if other is None else None
    settings: Config | OtherConfig = (
        stated(Config, "config.json") if other is None else stated(OtherConfig, "config.json")
    )
    if (tokenizer := read("tokenizer.json", MAX_BYTES)) is None:
        missing = f"{url} has no tokenizer.json, so the meaning of its ids is unknown"
        raise HuggingFaceError(f"{missing}; put the tokenizer's files beside the weights")
    with _what(f"tokenizer.json of {url}"):
        added = checked(TokenizerFile, parse_json(tokenizer)).added_tokens
    template = bool(stated(TokenizerConfig, "tokenizer_config.json").chat_template)
    stated(TokenizerConfig, "special_tokens_map.json")
    sizes = {str(e["name"]).rsplit("/", 1)[-1]: int(e.get("size") or 0) for e in fs.ls(root, detail=True)}
    names = list(sizes)
    files = _weight_files(url, names, lambda: stated(Index, INDEX, MAX_BYTES))
    generation = stated(GenerationConfig, "generation_config.json")
    ends = (generation if "eos_token_id" in generation.model_fields_set else settings).eos_token_id
    turn = {token.id for token in added if token.content == END_OF_TURN}
    weight_bytes = sum(sizes[name] for name in files if name.endswith(".safetensors"))
    stored = stored_model(url)
    card = _card((read("README.md") or b"").decode(errors="replace"), f"{url}/README.md")
    return HubModel(
        reference=reference,
        url=url,
        model=model,
        files=("config.json", *files),
        context=settings.context if isinstance(settings, OtherConfig) else settings.max_position_embeddings,
        chat=(
            bool(turn & set(ends if isinstance(ends, list) else [ends]))
            if other is None
            else template or "chat_template.jinja" in names
        ),
        license=_words(card.license),
        language=_words(card.language),
        tokenizer_digest=hashlib.sha256(tokenizer).hexdigest(),
        architecture=other or "ApertusForCausalLM",
        weight_bytes=weight_bytes,
        shape=dense_shape(stored, weight_bytes) if other is not None else None,
        dtype="float32" if stored.width == 4 else "bfloat16",
    )


def stated_license(url: str) -> str:
    """The licence in the model card of a folder; "" if none can be read."""
    try:
        fs, root = fsspec.core.url_to_fs(resolve_url(url))
        data = read_small(fs, f"{root.rstrip('/')}/README.md", MOST_BYTES)
        return _words(_card(data.decode(errors="replace"), f"{url}/README.md").license)
    except (OSError, ValueError):
        return ""


def stored_model(url: str) -> Stored:
    """What the config.json in a folder says about the weights; nothing if it cannot be read."""
    try:
        fs, root = fsspec.core.url_to_fs(url)
        config = read_small(fs, f"{root.rstrip('/')}/config.json", MOST_BYTES)
        return checked(Stored, parse_json(config))
    except (OSError, ValueError):
        return Stored()


def dense_shape(stored: Stored, weight_bytes: int) -> ModelSpec | None:
    """The dimensions of a dense decoder, by the usual names in `config.json`; None if they are unknown, or if
    the parameters that they make, with the embedding once or twice, are not within 5% of those stored
    (experts). With SiLU, the feed-forward has a gate, as in Llama, Qwen and OLMo. `weight_bytes`: or 0."""
    dim, heads, words = stored.hidden_size, stored.num_attention_heads, stored.vocab_size
    if dim is None or heads is None or words is None or heads < 1:
        return None
    try:
        shape = ModelSpec.model_validate(
            {
                "dim": dim,
                "n_layers": stored.num_hidden_layers,
                "n_heads": heads,
                "n_kv_heads": stored.num_key_value_heads or heads,
                "head_dim": stored.head_dim or dim // heads,
                "ffn_dim": stored.intermediate_size,
                "vocab_size": words,
                "activation": "swiglu" if stored.hidden_act == "silu" else "xielu",
            }
        )
    except ValueError:
        return None
    held = weight_bytes / (stored.width or 2)
    once = shape.parameters - shape.vocab_size * shape.dim
    fits = not held or any(abs(held - number) < 0.05 * held for number in (once, shape.parameters))
    return shape if fits else None


@cache
def _causal_models() -> dict[str, tuple[str, ...]]:
    """The architectures of causal language models in the installed transformers, by `model_type`, read from
    its source: importing it takes seconds and torch, which a plan does without."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.submodule_search_locations, "transformers is required"
    source = Path(spec.submodule_search_locations[0], "models", "auto", "modeling_auto.py").read_text("utf-8")
    for statement in ast.parse(source).body:
        if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)):
            continue
        if ast.unparse(statement.targets[0]) == "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES":
            rows = ast.literal_eval(statement.value.args[0])
            return {kind: (name,) if isinstance(name, str) else tuple(name) for kind, name in rows}
    raise AssertionError("transformers has its table of causal language models elsewhere")


@contextmanager
def _what(name: str) -> Iterator[None]:
    """Names the file in errors about its content."""
    trail.append(name)
    try:
        yield
    except ForeignError as error:
        raise HuggingFaceError(f"{name} cannot be read: {error}") from error


def read_small(fs: AbstractFileSystem, path: str, most: int) -> bytes:
    """The content of a file. ForeignError if it is irregular or longer than `most` bytes; OSError."""
    if isinstance(fs, LocalFileSystem):
        return read_local(path, most)
    check_length(int(fs.size(path) or 0), most)
    data: bytes = fs.cat_file(path)
    return data


def locate(reference: str, *, download: bool = True) -> str:
    """The folder, a path or fsspec URL, that a reference (after `hf:`) names. SourceError without one."""
    try:
        url = resolve_url(without_credentials(reference))
    except ValueError as error:
        raise SourceError(str(error)) from error
    hub = HUB_ID.match(reference)
    if "://" in url:
        return url.rstrip("/")
    if Path(url).is_dir():
        return str(Path(url).absolute())
    if hub is None:
        raise SourceError(f"there is no folder {reference}")
    return _snapshot(hub["name"], hub["revision"], download)


def _snapshot(name: str, revision: str | None, download: bool) -> str:
    from huggingface_hub import constants

    model = f"'{name}'{f' at {revision}' if revision else ''}"
    missing = f"there is no folder '{name}', and the local Hugging Face cache has no model {model}"
    if not download and not (Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir():
        raise SourceError(missing)  # for a plan, which has no time to import the downloader
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
    except Exception as error:  # from several libraries, none of which states all that it raises
        reason = (str(error).splitlines() or [""])[0]
        raise SourceError(f"{missing}; its download failed: {type(error).__name__}: {reason}") from error


def _weight_files(url: str, names: list[str], read_index: Callable[[], Index]) -> list[str]:
    """The names of the files with weights, and of their index. HuggingFaceError when one is missing, when
    there are only pickles, or when there is also one file of all weights, which transformers prefers."""
    if INDEX in names:
        files = sorted(set(read_index().weight_map.values()))
        if SINGLE in names and SINGLE not in files:
            others = f"other programs the {len(files)} files of {INDEX}"
            twice = f"{url} has weights twice: transformers opens {SINGLE}, and {others}"
            raise HuggingFaceError(f"{twice}. Fix: remove {SINGLE}, or the index")
        if lost := [file for file in files if file not in names]:
            count = f"{len(lost)} of {len(files)} files"
            raise HuggingFaceError(f"{url} lacks {count} that its index names, the first {shown(lost[0])}")
        return [INDEX, *files]
    if SINGLE in names:
        return [SINGLE]
    pickles = [name for name in sorted(names) if name.endswith((".bin", ".pt", ".pth"))]
    there = f"it has {pickles[0]}, a pickle, which is never read" if pickles else "there are no weights"
    raise HuggingFaceError(f"{url} has no {SINGLE}: {there}; save the model with safetensors")


def _card(text: str, name: str) -> Card:
    """The content of the front matter of a model card. HuggingFaceError when it cannot be read."""
    parts = text.split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return Card()
    try:  # lines are numbered as in the file
        front_matter = parse("\n" + parts[1], name, or_nothing=True).data
    except SpecError as error:
        raise HuggingFaceError(f"{error.problems[0]}; correct the front matter, or remove it") from error
    with _what(name):
        return checked(Card, front_matter)


def _words(words: Words) -> str:
    return ", ".join(map(str, words if isinstance(words, list) else [words])) if words else ""
