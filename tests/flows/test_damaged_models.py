"""Whatever a Hugging Face folder holds, the answer is a plan or problems that name the file, never another
exception."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flows.planning.plan import make
from infra.store import Store
from specs.errors import SpecError
from specs.recipe import load
from tests.flows.planning.test_bad_recipes import places
from tests.models import model_folder
from tests.recipes import write_recipe

SECONDS = 30.0
RECIPE = """\
name: damaged
sources: {{notes: {{url: "{documents}", format: text, include: ["*.txt"]}}}}
stages:
  tokenizer: {{kind: tokenizer, from: "hf:HF"}}
  corpus: {{kind: corpus, tokenizer: tokenizer, sources: {{notes: {{holdout: 0.2}}}}}}
  evaluate: {{kind: evaluate, from: "hf:HF", sources: [corpus/notes]}}
  export: {{kind: export, from: "hf:HF"}}
"""
FILES = [
    *(
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    ),
    "model.safetensors.index.json",
]
HOSTILE = [
    *(
        "null",
        "true",
        "0",
        "-1",
        "1.5",
        '""',
        '"abc"',
        "[]",
        "{}",
        "[[1]]",
        '{"a": {}}',
        "1e999",
        "NaN",
        "-Infinity",
        '"\\ud800"',
    ),
    *(
        "1000000000000",
        "9" * 40,
        "9" * 400,
        "9" * 5000,
        "1e308",
        "[" * 1000 + "]" * 1000,
        "[" * 100_000 + "]" * 100_000,
    ),
    *(
        '"../../etc/passwd"',
        '"a\\u0000b"',
        '{"a": 1, "a": 2}',
        "[null]",
        '["", 1]',
        '"' + "x" * 100_000 + '"',
    ),
]
MARK = "@@here@@"


def write_model(target: Path) -> Path:
    folder = model_folder(target, rope_scaling=None, num_key_value_heads=1)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 68]}))
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "pad_token": "<pad>"})
    )
    return folder


def fields() -> list[tuple[str, tuple[Any, ...]]]:
    """Every field of every file, and each file as a whole."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        return [
            (name, path) for name in FILES for path in ((), *places(json.loads((model / name).read_text())))
        ]


FIELDS = fields()


def damage(file: Path, path: tuple[Any, ...], value: str) -> None:
    document = json.loads(file.read_text())
    place = document
    for key in path[:-1]:
        place = place[key]
    if path:
        place[path[-1]] = MARK
    file.write_text(json.dumps(document if path else MARK).replace(f'"{MARK}"', value))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("sound") / "model")


def answer(folder: Path, scratch: Path) -> str:
    """The problems of a plan; "" for one that is made. Takes `SECONDS` at most."""
    begun = time.monotonic()
    try:
        make(
            load(write_recipe(scratch, RECIPE.replace("HF", str(folder)))), Store.open(str(scratch / "store"))
        )
        return ""
    except SpecError as error:
        return str(error)
    finally:
        assert time.monotonic() - begun < SECONDS


def damaged(sound: Path, scratch: Path, change: Callable[[Path], object]) -> str:
    folder = shutil.copytree(sound, scratch / "model", dirs_exist_ok=True)
    change(folder)
    return answer(folder, scratch)


def test_the_sound_folder_is_planned(sound: Path, tmp_path: Path) -> None:
    assert answer(sound, tmp_path) == ""


@given(field=st.sampled_from(FIELDS), value=st.sampled_from(HOSTILE))
@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_field_is_planned_or_named_with_its_file(
    sound: Path, tmp_path: Path, field: tuple[str, tuple[Any, ...]], value: str
) -> None:
    name, path = field
    error = damaged(sound, tmp_path, lambda folder: damage(folder / name, path, value))
    assert not error or name in error or "names, the first" in error, error  # the files that an index names
    assert len(error) < 20_000


