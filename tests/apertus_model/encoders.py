"""Tiny random XLM-R models as folders, and labelled texts of installed packages."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch

from apertus_model.classifiers.reading import read_source
from apertus_model.data.tokens.vocabulary import config_files, train
from infra.store.inputs import list_source
from specs.sources import SourceSpec

LANGUAGES = {"de": "de_DE", "fr": "fr_FR", "ru": "ru_RU"}
LINES = 6  # of a text


@cache
def language_texts() -> tuple[tuple[str, str], ...]:
    """(language, text): short German, French and Russian texts, as many of each."""
    found: dict[str, list[str]] = {}
    for language, code in LANGUAGES.items():
        source = SourceSpec(
            url=f"installed:jupyterlab_language_pack_{code}",
            format="documents",
            reader="examples.documents:gettext_json",
            version=1,
            include=["**/*.json"],
        )
        read = read_source(source, [file.path for file in list_source(source).files], 10_000)
        lines = [line for document in read for line in document.text.splitlines() if line.strip()]
        texts = ["\n".join(lines[i : i + LINES]) for i in range(0, len(lines), LINES)]
        found[language] = list(dict.fromkeys(texts))
    fewest = min(map(len, found.values()))
    return tuple((language, text) for language, texts in found.items() for text in texts[:fewest])


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    """Lines of JSON in a folder of their own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_encoder(folder: Path, *, labels: int = 0, positions: int = 141, **config: object) -> Path:
    """A random XLM-R that reads `positions` - 11 tokens; with `labels`, a sequence classifier."""
    import transformers

    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2} | config
    sizes = transformers.XLMRobertaConfig(
        vocab_size=512,
        num_attention_heads=4,
        max_position_embeddings=positions,
        pad_token_id=10,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
        **({"num_labels": labels} if labels else {}),
        **shape,
    )
    kind = "XLMRobertaForSequenceClassification" if labels else "XLMRobertaModel"
    getattr(transformers, kind)(sizes).save_pretrained(folder)
    train([text for _, text in language_texts()[::20]], 512, 128).save(str(folder / "tokenizer.json"))
    for name, document in config_files().items():
        document = {key: value for key, value in document.items() if key != "model_max_length"}
        (folder / name).write_text(json.dumps(document))
    return folder
