"""Languages are told by the model that the recipe names."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from datatrove.data import Document
from pydantic import TypeAdapter

from apertus_model.data.corpora.filters import Drop, make_check
from apertus_model.data.corpora.language import labels_of
from infra.store.inputs import SourceError
from specs.filters import FilterSpec
from specs.stages.corpus import CorpusSource

Judge = Callable[..., Drop | None]


@pytest.fixture
def language_model(tmp_path: Path) -> Path:
    """A fastText file (version 12) written by hand: words of two languages lie on two axes, and so do the
    labels, 4 units from the origin.

    So a text with a share g of German words among the known ones has the probability 1 / (1 + exp(4 - 8
    g)) of being German."""
    words = dict.fromkeys(("der", "das", "und"), (1.0, 0.0)) | dict.fromkeys(("le", "la", "et"), (0.0, 1.0))
    labels = {"__label__deu_Latn": (4.0, 0.0), "__label__fra": (0.0, 4.0)}
    entries = [(word, 0) for word in words] + [(label, 1) for label in labels]
    dim, softmax, supervised = 2, 3, 3
    data = struct.pack("<2i", 793712314, 12)
    data += struct.pack("<12id", dim, 5, 1, 1, 0, 1, softmax, supervised, 0, 0, 0, 100, 1e-4)
    data += struct.pack("<3i2q", len(entries), len(words), len(labels), 1000, -1)
    data += b"".join(name.encode() + struct.pack("<bqb", 0, 10, kind) for name, kind in entries)
    for rows in (words, labels):
        data += struct.pack("<?2q", False, len(rows), dim) + b"".join(
            struct.pack("<2f", *row) for row in rows.values()
        )
    (tmp_path / "lid.bin").write_bytes(data)
    return tmp_path / "lid.bin"


def test_languages_are_identified_by_the_model_that_the_spec_names(
    judge: Judge, language_model: Path, tmp_path: Path
) -> None:
    spec = {"filter": "language", "model": str(language_model), "languages": ["deu_Latn"]}
    assert judge(spec, "der\ndas Haus\n\nund") is None
    assert judge(spec, "le la") == Drop("fra 0.982", "deu_Latn, at least 0.65")
    mixed, probability = "der das und le", 1 / (1 + math.exp(4 - 8 * 0.75))
    assert judge({**spec, "min_score": probability - 1e-4}, mixed) is None
    assert judge({**spec, "min_score": probability + 1e-4}, mixed) == Drop(
        "deu_Latn 0.881", f"deu_Latn, at least {probability + 1e-4:g}"
    )
    assert judge({**spec, "languages": ["deu_Latn", "fra"]}, "le la") is None
    remote = f"memory://{tmp_path.name}/lid.bin"
    with fsspec.open(remote, "wb") as file:
        file.write(language_model.read_bytes())
    assert [judge({**spec, "model": remote}, text) is None for text in ("der das", "le la")] == [True, False]


def test_language_filter_adds_a_column_for_later_filters(language_model: Path, tmp_path: Path) -> None:
    spec: FilterSpec = TypeAdapter(FilterSpec).validate_python(
        {"filter": "language", "model": str(language_model), "languages": ["fra"]}
    )
    document = Document("le la", "file/0")
    assert make_check(spec, tmp_path)(document) is None
    assert document.metadata["language"] == "fra"
    assert document.metadata["language_score"] == pytest.approx(1 / (1 + math.exp(-4)), abs=1e-4)
    steps = [spec, TypeAdapter(FilterSpec).validate_python({"filter": "toxicity", "classifier": "c"})]
    assert CorpusSource(filters=steps).columns() == ["toxic_score"]
    assert CorpusSource(filters=steps[::-1]).columns() == ["language", "toxic_score"]


def test_all_languages_are_kept_with_scores_of_their_own(judge: Judge, language_model: Path) -> None:
    spec = {"filter": "language", "model": str(language_model), "languages": "all"}
    mixed = "der das und le"  # German with a probability of 0.881
    assert [judge(spec, text) is None for text in ("der das", "le la", mixed)] == [True, True, True]
    strict = {**spec, "min_scores": {"deu_Latn": 0.9}}
    assert [judge(strict, text) is None for text in ("der das", "le la", mixed)] == [True, True, False]
    assert judge(strict, mixed) == Drop("deu_Latn 0.881", "a language, at least 0.9")
    assert judge({**spec, "min_score": 0.99, "min_scores": {"fra": 0.5}}, "le la") is None
    assert judge(spec, "nothing known") == Drop(" 0.000", "a language, at least 0.65")


def test_labels_that_the_model_does_not_have_are_named(judge: Judge, language_model: Path) -> None:
    spec = {"filter": "language", "model": str(language_model)}
    assert labels_of(language_model) == {"deu_Latn", "fra"}
    for fields in ({"languages": ["deu"]}, {"languages": "all", "min_scores": {"deu": 0.5}}):
        with pytest.raises(
            SourceError, match=r"lid\.bin' has 2 labels, and none is 'deu'\. Fix: .*; there is 'deu_Latn'"
        ):
            judge({**spec, **fields})


@pytest.mark.parametrize("kept", [0, 3, 60, 130, 180])
def test_a_model_that_is_cut_off_is_named(
    judge: Judge, language_model: Path, kept: int, tmp_path: Path
) -> None:
    cut = tmp_path / f"cut-{kept}.bin"
    cut.write_bytes(language_model.read_bytes()[:kept])
    with pytest.raises(SourceError, match=rf"cut-{kept}\.bin' is not a fastText model"):
        judge({"filter": "language", "model": str(cut), "languages": "all"})


def test_a_model_is_refused_wherever_it_is_cut_off(language_model: Path, tmp_path: Path) -> None:
    whole, cut = language_model.read_bytes(), tmp_path / "cut.bin"
    for kept in range(1, len(whole)):
        cut.write_bytes(whole[:kept])
        with pytest.raises(ValueError, match=r"cut off|begin"):
            labels_of(cut)


@pytest.mark.parametrize("norms", [False, True])
def test_a_quantised_model_is_refused_if_it_is_cut_off(tmp_path: Path, norms: bool) -> None:
    """Which the library writes: codes of rows, and centroids, instead of numbers."""
    import fasttext

    text, model_file, cut = tmp_path / "text", tmp_path / "lid.ftz", tmp_path / "cut.ftz"
    text.write_text("".join(f"__label__{word % 3} word{word} other{word}\n" for word in range(400)))
    model = fasttext.train_supervised(str(text), dim=6, epoch=1, thread=1, verbose=0)
    model.quantize(input=str(text), qnorm=norms, cutoff=300, retrain=False, thread=1)
    model.save_model(str(model_file))
    assert labels_of(model_file) == {"0", "1", "2"}
    whole = model_file.read_bytes()
    for missing in (1, 20, 100, 1000, len(whole) // 2):
        cut.write_bytes(whole[:-missing])
        with pytest.raises(ValueError, match="cut off"):
            labels_of(cut)


def test_error_names_a_file_that_is_not_a_model(judge: Judge, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"no model")
    with pytest.raises(SourceError, match=r"model\.bin' is not a fastText model"):
        judge({"filter": "language", "model": str(tmp_path / "model.bin"), "languages": ["de"]})
    with pytest.raises(SourceError, match=r"there is no file .*other\.bin"):
        judge({"filter": "language", "model": str(tmp_path / "other.bin"), "languages": ["de"]})
