"""What snapshots say of addresses: scope, several answers, policies, and bounded memory."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from apertus_model.data.documents.addresses import Address, parse
from apertus_model.data.robots import snapshots as robots_snapshots
from apertus_model.data.robots.snapshots import AnswerIndex, SnapshotRobots
from infra.store.inputs import SourceError
from specs.robots import RobotsFilter

CLOSED = "User-agent: *\nDisallow: /\n"
OPEN = "User-agent: *\nDisallow:\n"
Row = tuple[str, int | None, str | None, str | None]  # url, status, text, date


def _robots(folder: Path, rows: list[Row], scratch: str = "scratch", **fields: Any) -> SnapshotRobots:
    names = ("url", "status", "text", "date")
    lines = [json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows]
    (folder / "snapshot.jsonl").write_text("".join(lines))
    source = {
        "url": str(folder / "snapshot.jsonl"),
        "format": "jsonl",
        "status_column": "status",
        "date_column": "date",
    }
    spec = RobotsFilter.model_validate({"filter": "robots", "snapshots": [source], **fields})
    return SnapshotRobots(AnswerIndex.build(spec.snapshots, folder / f"{scratch}.sqlite"), spec)


def _address(url: str) -> Address:
    address = parse(url)
    assert address is not None
    return address


def _dropped(robots: SnapshotRobots, *urls: str) -> list[str]:
    return [url for url in urls if robots.excluded(_address(url)) is not None]


URLS = (
    "https://a.example/x",
    "http://a.example/x",
    "https://www.a.example/x",
    "https://a.example:8443/x",
    "https://b.a.example/x",
    "a.example/x",
)


def test_an_origin_obeys_its_own_answer(tmp_path: Path) -> None:
    robots = _robots(tmp_path, [("https://a.example/robots.txt", 200, CLOSED, None)], scope="origin")
    assert _dropped(robots, *URLS) == ["https://a.example/x", "a.example/x"]


def test_a_site_obeys_an_answer_of_its_other_scheme_or_name(tmp_path: Path) -> None:
    rows: list[Row] = [("https://a.example/robots.txt", 200, CLOSED, None)]
    assert _dropped(_robots(tmp_path, rows, "one"), *URLS) == [*URLS[:3], "a.example/x"]
    www: list[Row] = [("http://www.a.example:80/robots.txt", 200, CLOSED, None)]
    assert _dropped(_robots(tmp_path, www, "two"), *URLS) == [*URLS[:3], "a.example/x"]
    own: list[Row] = [*rows, ("http://a.example/robots.txt", 200, OPEN, None)]
    assert _dropped(_robots(tmp_path, own, "three"), *URLS[:3]) == [URLS[0], URLS[2]]
    port: list[Row] = [("https://a.example:8443/robots.txt", 200, CLOSED, None)]
    assert _dropped(_robots(tmp_path, port, "four"), *URLS) == ["https://a.example:8443/x"]


def test_hosts_are_compared_in_punycode(tmp_path: Path) -> None:
    robots = _robots(tmp_path, [("https://xn--mnchen-3ya.example/robots.txt", 200, CLOSED, None)])
    assert _dropped(robots, "https://MÜNCHEN.example./x", "https://munchen.example/x") == [
        "https://MÜNCHEN.example./x"
    ]


def test_the_latest_answer_counts_or_any(tmp_path: Path) -> None:
    early, late = "2024-01-01", "2025-01-01T00:00:00+01:00"
    host = "https://a.example/robots.txt"
    cases: list[tuple[list[Row], bool, bool]] = [  # answers; dropped by the latest, by any
        ([(host, 200, CLOSED, early), (host, 200, OPEN, late)], False, True),
        ([(host, 200, OPEN, early), (host, 200, CLOSED, late)], True, True),
        ([(host, 200, CLOSED, early), (host, 404, None, late)], False, True),
        ([(host, 200, CLOSED, early), (host, 503, None, late)], True, True),
        ([(host, 200, CLOSED, None), (host, 200, OPEN, early)], False, True),
        ([(host, 200, CLOSED, early), (host, 200, OPEN, early)], True, True),
        ([(host, 200, CLOSED, None), (host, 200, OPEN, None)], True, True),
    ]
    for number, (rows, latest, every) in enumerate(cases):
        for order in (rows, rows[::-1]):
            for several, expected in (("latest", latest), ("any", every)):
                name = f"{number}-{several}-{order is rows}"
                robots = _robots(tmp_path, order, name, several=several)
                assert bool(_dropped(robots, "https://a.example/x")) is expected, (rows, several)


def test_policies_decide_without_an_answer(tmp_path: Path) -> None:
    rows: list[Row] = [
        ("https://error.example/robots.txt", 503, None, None),
        ("https://null.example/robots.txt", None, None, None),
        ("https://open.example/robots.txt", 404, None, None),
        ("https://mixed.example/robots.txt", 500, None, None),
        ("http://mixed.example/robots.txt", 200, OPEN, None),
    ]
    names = ("error", "null", "open", "mixed", "unknown")
    urls = [f"https://{name}.example/" for name in names]
    reasons = {}
    for errors in ("keep", "drop"):
        for unreached in ("keep", "drop"):
            robots = _robots(tmp_path, rows, errors=errors, unreached=unreached)
            found = [robots.excluded(_address(url)) for url in urls]
            reasons[errors, unreached] = [exclusion and exclusion.agents for exclusion in found]
    error, unknown = ("(error)",), ("(unreached)",)
    assert reasons == {
        ("keep", "keep"): [None] * 5,
        ("keep", "drop"): [None, None, None, None, unknown],
        ("drop", "keep"): [error, error, None, None, None],
        ("drop", "drop"): [error, error, None, None, unknown],
    }


def test_an_exclusion_names_host_agents_and_origin(tmp_path: Path) -> None:
    text = "User-agent: CCBot\nUser-agent: GPTBot\nDisallow: /private\n"
    robots = _robots(tmp_path, [("http://a.example/robots.txt", 200, text, None)])
    found = robots.excluded(_address("https://www.a.example/private/1?q"))
    assert found is not None and found[:2] == ("www.a.example", ("CCBot", "GPTBot"))
    assert found.rule == "open to all agents in http://a.example/robots.txt"
    assert _dropped(robots, "https://www.a.example/public") == []


def test_rules_in_memory_are_bounded_and_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(robots_snapshots, "PARSED_BYTES", 10 * robots_snapshots.OVERHEAD)
    draw = random.Random(1)
    closed = {f"{index}.example": index % 3 == 0 for index in range(300)}
    rows: list[Row] = [
        (host, 200, f"# {host}\n{CLOSED if shut else OPEN}", None) for host, shut in closed.items()
    ]
    robots = _robots(tmp_path, rows)
    for host in draw.choices(list(closed), k=1000):
        assert bool(_dropped(robots, f"https://{host}/x")) is closed[host]
        assert len(robots._parsed) <= 10 and 0 <= robots._size <= robots_snapshots.PARSED_BYTES


def test_equal_contents_are_stored_once_and_the_files_are_read_once(tmp_path: Path) -> None:
    many: list[Row] = [(f"{index}.example", 200, CLOSED, None) for index in range(2500)]
    robots = _robots(tmp_path, many)
    index = robots._index
    assert index._database.execute("SELECT count(*) FROM contents").fetchone() == (1,)
    assert index._database.execute("SELECT count(*) FROM answers").fetchone() == (2500,)
    (tmp_path / "snapshot.jsonl").unlink()
    source = robots._spec.snapshots
    again = SnapshotRobots(AnswerIndex.build(source, tmp_path / "scratch.sqlite"), robots._spec)
    assert _dropped(again, "https://2499.example/") == ["https://2499.example/"]


def test_snapshots_without_an_answer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SourceError, match=r"no answer .*snapshot\.jsonl\. Fix: correct the files of `snapshots`"
    ):
        _robots(tmp_path, [])
    assert not (tmp_path / "scratch.sqlite").exists()
    robots = _robots(tmp_path, [("a.example", 200, CLOSED, None)])  # what was left behind harms nothing
    assert _dropped(robots, "https://a.example/") == ["https://a.example/"]
