from __future__ import annotations

import gzip
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from datatrove.data import Document
from pydantic import TypeAdapter

from apertus_model.data.filters import Drop, make_check
from infra.store.inputs import SourceError
from specs.filters import ROBOTS_AGENTS, TOXICITY_THRESHOLDS, FilterSpec
from specs.stages.corpus import CorpusSource

Judge = Callable[..., Drop | None]


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """`judge({"filter": ..., ...}, text, column=value, ...)`."""

    def run(spec: dict[str, Any], text: str = "some text", **metadata: Any) -> Drop | None:
        parsed: FilterSpec = TypeAdapter(FilterSpec).validate_python(spec)
        return make_check(parsed, tmp_path)(Document(text, "file/0", metadata=metadata))

    return run


def test_listed_domain_excludes_itself_and_its_subdomains(judge: Judge, tmp_path: Path) -> None:
    (tmp_path / "domains.txt").write_text("# state of January 2025\nexample.org\nblog.example.com  # one blog\nmünchen.example\n")
    spec = {"filter": "robots", "domains": str(tmp_path / "domains.txt")}
    excluded = [
        *("https://example.org", "http://www.Example.ORG:8080/a?b#c", "example.org/page", "https://user@a.b.example.org./"),
        *("https://blog.example.com/x", "https://xn--mnchen-3ya.example", "https://MÜNCHEN.example/"),
    ]
    passed = ["https://example.com", "https://notexample.org", "https://example.org.evil.net", "https://org", "https://blog.example.co"]
    assert [url for url in excluded + passed if judge(spec, url=url) is not None] == excluded
    assert judge(spec, url="https://www.example.org/a") == Drop("www.example.org", "not below example.org, which excludes crawlers")


def test_a_table_of_agents_counts_for_the_agents_asked_for(judge: Judge, tmp_path: Path) -> None:
    rows = [("a.example", "GPTBot"), ("b.example", "SomeSearchBot"), ("c.example", "ccbot/2.0"), ("d.example", "*")]
    with gzip.open(tmp_path / "table.csv.gz", "wt") as file:
        file.write("domain,agent\n" + "".join(f"{domain},{agent}\n" for domain, agent in rows))
    (tmp_path / "table.jsonl").write_text("".join(json.dumps({"domain": d, "agent": a}) + "\n" for d, a in rows))
    for name in ("table.csv.gz", "table.jsonl"):
        spec = {"filter": "robots", "domains": str(tmp_path / name)}
        dropped = [domain for domain, _ in rows if judge(spec, url=f"https://{domain}/") is not None]
        assert dropped == ["a.example", "c.example", "d.example"]
        only = [domain for domain, _ in rows if judge({**spec, "agents": ["SomeSearchBot"]}, url=f"https://{domain}/") is not None]
        assert only == ["b.example"]


def test_the_default_agents_are_the_published_ones() -> None:
    published = "GPTBot, CCBot, ClaudeBot, Google-Extended, Bytespider, Applebot-Extended, Diffbot, Meta-ExternalAgent, AI2Bot, "
    published += "cohere-training-data-crawler, PanguBot, *"
    assert set(published.split(", ")) <= set(ROBOTS_AGENTS)


def test_the_list_of_domains_can_lie_anywhere(judge: Judge, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/domains.txt"
    with fsspec.open(url, "w") as file:
        file.write("example.org\n")
    assert judge({"filter": "robots", "domains": url}, url="https://example.org/") is not None


def test_a_document_without_an_address_is_an_error_unless_stated(judge: Judge, tmp_path: Path) -> None:
    (tmp_path / "domains.txt").write_text("example.org\n")
    spec = {"filter": "robots", "domains": str(tmp_path / "domains.txt")}
    for url in (None, "", "https:///path", "not a host"):
        with pytest.raises(SourceError, match=r"document file/0.*missing: keep or drop"):
            judge(spec, url=url)
        assert judge({**spec, "missing": "keep"}, url=url) is None
        assert judge({**spec, "missing": "drop"}, url=url) is not None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "# nothing\n", "lists no domain"),
        ("other.csv", "site,agent\na,b\n", "has the columns site, agent; domain and agent are needed"),
        ("other.jsonl", '{"domain": "a"}\n', "row 1: no object with the keys domain and agent"),
        ("broken.jsonl", '{"domain"\n', "cannot read the domains"),
        ("broken.txt.gz", "plain text", "cannot read the domains"),
    ],
)
def test_a_list_that_cannot_be_read_is_named(judge: Judge, tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SourceError, match=message) as error:
        judge({"filter": "robots", "domains": str(tmp_path / name)}, url="https://a")
    assert name in str(error.value)


