from __future__ import annotations

import io

import pytest
from rich.console import Console

from apertus_model.data.corpora.examples import to_jsonl
from flows.inspection.corpus import account, account_of, show
from flows.languages import languages_of
from infra.store import Artifact, Attempt, Store
from specs.errors import SpecError
from specs.job import Job

METRICS = {
    "documents": 90,
    "probes": 0,
    "filters": ["length", "near-duplicates"],
    "read": {"documents": 120, "bytes": 9000, "characters": 8000},
    "rejected": {"not_utf8": 2},
    "dropped": {"near-duplicates": 20, "length": 10},
    "dropped_characters": {"near-duplicates": 1500, "length": 50},
    "replaced": {"email": 3, "ip": 0, "iban": 1},
    "train": {"documents": 85, "tokens": 2000},
    "validation": {"documents": 5, "tokens": 100},
}
ROWS = [
    {"reason": "length", "hash": "0a", "text": "tiny", "value": "4 characters", "rule": "at least 10"},
    {
        "reason": "length",
        "hash": "0b",
        "text": "[red]short\x1b[2J",
        "value": "10 characters",
        "rule": "at least 11",
    },
    {
        "reason": "near-duplicates",
        "hash": "0c",
        "text": "almost",
        "value": "one of 3 alike",
        "rule": "smallest",
        "like": "the same",
    },
    {"reason": "replaced", "hash": "0d", "text": "to <email-pii>", "before": "to a@b.org"},
]


@pytest.fixture
def corpus(store: Store) -> Artifact:
    scratch = str(store.root) + "/scratch"
    nothing: dict[str, dict[str, object]] = {"spec": {}, "identity": {}, "inputs": {}, "launch": {}}
    place = {
        "store": store.url,
        "path": "corpus/f",
        "attempt": "a",
        "scratch": scratch,
        "progress": f"{scratch}/progress",
    }
    job = Job.model_validate(
        {"node": "corpus/web", "kind": "corpus", "version": 1, "fingerprint": "f", **nothing, **place}
    )
    attempt = Attempt(job, store)
    attempt.begin()
    attempt.write_bytes("examples.jsonl", to_jsonl(ROWS))
    attempt.commit(metrics=METRICS)
    return Artifact(store, job.path)


def _printed(corpus: Artifact, limit: int = 3, reason: str | None = None) -> str:
    out = io.StringIO()
    show(Console(file=out, width=120), account_of(corpus, limit=limit, reason=reason))
    return out.getvalue()


def test_the_account_leads_from_what_was_read_to_what_was_kept() -> None:
    assert account(METRICS) == [
        ("rejected: not_utf8", 2, None),
        ("read", 120, 8000),
        ("dropped: length", 10, 50),
        ("dropped: near-duplicates", 20, 1500),
        ("kept", 90, 6450),
    ]


def test_examples_stand_under_the_reason_with_what_was_measured(corpus: Artifact) -> None:
    lines = [" ".join(line.split()) for line in _printed(corpus).splitlines() if line.strip()]
    assert lines[0] == "corpus/web"
    assert "dropped: near-duplicates 20 1,500" in lines
    assert "kept: 85 to train on, 5 held out, 0 probes; replaced: 3 email, 1 iban, 0 ip" in lines
    examples = lines[lines.index("length 0a 4 characters (rule: at least 10)") :]
    assert examples == [
        *(
            "length 0a 4 characters (rule: at least 10)",
            "tiny",
            "length 0b 10 characters (rule: at least 11)",
            "[red]short [2J",
        ),
        *("near-duplicates 0c one of 3 alike (rule: smallest)", "almost", "kept instead:", "the same"),
        *("replaced 0d", "as read:", "to a@b.org", "to <email-pii>"),
    ]


def test_planted_copies_are_named(corpus: Artifact) -> None:
    found = account_of(corpus, limit=0)
    found["kept"]["planted"] = {"codes": {"copies": 1200}}
    out = io.StringIO()
    show(Console(file=out, width=120), found)
    assert "0 probes, 1,200 copies planted as codes; replaced" in out.getvalue()


def test_one_reason_and_a_limit_can_be_asked_for(corpus: Artifact) -> None:
    printed = _printed(corpus, limit=1, reason="length")
    assert "tiny" in printed and "short" not in printed and "almost" not in printed
    with pytest.raises(SpecError, match=r"there is no reason 'lenght' .*did you mean 'length'\?"):
        _printed(corpus, reason="lenght")


def test_a_long_example_is_cut_to_its_first_lines(corpus: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {
            "reason": "length",
            "hash": "0a",
            "text": "\n".join(f"line {i}." for i in range(40)),
            "value": "long",
            "rule": "short",
        }
    ]
    monkeypatch.setattr(Artifact, "bytes", lambda self, name: to_jsonl(rows))
    printed = _printed(corpus)
    assert "line 14." in printed and "line 15." not in printed and "[...]" in printed


def test_languages_are_a_table_of_documents_by_filter(corpus: Artifact) -> None:
    counts = {"deu": {"kept": {"documents": 70, "tokens": 1900}, "length": {"documents": 10}}}
    counts["[b]fra"] = {"near-duplicates": {"documents": 20}}
    found = account_of(corpus, limit=0) | {
        "languages": [one.to_json() for one in languages_of(METRICS | {"languages": counts})]
    }
    out = io.StringIO()
    show(Console(file=out, width=120), found)
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert ["read", "length", "near-duplicates", "kept", "tokens"] in rows
    assert ["deu", "80", "10", "0", "70", "1,900"] in rows and ["[b]fra", "20", "0", "20", "0", "0"] in rows
    assert account_of(corpus, limit=0)["languages"] == []
