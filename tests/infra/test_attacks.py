"""Data that try to run code, or to be read from elsewhere: each is refused, and what it would have done
has not happened."""

from __future__ import annotations

import ast
import json
import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from apertus_model.chat.encoder import ChatError
from apertus_model.generation import TransformersGenerator
from apertus_model.prompt_format import OwnFormat
from apertus_model.trainer.checkpoint import load_tensors
from apertus_model.trainer.checkpoint_reader import CheckpointError
from apertus_model.trainer.checkpoint_writer import CheckpointWriter
from infra.store import Artifact, Attempt, Store, StoreError
from infra.store.documents import to_json
from infra.store.hugging_face import open_model
from specs.document import parse
from specs.errors import SpecError
from specs.stages.preference_data import Sampling
from tests.infra.sealed import sealed
from tests.infra.store.attempts import attempt, save

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("apertus_model", "flows", "infra", "specs")


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """The file that an attack would make."""
    return tmp_path / "planted"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = Store.open(str(tmp_path / "store"))
    opened.initialise()
    return opened


class Calls:
    """Pickled, it is a call of `function` with `arguments`, made when it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


# Checkpoints: an index in JSON, and safetensors


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    writer = CheckpointWriter(Store.open(str(tmp_path)), "checkpoint")
    dcp.save({"weight": torch.arange(3.0), "step": torch.tensor(7)}, storage_writer=writer, no_dist=True)
    return tmp_path / "checkpoint"


def loads(checkpoint: Path) -> None:
    load_tensors({"weight": torch.empty(3)}, str(checkpoint))


@pytest.mark.parametrize("file", ["index.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("written_by", ["torch", "pickle"])
def test_a_program_in_place_of_a_file_of_a_checkpoint_does_not_run(
    checkpoint: Path, planted: Path, file: str, written_by: str
) -> None:
    program = Calls(os.system, f"touch {planted}")
    if written_by == "torch":
        torch.save(program, checkpoint / file)
    else:
        (checkpoint / file).write_bytes(pickle.dumps(program))
    with pytest.raises(CheckpointError, match="is damaged"):
        loads(checkpoint)
    assert not planted.exists()


def part(**changes: Any) -> dict[str, Any]:
    return {"file": "rank-00000.safetensors", "offsets": [0], "shape": [3]} | changes


def with_index(checkpoint: Path, **changes: Any) -> None:
    edit(
        checkpoint,
        "index.json",
        tensors={"weight": {"dtype": "F32", "shape": [3], "parts": [part()]} | changes},
    )


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", "a\0", "", 7])
def test_the_index_names_files_beside_it_only(checkpoint: Path, name: Any) -> None:
    with_index(checkpoint)
    loads(checkpoint)
    with_index(checkpoint, parts=[part(file=name)])
    with pytest.raises(CheckpointError, match=r"parts\[0\]\.file is"):
        loads(checkpoint)


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ([2**62, 2**62], [part(offsets=[0, 0], shape=[2**62, 2**62])]),
        ([-3], [part()]),
        ([3], []),
        ([3], [part(shape=[2])]),
        ([3], [part(offsets=[1])]),
        ([3], [part(offsets=[-1])]),
        ([3], [part(shape=[3, 1])]),
        ([3], [part(), part()]),
        ([3], [part(shape=[0]), part(offsets=[0.0])]),
        ([4], [part(shape=[4])]),
    ],
)
def test_parts_that_are_not_those_of_the_tensor_are_refused(
    checkpoint: Path, shape: list[Any], parts: list[Any]
) -> None:
    with_index(checkpoint)
    loads(checkpoint)
    with_index(checkpoint, shape=shape, parts=parts)
    with pytest.raises(CheckpointError):
        loads(checkpoint)


@pytest.mark.parametrize("dtype", ["F64", "I32", "F16", "O", 7, None])
def test_a_type_that_is_not_that_of_the_file_is_refused(checkpoint: Path, dtype: Any) -> None:
    with_index(checkpoint)
    loads(checkpoint)
    with_index(checkpoint, dtype=dtype)
    with pytest.raises(CheckpointError, match="is damaged"):
        loads(checkpoint)


def with_header(checkpoint: Path, header: Any, length: int | None = None) -> None:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    stated = len(data) if length is None else length
    (checkpoint / "rank-00000.safetensors").write_bytes(stated.to_bytes(8, "little") + data + bytes(20))


def entry(**changes: Any) -> dict[str, Any]:
    return {"weight": {"dtype": "F32", "shape": [3], "data_offsets": [8, 20]} | changes}


@pytest.mark.parametrize(
    "header",
    [
        {},
        [],
        b"",
        b"{" * 1000,
        b'{"weight": {"dtype": "F32", "shape": [3], "data_offsets": [8, 20]}, "weight": 0}',
        entry(data_offsets=[12, 24]),
        entry(data_offsets=[-12, 0]),
        entry(data_offsets=[20, 8]),
        entry(data_offsets=[8, 12]),
        entry(data_offsets=[8, 20, 20]),
        entry(data_offsets=[2**70, 2**70 + 12]),
        entry(shape=[2**62]),
        entry(shape=[3, 1]),
        entry(dtype="F64"),
        entry(dtype="O"),
    ],
)
def test_the_header_of_a_file_leads_to_no_other_bytes(checkpoint: Path, header: Any) -> None:
    with_header(checkpoint, entry())
    loads(checkpoint)
    with_header(checkpoint, header)
    with pytest.raises(CheckpointError, match="is damaged"):
        loads(checkpoint)


@pytest.mark.parametrize("length", [0, 1, 2**16, 2**40, 2**64 - 1])
def test_the_length_of_a_header_asks_for_no_more_memory_than_the_file_has_bytes(
    checkpoint: Path, length: int
) -> None:
    with_header(checkpoint, entry(), length)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="is damaged"):
            loads(checkpoint)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["index.json", "rank-00000.safetensors"])
def test_a_file_of_a_checkpoint_is_no_link(checkpoint: Path, name: str, tmp_path: Path) -> None:
    os.rename(checkpoint / name, tmp_path / "elsewhere")
    (checkpoint / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="leads out of the checkpoint through a link"):
        loads(checkpoint)


# Markers and manifests

ESCAPES = ["../../../secret", "..", "a/../../../../secret", "x\0y", "x\\..\\y"]


@pytest.mark.parametrize("escape", ESCAPES)
@pytest.mark.parametrize("field", ["attempt", "folder"])
def test_the_marker_of_a_checkpoint_leads_nowhere_else(
    store: Store, tmp_path: Path, field: str, escape: str
) -> None:
    writing = attempt(store, tmp_path, kind="pretrain", path="pretrain/f")
    save(writing, 10)
    marker = json.loads(to_json(writing.commit_checkpoint(10, {}, files=sealed(writing, 10)).marker)) | {
        field: escape
    }
    store.remove("pretrain/f/checkpoints/00000010.json")
    store.write_once("pretrain/f/checkpoints/00000010.json", to_json(marker))
    with pytest.raises(StoreError):
        writing.artifact.checkpoint(10)


@pytest.mark.parametrize("escape", ESCAPES)
@pytest.mark.parametrize("change", [{"attempt": 0}, {"files": 0}], ids=["attempt", "file"])
def test_a_manifest_leads_nowhere_else(
    store: Store, tmp_path: Path, change: dict[str, Any], escape: str
) -> None:
    writing = attempt(store, tmp_path)
    writing.write_bytes("data.bin", b"abc")
    writing.commit(metrics={})
    path = writing.artifact.manifest_path
    manifest = store.read_json(path)
    if "attempt" in change:
        manifest["attempt"] = escape
    else:
        manifest["files"] = {escape: manifest["files"]["data.bin"]}
    store.remove(path)
    store.write_once(path, to_json(manifest))
    read = Artifact(store, writing.job.path)
    for use in (read.bytes, read.local):
        with pytest.raises(StoreError, match="not a path inside the store"):
            use(escape if "files" in change else "data.bin")


@pytest.mark.parametrize("escape", ESCAPES)
def test_the_history_leads_nowhere_else(store: Store, tmp_path: Path, escape: str) -> None:
    writing = attempt(store, tmp_path, kind="pretrain", path="pretrain/f")
    save(writing, 10)
    writing.add_metrics({"step": 10})
    marker = json.loads(to_json(writing.commit_checkpoint(10, {}, files=sealed(writing, 10)).marker))
    marker["history"][0]["path"] = escape
    store.remove("pretrain/f/checkpoints/00000010.json")
    store.write_once("pretrain/f/checkpoints/00000010.json", to_json(marker))
    with pytest.raises(StoreError, match="not a path inside the store"):
        writing.artifact.checkpoint(10)


@pytest.mark.parametrize("path", ["../../outside", "/etc", "pretrain/../../outside"])
def test_an_artifact_whose_path_leaves_the_store_is_refused(store: Store, path: str) -> None:
    with pytest.raises(StoreError, match="not a path inside the store"):
        _ = Artifact(store, path).manifest


def test_a_stored_file_that_is_a_link_out_of_the_store_is_not_read(store: Store, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"abc")
    writing = attempt(store, tmp_path)
    writing.write_bytes("data.bin", b"abc")
    writing.commit(metrics={})
    stored = Path(store.full(writing.folder("data.bin")))
    stored.unlink()
    stored.symlink_to(tmp_path / "secret")
    with pytest.raises(StoreError, match="through a link"):
        Artifact(store, writing.job.path).bytes("data.bin")


def test_a_unit_key_leads_nowhere_else(store: Store, tmp_path: Path) -> None:
    writing: Attempt = attempt(store, tmp_path)
    with pytest.raises(StoreError, match="not a path inside the store"):
        writing.unit("../../x")


# YAML


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system ['touch {planted}']",
        "!!python/object/new:subprocess.Popen [['touch', '{planted}']]",
        "!!python/name:os.system",
        "!!python/module:antigravity",
        "!include {planted}",
    ],
)
def test_a_tag_of_a_recipe_makes_no_object(planted: Path, value: str) -> None:
    try:
        data = parse(f"name: x\nstages: {value.format(planted=planted)}\n", "recipe.yaml").data
    except SpecError:
        data = {}
    assert not planted.exists()
    assert all(isinstance(found, (str, list, dict, type(None))) for found in data.values())


def test_the_front_matter_of_a_model_card_makes_no_object(hugging_face: Path, planted: Path) -> None:
    (hugging_face / "README.md").write_text(
        f"---\nlicense: !!python/object/apply:os.system ['touch {planted}']\n---\n"
    )
    # the words, of which nobody makes a call
    assert open_model(str(hugging_face)).license == f"touch {planted}"
    assert not planted.exists()


# Models and tokenizers of Hugging Face

CONFIG = {
    "architectures": ["ApertusForCausalLM"],
    "model_type": "apertus",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
}
CONFIG |= {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
CONFIG |= {"hidden_act": "xielu", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}


@pytest.fixture
def hugging_face(tmp_path: Path, planted: Path) -> Path:
    """A model of transformers' own making, with a program beside it."""
    from tokenizers import Tokenizer, models
    from transformers import ApertusConfig, ApertusForCausalLM

    folder = tmp_path / "model"
    ApertusForCausalLM(
        ApertusConfig(**{key: value for key, value in CONFIG.items() if key != "architectures"})
    ).save_pretrained(folder)
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    program = (
        f"open({str(planted)!r}, 'w').close()\nfrom transformers import ApertusForCausalLM as Evil,"
        " ApertusConfig as EvilConfig\n"
    )
    (folder / "evil.py").write_text(program)
    return folder