def test_toxicity_is_compared_with_the_threshold_of_the_language(judge: Judge) -> None:
    spec = {"filter": "toxicity", "classifier": "apertus-xlmr-1"}
    cases = [
        *(("deu_Latn", 0.9976, True), ("deu_Latn", 0.9977, False), ("de", 0.998, False), ("de-CH", 0.998, False), ("fra", 0.998, True)),
        *(("cmn_Hani", 0.6, False), ("zh", 0.59, True), ("rus_Cyrl", 1.0, True), ("en", 1.0, True)),
    ]
    for language, score, passes in cases:
        assert (judge(spec, language=language, toxic_score=score) is None) is passes, (language, score)
    published = {"de": 0.9977, "fr": 0.9994, "pl": 0.9867, "pt": 0.9476, "es": 0.9953, "it": 0.9985, "zh": 0.5954, "nl": 0.9883}
    assert {code: TOXICITY_THRESHOLDS[code] for code in published} == published
    assert judge(spec, language="de", toxic_score=0.999) == Drop("0.999 by apertus-xlmr-1", "below 0.9977 for de")
    with pytest.raises(SourceError, match="nothing in column 'toxic_score', which a filter needs; it has language"):
        judge(spec, language="de")
    assert judge(spec, language="ru") is None


def test_scores_are_kept_from_the_cutoff_on(judge: Judge) -> None:
    spec = {"filter": "score", "column": "edu", "min": 2, "max": 4.5}
    assert [value for value in (1.99, 2, 3, 4.5, 4.6) if judge(spec, edu=value) is None] == [2, 3, 4.5]
    by = {"filter": "score", "column": "edu", "min": 2, "by": "language", "cutoffs": {"de": 0.5}}
    assert [judge(by, edu=1, language=language) is None for language in ("de", "fr", None)] == [True, False, False]
    assert judge(spec, edu="3.5") is None
    with pytest.raises(SourceError, match="column 'edu' holds 'high', which is not a number"):
        judge(spec, edu="high")


def test_a_sample_has_its_rate_and_lower_rates_lie_in_higher_ones(judge: Judge) -> None:
    texts = [f"document {i}" for i in range(1000)]
    kept = {rate: {text for text in texts if judge({"filter": "sample", "rate": rate}, text) is None} for rate in (0.0, 0.095, 0.3135, 1.0)}
    assert kept[0.0] == set() and kept[1.0] == set(texts)
    assert kept[0.095] < kept[0.3135]
    for rate in (0.095, 0.3135):  # four standard deviations of a binomial
        assert abs(len(kept[rate]) / 1000 - rate) < 4 * (rate * (1 - rate) / 1000) ** 0.5
    other = {text for text in texts if judge({"filter": "sample", "rate": 0.3135, "seed": 1}, text) is None}
    assert 0.2 < len(other & kept[0.3135]) / len(other) < 0.43
    by = {"filter": "sample", "rate": 1, "by": "language", "rates": {"xx": 0}}
    assert [judge(by, language=language) is None for language in ("xx", "de", None)] == [False, True, True]


def test_only_allowed_licences_pass(judge: Judge) -> None:
    spec = {"filter": "license", "allow": ["MIT", "CC-BY-4.0"]}
    assert [name for name in ("mit", "CC-BY-4.0 ", "GPL-3.0", "") if judge(spec, license=name) is None] == ["mit", "CC-BY-4.0 "]
    assert judge(spec) == Drop("nothing", "a value in column 'license'")
    assert judge(spec, license="GPL-3.0") == Drop("GPL-3.0", "an allowed licence")


