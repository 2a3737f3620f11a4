"""Data that try to run code, or to be read from elsewhere: each is refused, and what it would have done has not happened."""

from __future__ import annotations

import ast
import copyreg
import io
import json
import os
import pickle
import re
import resource
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MEMBERS
from torch.distributed.checkpoint.metadata import Metadata
from torch.serialization import _get_layout

from apertus_model.chat.encoder import ChatError
from apertus_model.generation import TransformersGenerator
from apertus_model.trainer.checkpoint import load_tensors
from apertus_model.trainer.safe_reader import CheckpointError, read_index, reader
from infra.store import Artifact, Attempt, Store, StoreError
from infra.store.documents import to_json
from infra.store.hugging_face import open_model
from specs.document import parse
from specs.errors import SpecError
from specs.stages.preference_data import Sampling
from tests.infra.sealed import sealed
from tests.infra.test_store import attempt, save

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


# The index of a checkpoint, which is a pickle

MEMBER = "TORCH_CHANNELS_LAST"
NO_MEMBERS = ("", "nothing", "name", "mro", "_missing_", "_member_map_", "__members__", "__class__")


def payloads(planted: Path) -> dict[str, Any]:
    touch = f"open({str(planted)!r}, 'w').close()"
    return {
        "os.system": Calls(os.system, f"touch {planted}"),
        "exec": Calls(exec, touch),
        "eval": Calls(eval, f"open({str(planted)!r}, 'w')"),
        "getattr chain": Calls(getattr, Calls(getattr, torch.Size, "__class__"), "__subclasses__"),
        "getattr of a class": Calls(getattr, Metadata, "version"),
        "getattr of a function": Calls(getattr, _get_layout, "__globals__"),
        "getattr of an object": Calls(getattr, Metadata({}), "__init__"),
        "getattr of a member": Calls(getattr, Calls(MEMBERS, 0), "value"),
        "getattr of a member by its name": Calls(getattr, Calls(getattr, MEMBERS, MEMBER), "__class__"),
        "getattr of a dotted name": Calls(getattr, MEMBERS, f"{MEMBER}.value"),
        "getattr of getattr": Calls(getattr, Calls(getattr, getattr, "__self__"), "eval"),
        "getattr with a default": Calls(getattr, MEMBERS, "nothing", Calls(exec, touch)),
        "getattr of a name that is no text": Calls(getattr, MEMBERS, 0),
        "getattr of a name that cannot be hashed": Calls(getattr, MEMBERS, []),
        **{f"getattr of {name}": Calls(getattr, MEMBERS, name) for name in NO_MEMBERS},
        "torch.load gadget": Calls(torch.load, str(planted)),
        "nested in an allowed class": Metadata(state_dict_metadata={"a": Calls(os.system, f"touch {planted}")}),
        "as an argument of an allowed class": Calls(torch.Size, Calls(exec, touch)),
        "as a key": {Calls(exec, touch): 1},
        "import of a module": Calls(__import__, "antigravity"),
    }


@pytest.mark.parametrize("name", payloads(Path("x")))
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_the_index_of_a_checkpoint_calls_nothing(tmp_path: Path, planted: Path, name: str, protocol: int) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(payloads(planted)[name], protocol))
    with pytest.raises(CheckpointError, match="which no checkpoint of tensors contains"):
        reader(str(tmp_path)).read_metadata()
    assert not planted.exists()


@pytest.mark.parametrize(
    "stream",
    [
        b"\x80\x04\x8c\x05torch\x8c\x0cSize.__new__\x93.",  # a dotted name, which would be followed from attribute to attribute
        b"\x80\x04\x8c\x05torch\x8c\x0b_C._autogen\x93.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.",
        b"cposix\nsystem\n.",
        b"(iposix\nsystem\n.",  # INST, of protocol 0
        b"\x80\x02\x82\x01.",  # EXT1: from the registry of extensions
    ],
)
def test_names_are_looked_up_as_they_stand(stream: bytes) -> None:
    with pytest.raises((CheckpointError, ValueError)):
        read_index(io.BytesIO(stream))


MANY = (2**32 - 1).to_bytes(4, "little"), (2**62).to_bytes(8, "little")
ALLOCATING = [
    b"\x80\x02Nr" + MANY[0] + b".",  # LONG_BINPUT: a memo of as many entries
    b"\x80\x02Nr\xff\xff\xff\x0f.",
    b"Np268435455\n.",  # PUT
    b"Np-1\n.",
    b"\x80\x05\x96" + MANY[1] + b".",  # BYTEARRAY8
    b"\x80\x04\x8e" + MANY[1] + b".",  # BINBYTES8
    b"\x80\x04\x8d" + MANY[1] + b".",  # BINUNICODE8
    b"\x80\x02T\xff\xff\xff\x7f.",  # BINSTRING
    b"\x80\x02\x8b\xff\xff\xff\x7f.",  # LONG4
    b"\x80\x04\x95" + MANY[1] + b"N.",  # FRAME
    b"L" + b"9" * 100_000 + b"L\n.",  # LONG, of as many digits
]


