"""A list of domains that exclude crawlers."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from apertus_model.data.corpora.filters import Drop
from infra.store.inputs import SourceError

Judge = Callable[..., Drop | None]


def test_listed_domain_excludes_itself_and_its_subdomains(judge: Judge, tmp_path: Path) -> None:
    (tmp_path / "domains.txt").write_text(
        "# state of January 2025\nexample.org\nblog.example.com  # one blog\nmünchen.example\n"
    )
    spec = {"filter": "robots", "domains": str(tmp_path / "domains.txt")}
    excluded = [
        *(
            "https://example.org",
            "http://www.Example.ORG:8080/a?b#c",
            "example.org/page",
            "https://user@a.b.example.org./",
        ),
        *("https://blog.example.com/x", "https://xn--mnchen-3ya.example", "https://MÜNCHEN.example/"),
    ]
    passed = [
        "https://example.com",
        "https://notexample.org",
        "https://example.org.evil.net",
        "https://org",
        "https://blog.example.co",
    ]
    assert [url for url in excluded + passed if judge(spec, url=url) is not None] == excluded
    drop = judge(spec, url="https://www.example.org/a")
    assert drop is not None and drop.excluded is not None
    assert drop[:2] == ("www.example.org", "not below example.org, which excludes crawlers")
    assert (drop.excluded.domain, drop.excluded.agents) == ("example.org", ("(listed)",))


def test_a_table_of_agents_counts_for_the_agents_asked_for(judge: Judge, tmp_path: Path) -> None:
    rows = [
        ("a.example", "GPTBot"),
        ("b.example", "SomeSearchBot"),
        ("c.example", "ccbot/2.0"),
        ("d.example", "*"),
    ]
    with gzip.open(tmp_path / "table.csv.gz", "wt") as file:
        file.write("domain,agent\n" + "".join(f"{domain},{agent}\n" for domain, agent in rows))
    (tmp_path / "table.jsonl").write_text(
        "".join(json.dumps({"domain": d, "agent": a}) + "\n" for d, a in rows)
    )
    for name in ("table.csv.gz", "table.jsonl"):
        spec = {"filter": "robots", "domains": str(tmp_path / name)}
        dropped = [domain for domain, _ in rows if judge(spec, url=f"https://{domain}/") is not None]
        assert dropped == ["a.example", "c.example", "d.example"]
        only = [
            domain
            for domain, _ in rows
            if judge({**spec, "agents": ["SomeSearchBot"]}, url=f"https://{domain}/") is not None
        ]
        assert only == ["b.example"]


def test_the_list_of_domains_can_lie_anywhere(judge: Judge, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/domains.txt"
    with fsspec.open(url, "w") as file:
        file.write("example.org\n")
    assert judge({"filter": "robots", "domains": url}, url="https://example.org/") is not None


@pytest.mark.parametrize("name", ["domains.txt", "domains.csv", "domains.txt.xz"])
def test_the_first_and_last_domain_count_whatever_the_file_begins_with_and_has_as_padding(
    judge: Judge, tmp_path: Path, name: str
) -> None:
    head = "domain,agent\n" if name.endswith(".csv") else ""
    parts = [
        f"\ufeff{head}a.example{',*' * bool(head)}\n".encode(),
        f"b.example{',*' * bool(head)}\n".encode(),
    ]
    joined = bytes(4).join(map(lzma.compress, parts)) if name.endswith(".xz") else b"".join(parts)
    (tmp_path / name).write_bytes(joined)
    for domain in ("a.example", "b.example"):
        spec = {"filter": "robots", "domains": str(tmp_path / name)}
        assert judge(spec, url=f"https://{domain}/") is not None


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
def test_a_list_that_cannot_be_read_is_named(
    judge: Judge, tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SourceError, match=message) as error:
        judge({"filter": "robots", "domains": str(tmp_path / name)}, url="https://a")
    assert name in str(error.value)