@pytest.fixture
def language_model(tmp_path: Path) -> Path:
    """A fastText file (version 12) written by hand: words of two languages lie on two axes, and so do the labels, 4 units from the origin.

    So a text with a share g of German words among the known ones has the probability 1 / (1 + exp(4 - 8 g)) of being German."""
    words = dict.fromkeys(("der", "das", "und"), (1.0, 0.0)) | dict.fromkeys(("le", "la", "et"), (0.0, 1.0))
    labels = {"__label__deu_Latn": (4.0, 0.0), "__label__fra": (0.0, 4.0)}
    entries = [(word, 0) for word in words] + [(label, 1) for label in labels]
    dim, softmax, supervised = 2, 3, 3
    data = struct.pack("<2i", 793712314, 12)
    data += struct.pack("<12id", dim, 5, 1, 1, 0, 1, softmax, supervised, 0, 0, 0, 100, 1e-4)
    data += struct.pack("<3i2q", len(entries), len(words), len(labels), 1000, -1)
    data += b"".join(name.encode() + struct.pack("<bqb", 0, 10, kind) for name, kind in entries)
    for rows in (words, labels):
        data += struct.pack("<?2q", False, len(rows), dim) + b"".join(struct.pack("<2f", *row) for row in rows.values())
    (tmp_path / "lid.bin").write_bytes(data)
    return tmp_path / "lid.bin"


def test_languages_are_told_by_the_model_that_the_spec_names(judge: Judge, language_model: Path, tmp_path: Path) -> None:
    spec = {"filter": "language", "model": str(language_model), "languages": ["deu_Latn"]}
    assert judge(spec, "der\ndas Haus\n\nund") is None
    assert judge(spec, "le la") == Drop("fra 0.982", "deu_Latn, at least 0.65")
    mixed, probability = "der das und le", 1 / (1 + math.exp(4 - 8 * 0.75))
    assert judge({**spec, "min_score": probability - 1e-4}, mixed) is None
    assert judge({**spec, "min_score": probability + 1e-4}, mixed) == Drop("deu_Latn 0.881", f"deu_Latn, at least {probability + 1e-4:g}")
    assert judge({**spec, "languages": ["deu_Latn", "fra"]}, "le la") is None
    remote = f"memory://{tmp_path.name}/lid.bin"
    with fsspec.open(remote, "wb") as file:
        file.write(language_model.read_bytes())
    assert [judge({**spec, "model": remote}, text) is None for text in ("der das", "le la")] == [True, False]


def test_language_filter_adds_a_column_for_later_filters(language_model: Path, tmp_path: Path) -> None:
    spec: FilterSpec = TypeAdapter(FilterSpec).validate_python({"filter": "language", "model": str(language_model), "languages": ["fra"]})
    document = Document("le la", "file/0")
    assert make_check(spec, tmp_path)(document) is None
    assert document.metadata["language"] == "fra"
    assert document.metadata["language_score"] == pytest.approx(1 / (1 + math.exp(-4)), abs=1e-4)
    steps = [spec, TypeAdapter(FilterSpec).validate_python({"filter": "toxicity", "classifier": "c"})]
    assert CorpusSource(filters=steps).columns() == ["toxic_score"]
    assert CorpusSource(filters=steps[::-1]).columns() == ["language", "toxic_score"]


def test_error_names_a_file_that_is_not_a_model(judge: Judge, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"no model")
    with pytest.raises(SourceError, match=r"model\.bin' is not a fastText model"):
        judge({"filter": "language", "model": str(tmp_path / "model.bin"), "languages": ["de"]})
    with pytest.raises(SourceError, match=r"there is no file .*other\.bin"):
        judge({"filter": "language", "model": str(tmp_path / "other.bin"), "languages": ["de"]})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"filter": "score", "column": "x"}, "keeps everything"),
        ({"filter": "score", "column": "x", "min": 1, "by": "language"}, "go together"),
        ({"filter": "sample", "rate": 0.5, "rates": {"de": 1}}, "go together"),
        ({"filter": "robots", "domains": "s3://key:secret@bucket/x"}, "credentials"),
        ({"filter": "decontaminate", "against": [{"url": "x", "format": "chat"}]}, "read as conversations"),
        ({"filter": "decontaminate", "against": [{"url": "x", "format": "jsonl"}], "ngram": 4}, "more than an n-gram of 4"),
    ],
)
def test_impossible_filter_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TypeAdapter(FilterSpec).validate_python(spec)