def edit(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


AUTO_MAP = {
    "AutoConfig": "evil.EvilConfig",
    "AutoModelForCausalLM": "evil.Evil",
    "AutoTokenizer": ["evil.Evil", "evil.Evil"],
}


def generator(folder: Path) -> TransformersGenerator:
    written: Any = SimpleNamespace(end_ids=(2,), pad_id=3)
    return TransformersGenerator(folder, Sampling(max_new_tokens=1), written)


@pytest.mark.parametrize("model_type", ["apertus", "evil"])
def test_code_that_comes_with_a_model_is_not_run(hugging_face: Path, planted: Path, model_type: str) -> None:
    edit(hugging_face, "config.json", auto_map=AUTO_MAP, model_type=model_type)
    edit(hugging_face, "tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class="Evil")
    if model_type == "apertus":
        generator(hugging_face)  # opened as transformers' own
        with pytest.raises(ChatError):  # its tokenizer knows no turns
            OwnFormat(hugging_face / "tokenizer.json", 2, 3)
    else:
        with pytest.raises(ValueError, match=r"evil|custom code"):
            generator(hugging_face)
        with pytest.raises(ValueError, match="evil"):
            open_model(str(hugging_face))
    assert not planted.exists()


def test_a_pickle_of_weights_is_not_read(hugging_face: Path, planted: Path) -> None:
    (hugging_face / "model.safetensors").unlink()
    torch.save(Calls(os.system, f"touch {planted}"), hugging_face / "pytorch_model.bin")
    with pytest.raises(ValueError, match="a pickle, which is never read"):
        open_model(str(hugging_face))
    with pytest.raises(OSError, match="safetensors"):
        generator(hugging_face)
    assert not planted.exists()


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "pytorch_model.bin"])
def test_the_index_of_weights_names_files_of_the_folder(
    hugging_face: Path, tmp_path: Path, file: str
) -> None:
    from apertus_model.model.hf_folder import FolderWeights
    from specs.hugging_face import HuggingFaceError

    spec = open_model(str(hugging_face)).model
    os.rename(hugging_face / "model.safetensors", tmp_path / "secret.safetensors")
    edit(hugging_face, "model.safetensors.index.json", weight_map={"lm_head.weight": file})
    with pytest.raises(HuggingFaceError, match="lacks 1 of 1 files"):
        open_model(str(hugging_face))
    with pytest.raises(HuggingFaceError, match="only safetensors in the folder itself"):
        FolderWeights(str(hugging_face), spec, tmp_path)