@pytest.mark.parametrize("stream", ALLOCATING)
def test_the_index_asks_for_no_more_memory_than_it_has_bytes(stream: bytes) -> None:
    tracemalloc.start()
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        with pytest.raises((CheckpointError, ValueError, pickle.UnpicklingError)):
            read_index(io.BytesIO(stream))
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # in KiB
    assert time.process_time() - begun < 1


def test_the_index_changes_no_class_that_it_names() -> None:
    """`BUILD` sets attributes of whatever is on the stack: of a class too, and then for the rest of the process."""
    stream = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n(N}X\x07\x00\x00\x00version\x8c\x04evilstb."
    pickle.loads(stream)
    assert Metadata.version == "evil"  # what it does to who is not careful
    Metadata.version = "1.0.0"
    with pytest.raises(CheckpointError, match=r"sets attributes of .*Metadata\.version"):
        read_index(io.BytesIO(stream))
    assert Metadata.version == "1.0.0"


CLASS, GETATTR = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n", b"cbuiltins\ngetattr\n"


@pytest.mark.parametrize(
    ("reached", "where"),
    [
        (CLASS + b"K\x01\x85R", MEMBER),
        (GETATTR + CLASS + b"X\x13\x00\x00\x00" + MEMBER.encode() + b"\x86R", MEMBER),
        (GETATTR, "getattr"),
    ],
    ids=["a member", "a member by its name", "getattr"],
)
def test_the_index_changes_nothing_that_it_reaches(reached: bytes, where: str) -> None:
    with pytest.raises(CheckpointError, match=rf"sets attributes of .*{where}\._value_"):
        read_index(io.BytesIO(b"\x80\x02" + reached + b"}X\x07\x00\x00\x00_value_K\x07sb."))
    assert [member.value for member in MEMBERS] == [0, 1, 2]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    dcp.save({"weight": torch.arange(3.0)}, checkpoint_id=str(folder), no_dist=True)
    return folder


@pytest.mark.parametrize("written_by", ["torch", "pickle"])
def test_the_bytes_of_a_tensor_are_no_program(checkpoint: Path, planted: Path, written_by: str) -> None:
    [file] = checkpoint.glob("*.distcp")
    program, buffer = Calls(os.system, f"touch {planted}"), io.BytesIO()
    if written_by == "torch":
        torch.save(program, buffer)
    else:
        pickle.dump(program, buffer)
    metadata = reader(str(checkpoint)).read_metadata()
    for place in metadata.storage_data.values():
        place.length = len(buffer.getvalue())
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    file.write_bytes(buffer.getvalue())
    with pytest.raises(BaseException, match="holds something else than tensors where its index says tensors"):
        load_tensors({"weight": torch.empty(3)}, str(checkpoint))
    assert not planted.exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", "a\0", "", 7])
def test_the_index_names_files_beside_it_only(checkpoint: Path, name: Any) -> None:
    metadata = reader(str(checkpoint)).read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = name
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="its files lie beside it"):
        load_tensors({"weight": torch.empty(3)}, str(checkpoint))


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_file_of_a_checkpoint_is_no_link(checkpoint: Path, name: str, tmp_path: Path) -> None:
    os.rename(checkpoint / name, tmp_path / "elsewhere")
    (checkpoint / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="leads out of the checkpoint through a link"):
        load_tensors({"weight": torch.empty(3)}, str(checkpoint))


def test_the_format_of_this_program_is_read(checkpoint: Path) -> None:
    state = {"weight": torch.empty(3)}
    load_tensors(state, str(checkpoint))
    assert state["weight"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("enums", "paths", "protocol"),
    [
        pytest.param("by name", b"pathlib", 4, id="3.11.0 to 3.11.3"),
        pytest.param("by value", b"pathlib", 4, id="3.11.4 to 3.12"),
        pytest.param("by value", b"pathlib._local", 4, id="3.13"),
        pytest.param("by value", b"pathlib", 5, id="3.14"),
    ],
)
def test_the_index_of_every_python_is_read(checkpoint: Path, enums: str, paths: bytes, protocol: int) -> None:
    def reduced(member: MEMBERS) -> Any:
        return (getattr, (MEMBERS, member.name)) if enums == "by name" else (MEMBERS, (member.value,))

    written, stream = reader(str(checkpoint)).read_metadata(), io.BytesIO()
    pickler = pickle.Pickler(stream, 2, fix_imports=False)  # the names in this protocol are lines of text
    pickler.dispatch_table = copyreg.dispatch_table | {MEMBERS: reduced}
    pickler.dump(written)
    index = re.sub(rb"cpathlib.*\nPosixPath\n", b"c" + paths + b"\nPosixPath\n", stream.getvalue())
    assert (GETATTR in index) is (enums == "by name") and paths + b"\nPosixPath\n" in index
    (checkpoint / ".metadata").write_bytes(bytes([0x80, protocol]) + index[2:])
    assert reader(str(checkpoint)).read_metadata() == written
    state = {"weight": torch.empty(3)}
    load_tensors(state, str(checkpoint))
    assert state["weight"].tolist() == [0.0, 1.0, 2.0]