REFUSED = [
    ("config.json", "num_attention_heads", "0", "num_attention_heads is 0: not above 0"),
    (
        "config.json",
        "max_position_embeddings",
        '"abc"',
        "max_position_embeddings is 'abc': not a whole number",
    ),
    ("config.json", "max_position_embeddings", "null", "max_position_embeddings is null"),
    (
        "config.json",
        "max_position_embeddings",
        "1e999",
        "max_position_embeddings is '1e999', which is not a finite number",
    ),
    ("config.json", "architectures", "5", "architectures is 5: not a list"),
    ("config.json", "rope_parameters", '"abc"', "rope_parameters is 'abc'"),
    (
        "config.json",
        "rope_parameters",
        '{"rope_type": "default", "rope_theta": {}}',
        "rope_parameters.rope_theta is {}",
    ),
    *(
        (name, field, value, f"{field} is")
        for name in ("config.json", "generation_config.json")
        for field in ("bos_token_id", "pad_token_id")
        for value in ('"one"', "[1]", "1.5", "true", "-2")
    ),
    ("config.json", "eos_token_id", "{}", "eos_token_id is {}"),
    ("config.json", "eos_token_id", "[[1]]", "eos_token_id[0] is [1]"),
    (
        "config.json",
        "num_hidden_layers",
        "1000000000000",
        "num_hidden_layers is 1000000000000: above",
    ),
    ("config.json", "initializer_range", "-1.0", "initializer_range is -1.0: not above 0"),
    ("config.json", "num_key_value_heads", "9" * 400, "a number of 400 digits"),
    ("generation_config.json", "eos_token_id", '"x"', "eos_token_id is 'x'"),
    ("tokenizer.json", "added_tokens", "null", "added_tokens is null"),
    ("tokenizer.json", "added_tokens", '[{"content": "x"}]', "added_tokens[0].id is missing"),
    ("tokenizer_config.json", "bos_token", "[]", "bos_token is []"),
    ("model.safetensors.index.json", "weight_map", '["a"]', "weight_map is ['a']"),
    ("model.safetensors.index.json", "weight_map", "{}", "weight_map is {}"),
]


@pytest.mark.parametrize(("name", "field", "value", "message"), REFUSED)
def test_a_value_that_is_none_is_refused_with_file_and_field(
    sound: Path, tmp_path: Path, name: str, field: str, value: str, message: str
) -> None:
    error = damaged(sound, tmp_path, lambda folder: damage(folder / name, (field,), value))
    assert f"{name} of {tmp_path}/model cannot be re" in error
    assert message in error
    assert "Fix: correct its files" in error


def test_a_config_that_is_a_list_is_refused_and_not_called_missing(sound: Path, tmp_path: Path) -> None:
    error = damaged(sound, tmp_path, lambda folder: (folder / "config.json").write_text("[1]"))
    assert "config.json" in error and "it holds [1], not an object" in error
    assert "there is no config.json" not in error


WHOLE: list[Callable[[Path], object]] = [
    lambda file: file.write_bytes(b""),
    lambda file: file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes()),
    lambda file: file.write_bytes(file.read_text().encode("utf-16")),
    lambda file: file.write_bytes(b'{"a": "\xe9"}'),
    lambda file: file.write_bytes(b'{"a": "\0"}'),
    lambda file: (file.unlink(missing_ok=True), file.mkdir()),
    lambda file: (file.unlink(missing_ok=True), os.mkfifo(file)),
    lambda file: (file.unlink(missing_ok=True), file.symlink_to("/dev/zero")),
    lambda file: os.truncate(file, 2**40),
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", range(len(WHOLE)))
def test_a_file_that_is_none_is_named(sound: Path, tmp_path: Path, name: str, change: int) -> None:
    error = damaged(sound, tmp_path, lambda folder: WHOLE[change](folder / name))
    assert name in error


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
CARDS = [
    (BOMB + "license: *i", "README.md:2: more than 100000 values; do aliases repeat each other?"),
    ("license: &a [*a]", "an alias inside what it names"),
    ("license: {a: 1}", "license is {'a': 1}"),
    ("license: [[x]]", "license[0] is ['x']"),
    ("license: mit\nlicense: apache", "README.md:3: license: this key is already on line 2"),
    ("license: [", "README.md:3: not YAML"),
    ("license: " + "[" * 3000, "too deep to read"),
    ("license: " + "9" * 400, "does not fit into 64 bits"),
    ('license: "\\ud800"', "README.md:2: not YAML"),
]


@pytest.mark.parametrize(("front_matter", "message"), CARDS)
def test_front_matter_is_read_within_bounds(
    sound: Path, tmp_path: Path, front_matter: str, message: str
) -> None:
    error = damaged(
        sound,
        tmp_path,
        lambda folder: (folder / "README.md").write_text(f"---\n{front_matter}\n---\n# A model\n"),
    )
    assert "README.md" in error
    assert message in error


NO_LICENCE = [
    "",
    "# no front matter",
    "---\n---\n",
    "---\n# nothing\n---\n",
    "---\nwords\n---\n",
    "---\nx: [1]\n---\n",
]


@pytest.mark.parametrize("text", NO_LICENCE)
def test_a_card_without_licence_states_none(sound: Path, tmp_path: Path, text: str) -> None:
    assert damaged(sound, tmp_path, lambda folder: (folder / "README.md").write_text(text)) == ""
