"""Makes or reads the planted documents of a corpus (`specs/planted.py`), with their buckets and tokens.

They are stored in `planted.json`, and the chosen probes in `probes.json`; the memorisation suite reads both.

Invariants:
- The documents of a name, their order and their buckets are a function of the spec and the set of texts.
- No two planted documents of a corpus are equal.
"""

import hashlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter

from apertus_model.data.corpora.duplicates import text_hash
from apertus_model.data.corpora.plan import Probe
from apertus_model.data.documents.parsed import Rejection
from apertus_model.data.documents.readers import source_documents
from apertus_model.data.order.permutation import KeyedPermutation
from apertus_model.tokenizer_files import open_tokenizer
from infra.store import Artifact
from infra.store.inputs import SourceError
from specs.base import canonical_json
from specs.foreign import Foreign
from specs.planted import Canaries, Planted
from specs.sources import SourceSpec
from specs.stages.corpus import CorpusPart

FILE = "planted.json"
PROBES = "probes.json"


class StoredProbe(Foreign):
    """A sequence that training has seen a known number of times."""

    bucket: int  # the number of times
    token_ids: list[int]  # from the begin-of-document token on, without the end-of-document token


class StoredProbes(Foreign):
    """`probes.json` of a corpus."""

    length: int  # tokens of each probe
    probes: list[StoredProbe]


class PlantedDocument(BaseModel, frozen=True):
    """A planted document as it is stored. `token_ids` begin with the begin-of-document token and lack the
    end-of-document token, like those of a probe of `repeats`."""

    name: str  # in its source, or the number of a canary
    bucket: int  # copies in the training split
    text: str
    secret: str | None = None  # of a canary
    token_ids: list[int] = []


Encode = Callable[[str], list[int]]
PlantedSets = dict[str, list[PlantedDocument]]  # by name
_STORED = TypeAdapter(PlantedSets)


def planted_documents(part: CorpusPart) -> PlantedSets:
    """The planted documents of a part by name, without their tokens. SourceError when two documents are
    equal, one is empty or cannot be read, or there are fewer documents than buckets."""
    sets: PlantedSets = {}
    seen: dict[str, str] = {}
    for name, planted in sorted(part.process.planted.items()):
        canaries = planted.canaries
        documents = list(_canaries(canaries) if canaries else _texts(name, part.planted[name]))
        for document in documents:
            place = f"'{document.name}' of {name}"
            if document.text in seen:
                raise SourceError(
                    f"planted documents {seen[document.text]} and {place} have the same text. Fix: leave one"
                    " out"
                )
            seen[document.text] = place
        if len(documents) < len(planted.buckets):
            raise SourceError(
                f"{len(documents)} planted documents of '{name}' cannot be divided among"
                f" {len(planted.buckets)} buckets. Fix: add documents, or set fewer buckets"
            )
        sets[name] = _divided(documents, planted)
    return sets


def tokenised(sets: PlantedSets, encode: Encode) -> PlantedSets:
    return {
        name: [document.model_copy(update={"token_ids": encode(document.text)}) for document in documents]
        for name, documents in sets.items()
    }


def encoder(tokenizer_file: Path, bos_id: int) -> Encode:
    """A function from text to its tokens from bos on, without eos. Special tokens are encoded as text."""
    tokenizer = open_tokenizer(tokenizer_file)
    tokenizer.encode_special_tokens = True
    return lambda text: [bos_id, *tokenizer.encode(text, add_special_tokens=False).ids]


def to_json(sets: PlantedSets) -> Any:
    """The content of `planted.json`."""
    return _STORED.dump_python(sets, exclude_none=True)


def from_json(content: Any) -> PlantedSets:
    return _STORED.validate_python(content)


def read_planted(corpus: Artifact, name: str) -> list[PlantedDocument]:
    """The documents that are planted under a name in a stored corpus."""
    return from_json(corpus.json(FILE))[name]


def read_probes(corpus: Artifact, planted: str | None) -> list[StoredProbe]:
    """The probes of a stored corpus: those of `repeats`, or the documents that are planted under a name."""
    if planted is None:
        return corpus.document(PROBES, StoredProbes).probes
    documents = read_planted(corpus, planted)
    return [StoredProbe(bucket=document.bucket, token_ids=document.token_ids) for document in documents]


def stored_probes(probes: list[Probe], tokens: dict[str, list[int]], length: int) -> StoredProbes:
    """The content of probes.json. `tokens`: those of each probe, by the hash of its text in hexadecimal."""
    stored = [StoredProbe(bucket=probe.bucket, token_ids=tokens[f"{probe.text:016x}"]) for probe in probes]
    return StoredProbes(length=length, probes=stored)


def summary(sets: PlantedSets) -> dict[str, dict[str, Any]]:
    """The record of each name in manifests: numbers of documents and of copies, tokens of the copies, and the
    SHA-256 of the sorted texts with their buckets."""
    return {
        name: {
            "documents": len(documents),
            "copies": sum(document.bucket for document in documents),
            "tokens": sum(document.bucket * (len(document.token_ids) + 1) for document in documents),
            "digest": _digest(documents),
        }
        for name, documents in sets.items()
    }


def secrets(canaries: Canaries) -> list[str]:
    """The secret of each canary, all different."""
    order = KeyedPermutation(canaries.space, canaries.seed, "secrets")
    return [canaries.secret(order(index)) for index in range(canaries.count)]


def alternatives(canaries: Canaries, number: int, drawn: str, count: int, seed: int) -> list[str]:
    """Texts that the canary with this number, from 1, could have been: `count` drawn without repetition, or
    all of them if there are fewer. `drawn`: its secret, which is not among them; `seed`: of the draw."""
    order = KeyedPermutation(canaries.space, seed, "alternatives", number)
    candidates = (canaries.secret(order(index)) for index in range(min(canaries.space, count + 1)))
    return [canaries.text(number, secret) for secret in candidates if secret != drawn][:count]


def _canaries(canaries: Canaries) -> Iterator[PlantedDocument]:
    for number, secret in enumerate(secrets(canaries), start=1):
        yield PlantedDocument(name=str(number), bucket=0, text=canaries.text(number, secret), secret=secret)


def _texts(name: str, source: SourceSpec) -> Iterator[PlantedDocument]:
    """The documents of a source. A rejected document is an error: it was meant to be planted."""
    for file, number, document in islice(source_documents(source), source.limit):
        place = f"{file}/{number}"
        if isinstance(document, Rejection):
            raise SourceError(
                f"document {place} of {source.url}, which is planted as '{name}', is rejected:"
                f" {document.problem or document.reason}. Fix: correct it, or leave it out"
            )
        yield PlantedDocument(name=document.id or place, bucket=0, text=document.text)


def _divided(documents: list[PlantedDocument], planted: Planted) -> list[PlantedDocument]:
    """The documents, each with its bucket; those of a source are sorted by the hashes of their texts."""
    if planted.canaries is None:
        documents = sorted(documents, key=lambda document: text_hash(document.text))
    order, buckets = KeyedPermutation(len(documents), planted.seed, "buckets"), planted.buckets
    return [
        document.model_copy(update={"bucket": buckets[order(index) * len(buckets) // len(documents)]})
        for index, document in enumerate(documents)
    ]


def _digest(documents: list[PlantedDocument]) -> str:
    pairs = sorted([document.text, document.bucket] for document in documents)
    return hashlib.sha256(canonical_json(pairs).encode()).hexdigest()