def test_a_chat_template_of_a_model_reaches_no_python(hugging_face: Path, planted: Path) -> None:
    """Rewards render with the template of the model's own tokenizer."""
    from jinja2.exceptions import SecurityError
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(hugging_face / "tokenizer.json"))
    reach = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(SecurityError):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], chat_template=reach, tokenize=False)


# Arrays


def test_an_array_of_objects_is_refused(tmp_path: Path, planted: Path) -> None:
    from apertus_model.data.packed import _table
    from apertus_model.data.packed_pairs import load_array

    np.save(tmp_path / "evil.npy", np.array([Calls(os.system, f"touch {planted}")], dtype=object))
    for load in (_table, load_array):
        with pytest.raises(ValueError, match=r"(?i)object|python"):
            load(tmp_path / "evil.npy")
    assert not planted.exists()


# Our own packages

FORBIDDEN_CALLS = {
    *(
        "eval",
        "exec",
        "compile",
        "__import__",
        "pickle.load",
        "pickle.loads",
        "dill.load",
        "cloudpickle.load",
        "marshal.loads",
        "shelve.open",
    ),
    *(
        "yaml.load",
        "yaml.unsafe_load",
        "yaml.full_load",
        "os.system",
        "os.popen",
        "joblib.load",
        "torch.jit.load",
        "torch.hub.load",
    ),
    *("runpy.run_path", "runpy.run_module", "datasets.load_dataset", "load_dataset"),
}
FORBIDDEN_ARGUMENTS = {
    ("trust_remote_code", True),
    ("weights_only", False),
    ("allow_pickle", True),
    ("shell", True),
}
STATED = {"np.load": "allow_pickle", "numpy.load": "allow_pickle", "torch.load": "weights_only"}