# Markers and manifests

ESCAPES = ["../../../secret", "..", "a/../../../../secret", "x\0y", "x\\..\\y"]


@pytest.mark.parametrize("escape", ESCAPES)
@pytest.mark.parametrize("field", ["attempt", "folder"])
def test_the_marker_of_a_checkpoint_leads_nowhere_else(store: Store, tmp_path: Path, field: str, escape: str) -> None:
    writing = attempt(store, tmp_path, kind="pretrain", path="pretrain/f")
    save(writing, 10)
    marker = json.loads(to_json(writing.commit_checkpoint(10, {}, files=sealed(writing, 10)).marker)) | {field: escape}
    store.remove("pretrain/f/checkpoints/00000010.json")
    store.write_once("pretrain/f/checkpoints/00000010.json", to_json(marker))
    with pytest.raises(StoreError):
        writing.artifact.checkpoint(10)


@pytest.mark.parametrize("escape", ESCAPES)
@pytest.mark.parametrize("change", [{"attempt": 0}, {"files": 0}], ids=["attempt", "file"])
def test_a_manifest_leads_nowhere_else(store: Store, tmp_path: Path, change: dict[str, Any], escape: str) -> None:
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
    (hugging_face / "README.md").write_text(f"---\nlicense: !!python/object/apply:os.system ['touch {planted}']\n---\n")
    assert open_model(str(hugging_face)).license == f"touch {planted}"  # the words, of which nobody makes a call
    assert not planted.exists()


# Models and tokenizers of Hugging Face

CONFIG = {"architectures": ["ApertusForCausalLM"], "model_type": "apertus", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64}
CONFIG |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
CONFIG |= {"hidden_act": "xielu", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}


@pytest.fixture
def hugging_face(tmp_path: Path, planted: Path) -> Path:
    """A model of transformers' own making, with a program beside it."""
    from tokenizers import Tokenizer, models
    from transformers import ApertusConfig, ApertusForCausalLM

    folder = tmp_path / "model"
    ApertusForCausalLM(ApertusConfig(**{key: value for key, value in CONFIG.items() if key != "architectures"})).save_pretrained(folder)
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    program = f"open({str(planted)!r}, 'w').close()\nfrom transformers import ApertusForCausalLM as Evil, ApertusConfig as EvilConfig\n"
    (folder / "evil.py").write_text(program)
    return folder


def edit(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


AUTO_MAP = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"]}


@pytest.mark.parametrize("model_type", ["apertus", "evil"])
def test_code_that_comes_with_a_model_is_not_run(hugging_face: Path, planted: Path, model_type: str) -> None:
    edit(hugging_face, "config.json", auto_map=AUTO_MAP, model_type=model_type)
    edit(hugging_face, "tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class="Evil")
    try:
        TransformersGenerator(hugging_face, Sampling(max_new_tokens=1), 2, 3)
    except ChatError:
        assert model_type == "apertus"  # the model was opened, as transformers' own; its tokenizer knows no turns
    except ValueError as error:
        assert model_type == "evil", error
    assert not planted.exists()
    if model_type == "evil":
        with pytest.raises(ValueError, match="evil"):
            open_model(str(hugging_face))


def test_a_pickle_of_weights_is_not_read(hugging_face: Path, planted: Path) -> None:
    (hugging_face / "model.safetensors").unlink()
    torch.save(Calls(os.system, f"touch {planted}"), hugging_face / "pytorch_model.bin")
    with pytest.raises(ValueError, match="a pickle, which is never read"):
        open_model(str(hugging_face))
    with pytest.raises(OSError, match="safetensors"):
        TransformersGenerator(hugging_face, Sampling(max_new_tokens=1), 2, 3)
    assert not planted.exists()


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "pytorch_model.bin"])
def test_the_index_of_weights_names_files_of_the_folder(hugging_face: Path, tmp_path: Path, file: str) -> None:
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
    from apertus_model.data.preference_samples import load_array

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
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen", "joblib.load", "torch.jit.load", "torch.hub.load"),
    *("runpy.run_path", "runpy.run_module", "datasets.load_dataset", "load_dataset"),
}
FORBIDDEN_ARGUMENTS = {("trust_remote_code", True), ("weights_only", False), ("allow_pickle", True), ("shell", True)}
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
        if name == "YAML" and ast.unparse(arguments.get("typ", ast.Constant(None))) != "'safe'":
            found.append("YAML() without typ='safe'")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_of_ours_runs_data_as_code(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    assert {str(file.relative_to(ROOT)): found for file in files if (found := findings(file.read_text("utf-8")))} == {}


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
        ),
        "subprocess.run(x, shell=True)",
    ],
)
def test_such_a_line_would_be_found(line: str) -> None:
    assert findings(line)
