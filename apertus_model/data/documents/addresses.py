"""Addresses of documents and of robots.txt files.

Invariant: a host is compared in lower case and Punycode, without a final dot; a missing scheme means https;
a scheme's default port is left out.
"""

import re
from typing import NamedTuple
from urllib.parse import urlsplit

PORTS = {"http": 80, "https": 443}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


class Address(NamedTuple):
    """A URL without its fragment."""

    scheme: str
    host: str
    port: int | None  # None for the scheme's default port
    path: str  # with the query; begins with a slash

    @property
    def origin(self) -> str:
        """The scheme, host and port, to which one robots.txt applies."""
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}"


def parse(url: str) -> Address | None:
    """The address that a URL spells; None for a text without a host."""
    try:
        # Without a scheme, as in `example.org/page`, the host has to be marked as one.
        marked = url if _SCHEME.match(url) or url.startswith("//") else f"//{url}"
        parts = urlsplit(marked, scheme="https")
        name, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not name or any(map(str.isspace, name)):
        return None
    query = f"?{parts.query}" if parts.query else ""
    path = parts.path if parts.path.startswith("/") else f"/{parts.path}"
    return Address(
        parts.scheme, normal_host(name), None if port == PORTS.get(parts.scheme) else port, path + query
    )


def normal_host(name: str) -> str:
    """The form of a host name that is used in comparisons."""
    name = name.strip().strip(".").lower()
    try:
        return name if name.isascii() else name.encode("idna").decode()
    # labels that are too long or empty: such a host does not exist, but a list or a document may name it
    except UnicodeError:
        return name