def findings(source: str) -> list[str]:
    """What a module says that could run data as code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name, arguments = ast.unparse(node.func), {keyword.arg: keyword.value for keyword in node.keywords}
        found += [f"{name}()" for _ in range(name in FORBIDDEN_CALLS)]
        for argument, value in FORBIDDEN_ARGUMENTS:
            if isinstance(given := arguments.get(argument), ast.Constant) and given.value is value:
                found.append(f"{name}({argument}={value})")
        if name in STATED and STATED[name] not in arguments:
            found.append(f"{name}() without {STATED[name]}")
        if name.endswith((".from_pretrained", ".from_config")) and name.startswith("Auto"):
            given = arguments.get("trust_remote_code")
            if not (isinstance(given, ast.Constant) and given.value is False):
                found.append(f"{name}() without trust_remote_code=False")
        if name == "YAML" and ast.unparse(arguments.get("typ", ast.Constant(None))) not in ("'safe'", "'rt'"):
            found.append("YAML() without typ='safe' or 'rt', which makes no objects either")
    return found


SAFE = {
    # loaders derived from PyYAML's safe one, in C: the task files of the harness are thousands
    "apertus_model/evaluation/harness/data.py": ["yaml.load()"],
    "apertus_model/evaluation/harness/tasks.py": ["yaml.load()"],
    # inside of bubblewrap: tests/apertus_model/evaluation/test_sandbox.py
    "apertus_model/evaluation/sandbox_runner.py": ["exec()", "compile()"],
}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_of_ours_runs_data_as_code(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    assert {
        str(file.relative_to(ROOT)): found for file in files if (found := findings(file.read_text("utf-8")))
    } == {path: calls for path, calls in SAFE.items() if path.startswith(f"{package}/")}


@pytest.mark.parametrize(
    "line",
    [
        *(
            "eval(text)",
            "pickle.load(file)",
            "yaml.load(text)",
            "torch.load(file)",
            "torch.load(file, weights_only=False)",
            "np.load(file)",
        ),
        *(
            "np.load(f, allow_pickle=True)",
            "AutoModel.from_pretrained(x)",
            "AutoModel.from_pretrained(x, trust_remote_code=True)",
            "YAML()",
            "YAML(typ='unsafe')",
        ),
        "subprocess.run(x, shell=True)",
    ],
)
def test_such_a_line_would_be_found(line: str) -> None:
    assert findings(line)
