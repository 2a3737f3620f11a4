"""The newest versions of what this project needs, beside the pins (`make test-latest`).

    python -m tools.latest requirements   # for pip, those of the tests too, without upper bounds
    python -m tools.latest differences    # the installed versions that are not those of constraints.txt

`[tool.latest.pinned]` of pyproject.toml has the requirements whose bounds stay, each with its reason.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]


def canonical(name: str) -> str:
    """The name as PEP 503 writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(extra: str, project: dict, pinned: dict[str, str]) -> Iterator[str]:
    """The requirements of an extra, and of the extras of this project that it names; '' for what the project
    itself needs. `==` becomes `>=`, and upper bounds go, unless the name is in `pinned`."""
    own = re.compile(rf"{project['name']}\[(.+)\]")
    for line in project["optional-dependencies"][extra] if extra else project["dependencies"]:
        if others := own.fullmatch(line):
            for other in others[1].split(","):
                yield from requirements(other, project, pinned)
        elif re.split(r"[^\w.-]", line)[0] in pinned:
            yield line
        else:
            line, mark, marker = line.partition(";")
            name, bounds = re.split(r"(?=[<>=]|$)", line, maxsplit=1)
            kept = [bound.replace("==", ">=") for bound in bounds.split(",") if not bound.startswith("<")]
            yield name + ",".join(kept) + mark + marker


def differences(pins: str, installed: dict[str, str]) -> Iterator[str]:
    """A line for each installed version that is not the pinned one. `installed`: by canonical name."""
    for name, _, pin in (line.partition("==") for line in pins.splitlines() if not line.startswith("#")):
        version = installed.get(canonical(name), pin)
        if version != pin:
            yield f"{name} {pin} -> {version}"


def main(arguments: list[str]) -> None:
    if arguments == ["requirements"]:
        content = tomllib.loads((ROOT / "pyproject.toml").read_text())
        for extra in ("", "dev"):
            print(*requirements(extra, content["project"], content["tool"]["latest"]["pinned"]), sep="\n")
    elif arguments == ["differences"]:
        installed = {canonical(item.name): item.version for item in distributions()}
        print(*differences((ROOT / "constraints.txt").read_text(), installed), sep="\n")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
