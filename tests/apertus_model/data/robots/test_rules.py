"""Rules of robots.txt against the examples of RFC 9309 and of Google's documentation, and against Python's
own parser."""

from __future__ import annotations

import random
from urllib.robotparser import RobotFileParser

import pytest

from apertus_model.data.robots.rules import READ_BYTES, Rules, product, read_part


def _open(content: str | bytes, agent: str, path: str) -> bool:
    data = content.encode() if isinstance(content, str) else content
    return not Rules(data, [agent]).excluded(path)


# RFC 9309, section 5.1; the last group is empty.
SIMPLE = """\
User-Agent: *
Disallow: *.gif$
Disallow: /example/
Allow: /publications/

User-Agent: foobot
Disallow:/
Allow:/example/page.html
Allow:/example/allowed.gif

User-Agent: barbot
User-Agent: bazbot
Disallow: /example/page.html

User-Agent: quxbot
"""


@pytest.mark.parametrize(
    ("agent", "path", "allowed"),
    [
        *(("otherbot", "/a.gif", False), ("otherbot", "/a.gif?b", True), ("otherbot", "/example/", False)),
        *(("otherbot", "/publications/", True), ("foobot", "/example/page.html", True)),
        *(("foobot", "/example/allowed.gif", True), ("foobot", "/example/page", False)),
        *(("barbot", "/example/page.html", False), ("bazbot", "/example/page.html", False)),
        *(("BarBot/2.1", "/example/other.gif", True), ("quxbot", "/example/", True)),
        *(("*", "/example/", False), ("*", "/publications/", True)),
    ],
)
def test_simple_example_of_the_rfc(agent: str, path: str, allowed: bool) -> None:
    assert _open(SIMPLE, agent, path) is allowed


def test_groups_of_one_agent_are_joined_and_the_longest_rule_decides() -> None:
    # RFC 9309, sections 2.2.1 and 5.2.
    joined = """\
user-agent: ExampleBot
disallow: /foo
disallow: /bar

user-agent: OtherBot
disallow: /

user-agent: ExampleBot
disallow: /baz
"""
    assert [_open(joined, "examplebot", path) for path in ("/foo", "/bar", "/baz", "/")] == [False] * 3 + [
        True
    ]
    longest = "User-Agent: foobot\nAllow: /example/page/\nDisallow: /example/page/disallowed.gif\n"
    assert not _open(longest, "foobot", "/example/page/disallowed.gif")
    assert _open(longest, "foobot", "/example/page/")


@pytest.mark.parametrize(
    ("rule", "matching", "others"),
    [  # Google, "How Google interprets the robots.txt specification", URL matching based on path values
        (
            "/fish",
            "/fish /fish.html /fish/salmon.html /fishheads /fishheads/yummy.html /fish.php?id=anything",
            "/Fish.asp /catfish /?id=fish /desert/fish",
        ),
        ("/fish*", "/fish /fish.html /fishheads/yummy.html", "/Fish.asp /catfish /?id=fish"),
        (
            "/fish/",
            "/fish/ /fish/?id=anything /fish/salmon.htm",
            "/fish /fish.html /animals/fish/ /Fish/Salmon.asp",
        ),
        (
            "/*.php",
            "/index.php /folder/filename.php?parameters /folder/any.php.file.html /filename.php/",
            "/ /windows.PHP",
        ),
        (
            "/*.php$",
            "/filename.php /folder/filename.php",
            "/filename.php?parameters /filename.php/ /filename.php5 /windows.PHP",
        ),
        ("/fish*.php", "/fish.php /fishheads/catfish.php?parameters", "/Fish.PHP"),
        # RFC 9309, section 2.2.2
        ("/foo/bar?baz=quz", "/foo/bar?baz=quz", "/foo/bar"),
        # (protego does not join `%2F` and `/`, as the table of that section does: RFC 3986 tells them apart)
        (
            "/foo/bar?baz=https%3A%2F%2Ffoo.bar",
            "/foo/bar?baz=https%3A%2F%2Ffoo.bar /foo/bar?baz=https:%2f%2Ffoo.bar",
            "/foo/bar?baz=http",
        ),
        ("/foo/bar/ツ", "/foo/bar/%E3%83%84 /foo/bar/ツ /foo/bar/%e3%83%84", "/foo/bar/%E3%83"),
        ("/foo/bar/%62%61%7A", "/foo/bar/baz", "/foo/bar/"),
        # RFC 9309, section 2.2.3
        ("/path/file-with-a-%2A.html", "/path/file-with-a-*.html", "/path/file-with-a-b.html"),
    ],
)
def test_documented_patterns(rule: str, matching: str, others: str) -> None:
    content = f"User-agent: *\nDisallow: {rule}\n"
    paths = [*matching.split(), *others.split()]
    assert [path for path in paths if not _open(content, "a", path)] == matching.split()


@pytest.mark.parametrize(
    ("path", "allow", "disallow", "allowed"),
    [  # Google, order of precedence for rules
        ("/page", "/p", "/", True),
        ("/folder/page", "/folder", "/folder", True),
        ("/page.htm", "/page", "/*.htm", False),
        ("/page.php5", "/page", "/*.ph", True),
        ("/", "/$", "/", True),
        ("/page.htm", "/$", "/", False),
    ],
)
def test_documented_precedence(path: str, allow: str, disallow: str, allowed: bool) -> None:
    rules = [f"Allow: {allow}", f"Disallow: {disallow}"]
    for order in (rules, rules[::-1]):
        assert _open("\n".join(["User-agent: *", *order]), "a", path) is allowed


