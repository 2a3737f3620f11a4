"""The rules of one robots.txt for stated agents.

protego reads rules, precedence, wildcards and percent-encoding (`%2F` is not `/`). It finds the group of an
agent by a prefix of its name (a group for `Applebot` would bind `Applebot-Extended`), and finds none by a
name with a version (`CCBot/2.0`). So the lines that name agents are first rewritten to names that are either
equal or not prefixes of one another: a group binds the agent whose product token it names (RFC 9309, section
2.2.1).

Invariant: protego matches without backtracking, so the time for an address is at most proportional to the
length of the rules times that of the address, whatever the wildcards.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from protego import Protego

READ_BYTES = 500 * 1024
"""The bytes of a content that count, the least that RFC 9309 (section 2.5) asks for; the rest is ignored."""
LISTED, UNREACHED, ERRORS = "(listed)", "(unreached)", "(error)"
"""Reasons for an exclusion other than agents."""
EVERYBODY = "*"
_NOBODY = "nobody"
_OTHER = "other"
_AGENT_LINE = re.compile(
    r"\s*(?:user-agent|useragent|user agent)(?:\s*:\s*|\s+|$)(?:(?P<all>\*)(?=[\s#]|$)|(?P<token>[\w-]*))",
    re.IGNORECASE | re.ASCII,
)


class Exclusion(NamedTuple):
    domain: str  # its host, or the listed domain that it belongs to
    agents: tuple[str, ...]  # the agents that may not fetch it, or one of the reasons above
    rule: str  # in words


class Rules:
    """The rules of one content for the agents asked for."""

    def __init__(self, content: bytes, agents: Sequence[str]) -> None:
        names = {product(agent): f"agent-{index:04d}" for index, agent in enumerate(agents)}
        self._names = {agent: names[product(agent)] for agent in agents}
        self._names |= {agent: _NOBODY for agent in agents if product(agent) == EVERYBODY}
        text = content.decode("utf-8-sig", errors="replace")
        self._parsed = Protego.parse("\n".join(_renamed(line, names) for line in text.splitlines()))

    def excluded(self, path: str) -> list[str]:
        """The agents that may not fetch a path (with its query)."""
        # protego looks at the path alone; the host keeps a path like `//a` from being read as a host.
        url = f"http://host{path}"
        return [agent for agent, name in self._names.items() if not self._parsed.can_fetch(url, name)]


def product(agent: str) -> str:
    """`CCBot/2.0` -> `ccbot`: the product token, which is compared without case (RFC 9309, section 2.2.1)."""
    return agent.strip().split("/")[0].lower()


def read_part(content: bytes) -> bytes:
    """The whole lines within the first READ_BYTES."""
    if len(content) <= READ_BYTES:
        return content
    head = content[:READ_BYTES]
    return head[: max(head.rfind(b"\n"), head.rfind(b"\r")) + 1]


def _renamed(line: str, names: dict[str, str]) -> str:
    """A line, with an agent that it names replaced by its name in `names`."""
    match = _AGENT_LINE.match(line)
    if match is None:
        return line
    return f"User-agent: {EVERYBODY if match['all'] else names.get(match['token'].lower(), _OTHER)}"
