"""docs/data_formats.md says how another program reads and writes our data. The functions here are that
program: they were written from the page and use nothing of the project."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from apertus_model.data.conversations.stored import ConversationShards
from apertus_model.data.corpora.plan import Probe
from apertus_model.data.corpora.planted import stored_probes
from apertus_model.data.order.mixture import MixtureOrder
from apertus_model.data.order.mixture_recipe import MixtureRecipe
from apertus_model.data.order.permutation import KeyedPermutation
from apertus_model.data.order.samples import MixtureSamples
from apertus_model.data.preferences.samples import PreferenceSamples
from apertus_model.data.tokens.goldfish import goldfish_mask
from apertus_model.data.tokens.megatron import TokenFile, TokenFileWriter
from apertus_model.data.tokens.stream import split_shards
from infra.store import Artifact, Store

PAGE = (Path(__file__).parents[3] / "docs" / "data_formats.md").read_text(encoding="utf-8")


def example(name: str) -> Any:
    """The example of that name on the page; white space inside a hexadecimal string does not count."""
    (text,) = re.findall(rf"```json {name}\n(.*?)```", PAGE, re.DOTALL)
    return json.loads(re.sub(r"\n\s*", "" if name == "tokens" else " ", text))


def written_index(documents: list[list[int]]) -> bytes:
    sizes = [len(document) for document in documents]
    pointers = [2 * sum(sizes[:i]) for i in range(len(sizes))]
    n = len(sizes)
    return struct.pack(
        f"<9sQBQQ{n}i{n}q{n + 1}q", b"MMIDIDX\0\0", 1, 8, n, n + 1, *sizes, *pointers, *range(n + 1)
    )


def read_documents(data: bytes, index: bytes) -> list[list[int]]:
    width, letter = {1: (1, "B"), 2: (1, "b"), 3: (2, "h"), 4: (4, "i"), 5: (8, "q"), 8: (2, "H")}[index[17]]
    n, d = struct.unpack_from("<QQ", index, 18)
    sizes, pointers = struct.unpack_from(f"<{n}i", index, 34), struct.unpack_from(f"<{n}q", index, 34 + 4 * n)
    assert index[:17] == b"MMIDIDX\0\0" + (1).to_bytes(8, "little")
    assert struct.unpack_from(f"<{d}q", index, 34 + 12 * n)[-1] == n
    assert width * sum(sizes) == len(data)
    return [
        list(struct.unpack_from(f"<{size}{letter}", data, pointer))
        for size, pointer in zip(sizes, pointers, strict=True)
    ]


def written_artifact(root: Path, kind: str, files: dict[str, bytes], facts: dict[str, Any]) -> Artifact:
    folder = root / kind / ("f" * 32)
    (folder / "attempts" / "mine").mkdir(parents=True)
    (root / "format.json").write_text('{"format": 3}')
    for name, content in files.items():
        (folder / "attempts" / "mine" / name).write_bytes(content)
    records = {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    }
    (folder / "manifest.json").write_text(
        json.dumps({"attempt": "mine", "files": records, "facts": facts, "metrics": {}})
    )
    return Artifact(Store.open(str(root)), f"{kind}/{'f' * 32}")


def test_a_manifest_with_the_checksum_of_the_page_is_read(tmp_path: Path) -> None:
    artifact = written_artifact(tmp_path, "corpus", {}, {"größe": 1e-05})
    file = tmp_path / artifact.manifest_path
    rest = json.loads(file.read_text())
    formula = re.findall(r"`json\.dumps\(rest, ([^`]*)\)`", PAGE)
    assert formula == ['sort_keys=True, separators=(",", ":")']
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    file.write_text(json.dumps(rest | {"checksum": digest}))
    assert artifact.manifest.facts == {"größe": 1e-05}
    assert artifact.store.without_checksum == set()


def array(values: list[Any], dtype: str) -> bytes:
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({len(values)},), }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    return (
        b"\x93NUMPY\x01\x00"
        + struct.pack("<H", len(header))
        + header.encode()
        + np.array(values, dtype).tobytes()
    )


def mix(value: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        value = (value ^ (value >> shift)) * factor % 2**64
    return value


def permuted(n: int, key: list[Any], x: int) -> int:
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=64, person=b"apertus-permute").digest()
    keys = struct.unpack("<8Q", digest)
    rows = math.isqrt(n) + (math.isqrt(n) ** 2 < n)
    columns = (n + rows - 1) // rows

    while True:
        column, row = x // rows, x % rows
        for r in range(8):
            if r % 2 == 0:
                row = (row + mix(column ^ keys[r])) % rows
            else:
                column = (column + mix(row ^ keys[r])) % columns
        x = column * rows + row
        if x < n:
            return x


def drawn(weights: list[int], n: int) -> list[int]:
    if len(weights) == 1:
        return [n]
    half = len(weights) // 2
    first = math.floor(Fraction(n * sum(weights[:half]), sum(weights)) + Fraction(1, 2))
    return drawn(weights[:half], first) + drawn(weights[half:], n - first)


def sample(page: dict[str, Any], i: int) -> list[int]:
    block, offset = divmod(i, 128)
    before, after = drawn(page["weights"], 128 * block), drawn(page["weights"], 128 * (block + 1))
    listed = [source for source in range(len(before)) for _ in range(after[source] - before[source])]
    digest = hashlib.blake2b(
        json.dumps([page["seed"], block]).encode(), digest_size=8, person=b"apertus-mixture"
    ).digest()
    key = int.from_bytes(digest, "little")
    sources = [
        listed[t] for t in sorted(range(128), key=lambda t: mix(((t + 1) * 0x9E3779B97F4A7C15 + key) % 2**64))
    ]
    source = sources[offset]
    k = before[source] + sources[:offset].count(source)
    epoch, place = divmod(k, page["windows"][source])
    window = permuted(
        page["windows"][source], [page["seed"], "windows", page["fingerprints"][source], epoch], place
    )
    return [i, source, k, epoch, window]


def twister(seed: int, count: int) -> list[int]:
    """The first outputs (at most 227) of MT19937."""
    state = [seed]
    for i in range(1, 624):
        state.append((1812433253 * (state[-1] ^ (state[-1] >> 30)) + i) % 2**32)
    outputs = []
    for i in range(count):
        y = (state[i] & 0x80000000) | (state[i + 1] & 0x7FFFFFFF)
        y = state[i + 397] ^ (y >> 1) ^ (0x9908B0DF if y & 1 else 0)
        y ^= y >> 11
        y ^= (y << 7) & 0x9D2C5680
        y ^= (y << 15) & 0xEFC60000
        outputs.append(y ^ (y >> 18))
    return outputs


def windows(tokens: list[int], length: int, eos: int) -> list[dict[str, list[int]]]:
    found = []
    for w in range((len(tokens) - 1) // length):
        inputs, labels = (
            tokens[w * length : w * length + length],
            tokens[w * length + 1 : w * length + length + 1],
        )
        positions: list[int] = []
        for i in range(length):
            positions.append(0 if i == 0 or inputs[i - 1] == eos else positions[-1] + 1)
        labels = [-100 if token == eos else label for token, label in zip(inputs, labels, strict=True)]
        found.append({"input": inputs, "labels": labels, "positions": positions})
    return found


def test_token_files_are_the_bytes_of_the_page(tmp_path: Path) -> None:
    page = example("tokens")
    data, index = bytes.fromhex(page["bin"]), bytes.fromhex(page["idx"])
    assert read_documents(data, index) == page["documents"]
    assert written_index(page["documents"]) == index
    with TokenFileWriter(tmp_path / "ours", "<u2") as writer:
        for document in page["documents"]:
            writer.write(document)
    assert ((tmp_path / "ours.bin").read_bytes(), (tmp_path / "ours.idx").read_bytes()) == (data, index)
    (tmp_path / "theirs.bin").write_bytes(data)
    (tmp_path / "theirs.idx").write_bytes(index)
    file = TokenFile(tmp_path / "theirs")
    assert [file[i].tolist() for i in range(len(file))] == page["documents"]


def test_a_corpus_that_another_program_wrote_trains_as_the_page_says(tmp_path: Path) -> None:
    tokens, page, recipe = example("tokens"), example("windows"), example("recipe")
    files = {"train-00000.bin": bytes.fromhex(tokens["bin"]), "train-00000.idx": bytes.fromhex(tokens["idx"])}
    facts = {
        "train": ["train-00000"],
        "validation": [],
        "vocab_size": 512,
        "bos_id": 1,
        "eos_id": 2,
        "tokenizer": recipe["tokenizer"],
    }
    corpus = written_artifact(tmp_path, "corpus", files, facts)
    samples = MixtureSamples.open(
        MixtureRecipe.model_validate(recipe),
        [split_shards(corpus, "train")],
        sequence_length=page["sequence_length"],
    )
    seen = {samples.order[i].window: samples[i] for i in range(2)}
    ours = [
        {name: getattr(seen[w], name).tolist() for name in ("input", "labels", "positions")} for w in range(2)
    ]
    theirs = windows(
        [token for document in tokens["documents"] for token in document],
        page["sequence_length"],
        page["eos_id"],
    )
    assert ours == theirs == page["windows"]


def stored_file(root: Path, artifact: str, name: str) -> bytes:
    manifest = json.loads((root / artifact / "manifest.json").read_text())
    record = manifest["files"][name]
    place = record.get("path", f"{artifact}/attempts/{manifest['attempt']}/{name}")
    data = (root / place).read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (record["size"], record["sha256"])
    return data


def test_a_reader_written_from_the_page_finds_the_shards_of_a_corpus(
    expected: Artifact, tokenizer: Artifact, texts: list[str]
) -> None:
    root = Path(expected.store.url.removeprefix("file://"))
    manifest = json.loads((root / expected.path / "manifest.json").read_text())
    facts = manifest["facts"]
    shards = [*facts["train"], *facts["validation"]]
    assert any("path" in manifest["files"][f"{shard}.bin"] for shard in shards)
    documents = [
        document
        for shard in shards
        for document in read_documents(
            *(stored_file(root, expected.path, f"{shard}{suffix}") for suffix in (".bin", ".idx"))
        )
    ]
    assert all((ids[0], ids[-1]) == (facts["bos_id"], facts["eos_id"]) for ids in documents)
    (root / "tokenizer.json").write_bytes(stored_file(root, tokenizer.path, "tokenizer.json"))
    opened = Tokenizer.from_file(str(root / "tokenizer.json"))
    assert sorted(opened.decode(ids[1:-1]) for ids in documents) == sorted(texts)


def test_goldfish_drops_the_documented_labels() -> None:
    page = example("goldfish")
    labels, k, h = page["labels"], page["k"], page["h"]
    assert goldfish_mask(labels, k, h).astype(int).tolist() == page["dropped"]
    assert [output % 2**24 for output in twister(2971215073, 4)] == page["table"]
    # the same generator
    table = np.random.RandomState(2971215073).randint(0, 2**32, 1_000_003, dtype=np.uint32)
    assert table[:4].tolist() == twister(2971215073, 4)
    dropped = []
    for i in range(len(labels)):
        product = math.prod(labels[max(0, i - h + 1) : i + 1]) % 2**64
        product -= 2**64 if product >= 2**63 else 0
        dropped.append(int(i >= h - 1 and int(table[product % 1_000_003]) % 2**24 * k < 2**24))
    assert dropped == page["dropped"]


def test_the_permutation_has_the_values_of_the_page() -> None:
    vectors = example("permutation")
    assert vectors
    for vector in vectors:
        ours = KeyedPermutation(vector["n"], *vector["key"])
        for x, value in enumerate(vector["values"]):
            assert ours(x) == permuted(vector["n"], vector["key"], x) == value


def test_the_order_of_a_mixture_is_that_of_the_page() -> None:
    page = example("order")
    order = MixtureOrder(page["weights"], page["windows"], page["seed"], keys=page["fingerprints"])
    indices = [row[0] for row in page["samples"]]
    assert [[i, *order[i]] for i in indices] == [sample(page, i) for i in indices] == page["samples"]


def test_probes_are_listed_as_on_the_page() -> None:
    page = example("probes")
    (probe,) = page["probes"]
    chosen, tokens = [Probe(text=7, bucket=probe["bucket"])], {f"{7:016x}": probe["token_ids"]}
    assert stored_probes(chosen, tokens, page["length"]).model_dump() == page


def test_conversations_that_another_program_wrote_are_read(tmp_path: Path) -> None:
    page = example("conversations")
    files = {
        "train-00000.bin": struct.pack(f"<{len(page['tokens'])}H", *page["tokens"]),
        "train-00000.idx": written_index([page["tokens"]]),
        "train-00000.mask.npy": array(page["mask"], "|u1"),
        "train-00000.jsonl": (json.dumps(page["line"]) + "\n").encode(),
    }
    shards = ConversationShards(
        written_artifact(tmp_path, "conversations", files, {"train": ["train-00000"], "vocab_size": 512}),
        "train",
    )
    assert shards.tokens(0).tolist() == page["tokens"]
    assert shards.mask(0).tolist() == page["mask"]
    assert json.loads(shards.conversation(0).to_json()) == page["line"]


def test_pairs_that_another_program_wrote_are_read(tmp_path: Path) -> None:
    page = example("pairs")
    types = {"tokens": "<i4", "lengths": "<i8", "prompt_lengths": "<i8", "rewards": "<f4"}
    pairs = written_artifact(
        tmp_path / "a",
        "pairs",
        {f"{name}.npy": array(page[name], dtype) for name, dtype in types.items()},
        {},
    )
    values = {"log_probabilities.npy": array(page["log_probabilities"], "<f4")}
    reference = written_artifact(tmp_path / "b", "log_probabilities", values, {})
    row = PreferenceSamples.open(pairs, reference, sequence_length=12, pad_id=3).row(0)
    assert row.input.tolist() == [*page["tokens"], 3, 3, 3]
    assert row.labels.tolist() == [-100, 5, 2, -100, -100, 6, 7, 2, -100, -100, -100, -100]
    assert row.rewards.tolist() == page["rewards"]
    assert row.reference.tolist() == page["log_probabilities"]