def test_pythons_parser_agrees_where_it_follows_the_rfc() -> None:
    """Prefixes without wildcards; it takes the first rule that matches, so the longest ones are put first."""
    draw = random.Random(1)
    parts = ["/a", "/a/b", "/a/b/c", "/b", "/b/a", "/c", "/"]
    agents = ["alpha", "beta", "gamma"]
    for _ in range(200):
        lines = []
        for agent in draw.sample([*agents[:2], "*"], draw.randint(1, 3)):
            rules = sorted(draw.sample(parts, 3), key=len, reverse=True)
            lines += ["", f"User-agent: {agent}"]
            lines += [f"{draw.choice(['Allow', 'Disallow'])}: {rule}" for rule in rules]
        reference = RobotFileParser()
        reference.parse(lines)
        rules = Rules("\n".join(lines).encode(), agents)
        for path in ("/", "/a", "/a/b/c/d", "/b/x", "/b/a/x", "/c", "/x"):
            closed = [agent for agent in agents if not reference.can_fetch(agent, f"http://host{path}")]
            assert rules.excluded(path) == closed, (lines, path)


def test_a_group_binds_only_the_agent_that_it_names() -> None:
    agents = ["Applebot-Extended", "CCBot", "GPTBot", "*"]

    def closed(group: str) -> list[str]:
        return Rules(f"{group}\nDisallow: /\n".encode(), agents).excluded("/x")

    assert closed("User-agent: Applebot") == []  # the beginning of a name is another agent
    assert closed("User-agent: bot") == []
    assert closed("User-agent: CCBot/2.0 (https://commoncrawl.org/faq)") == ["CCBot"]
    assert closed("User-agent: ccbot # no AI\nuser-agent : GPTBOT") == ["CCBot", "GPTBot"]
    assert closed("User-agent: *") == agents
    assert closed("User-agent: agent-0001\nUser-agent: nobody\nUser-agent: other") == []
    # `*` is a crawler that no group names: it is closed out where all named agents are let in.
    text = b"User-agent: GPTBot\nAllow: /\nUser-agent: CCBot\nDisallow:\n\nUser-agent: *\nDisallow: /\n"
    assert Rules(text, agents).excluded("/x") == ["Applebot-Extended", "*"]
    assert Rules(text, ["GPTBot", "CCBot"]).excluded("/x") == []
    assert product(" CCBot/2.0 ") == "ccbot"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_and_a_byte_order_mark_change_nothing(end: str) -> None:
    content = end.join(["\ufeffUser-agent: GPTBot", "Disallow: /private", "", ""])
    assert not _open(content.encode(), "GPTBot", "/private/x") and _open(content.encode(), "GPTBot", "/x")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<!DOCTYPE html><html><head><title>Not found</title></head><body>Disallow: /</body></html>",
        b"Disallow: /\nAllow: /x\n",  # no user-agent line
        random.Random(2).randbytes(50_000),
        b"\xff\xfe" + "User-agent: *\nDisallow: /".encode("utf-16-le"),
        b"\0" * 1000,
    ],
)
def test_content_without_rules_closes_nothing(content: bytes) -> None:
    assert Rules(content, ["GPTBot", "*"]).excluded("/x") == []


def test_bytes_that_are_not_utf8_spoil_their_own_rule_only() -> None:
    content = b"User-agent: *\nDisallow: /caf\xe9\nDisallow: /private\n"
    assert not _open(content, "a", "/private") and _open(content, "a", "/cafe")


def test_the_first_500_kib_count() -> None:
    head = b"User-agent: *\nDisallow: /early\n"
    filler = b"# " + b"x" * 997 + b"\n"
    assert len(filler) == 1000
    content = head + filler * 10_486 + b"Disallow: /late\n"
    assert len(content) > 10 * 2**20
    read = read_part(content)
    assert READ_BYTES - 1000 < len(read) <= READ_BYTES == 512_000 and read.endswith(b"\n")
    assert Rules(read, ["a"]).excluded("/early") and not Rules(read, ["a"]).excluded("/late")
    within = head + filler * 500 + b"Disallow: /late\n"
    assert len(within) < READ_BYTES and Rules(read_part(within), ["a"]).excluded("/late")
    # A rule that is cut in two would close more than it says.
    cut = b"User-agent: *\rDisallow: /" + b"y" * READ_BYTES
    assert read_part(cut) == b"User-agent: *\r"


def test_wildcards_cannot_make_matching_hang() -> None:
    """A backtracking matcher needs longer than the age of the universe for these."""
    many = "/" + "*a" * 2000 + "b"
    assert _open(f"User-agent: *\nDisallow: {many}\n", "a", "/" + "a" * 10_000)
    assert not _open(f"User-agent: *\nDisallow: {many}\n", "a", "/" + "a" * 10_000 + "b")
    rules = "".join(f"Disallow: /{'*a' * 20}{number}$\n" for number in range(2000))
    assert _open(f"User-agent: *\n{rules}", "a", "/" + "a" * 2000)
