"""Fills in `variables:`, and the texts of files, where they are used.

Invariant: a variable's value has both origins, where it was stated and where it is used; a text without `${`
is left alone, and so is all of a file's text but a comment at its beginning.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from specs.compose.values import Value, too_large, written
from specs.document import MAX_VALUES, Origin
from specs.errors import FieldPath, Problem, did_you_mean
from specs.foreign import read_local
from specs.units import HUGGING_FACE

MAX_DEPTH = 50
USE = re.compile(r"\$\$\{|\$\{(?P<name>[^{}$]*)\}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
TEXT = "text:"
COMMENT = re.compile(r"\A\s*\{#.*?#\}", re.DOTALL)


class Variables:
    """The variables of a file. `fill` puts them into a value; a text that cannot be filled in stays as it is,
    with its path in `unknown`."""

    def __init__(self, variables: Value | None) -> None:
        self.problems: list[Problem] = []
        self.unknown: set[FieldPath] = set()
        self.own: dict[str, dict[str, Value]] = {}  # those of a matrix, ${matrix} among them, by stage
        self._stated: dict[str, Value] = {}
        self._values: dict[str, Value | None] = {}
        self._open: list[str] = []
        self._size = 0
        if variables is None or variables.content is None:
            return
        if not isinstance(variables.content, dict):
            message = "variables are a mapping of names to values"
            self.problem(("variables",), message, "write for example {lr: 1e-4}.", variables)
            return
        for name, value in variables.content.items():
            if name == "matrix":
                message = "${matrix} is the name of the variant in a stage with a matrix"
                self.problem(("variables", name), message, "rename it.", value)
            elif not VARIABLE.fullmatch(name):
                message = f"'{name}' is not a name"
                fix = "use letters, digits, _ and -, a letter first."
                self.problem(("variables", name), message, fix, value)
            if name != "matrix":
                self._stated[name] = value
        for name in self._stated:
            self._resolved(name)

    def problem(self, path: FieldPath, message: str, fix: str, at: Value | Origin) -> None:
        """Records a problem with the value at `path`, and marks the value as unknown."""
        origin = at.origin if isinstance(at, Value) else at
        self.problems.append(Problem(path, message, fix, origin.where))
        self.unknown.add(path)

    def unused(self, written: Iterable[str], overridden: Iterable[str], file: str) -> list[Problem]:
        """The problems of unused variables: those that the file itself states and does not use, and those
        that an override states and nothing uses after all overrides. Inherited variables may be unused."""
        used, left = (
            {match["name"] for text in texts for match in USE.finditer(text)}
            for texts in (written, overridden)
        )
        return [
            Problem(
                ("variables", name),
                "nothing uses this variable",
                f"remove it, or write ${{{name}}} where it is meant.",
                where,
            )
            for name, value in self._stated.items()
            if name not in left
            and (
                (where := value.origin.where).startswith("--set ")
                or (where.rpartition(":")[0] == file and name not in used)
            )
        ]

    def fill(self, value: Value, path: FieldPath) -> Value:
        """A value with its variables filled in."""
        content = value.content
        self._count(value.origin, len(content) // 100 if isinstance(content, str) else 0)
        if isinstance(content, list):
            return replace(
                value, content=[self.fill(item, (*path, index)) for index, item in enumerate(content)]
            )
        if isinstance(content, dict):
            filled: dict[str, Value] = {}
            for unfilled, item in content.items():
                key = self.text(unfilled, (*path, unfilled), item.origin)
                if key in filled:
                    message = f"two keys are '{key}' when their variables are filled in"
                    self.problem((*path, key), message, "keep one.", item)
                    continue
                filled[key] = self.fill(item, (*path, key))
                if isinstance(item.content, dict):  # such a key may be a path, as that of a model
                    origin = filled[key].origin
                    folder = self._folder(unfilled, origin)
                    filled[key] = replace(filled[key], origin=replace(origin, folder=folder))
            return replace(value, content=filled)
        if not isinstance(content, str) or "${" not in content:
            return value
        alone = USE.fullmatch(content)
        if alone and alone["name"] is not None:
            filled_in = self._lookup(alone["name"], path, value.origin)
            return value if filled_in is None else self._moved(filled_in, value.origin, alone["name"])
        text = self.text(content, path, value.origin)
        names = [match["name"] for match in USE.finditer(content) if match["name"] in self._stated]
        where = value.origin.where + "".join(
            f" ({name} from {self._stated[name].origin.where})" for name in dict.fromkeys(names)
        )
        return Value(text, Origin(where, text, self._folder(content, value.origin)))

    def _folder(self, text: str, place: Origin) -> str:
        """The folder in which a path with variables begins: that of the variable if it begins with one."""
        first = USE.match(text.removeprefix(HUGGING_FACE))
        variable = self._values.get(first["name"] or "") if first else None
        return (place if variable is None else variable.origin).folder

    def text(self, text: str, path: FieldPath, origin: Origin) -> str:
        """A text with the variables inside it filled in, as they are written."""
        if "${" not in text:
            return text
        if "${" in USE.sub("", text):
            message = f"'{text}' has a ${{ that is not closed"
            self.problem(path, message, "write ${name} for a variable, $${ for the text itself.", origin)
            return text
        filled, end = "", 0
        for match in USE.finditer(text):
            filled += text[end : match.start()]
            end = match.end()
            if match["name"] is None:
                filled += "${"
                continue
            variable = self._lookup(match["name"], path, origin)
            if variable is None:
                return text
            if isinstance(variable.content, (list, dict)):
                what = "list" if isinstance(variable.content, list) else "mapping"
                message = f"the variable '{match['name']}' is a {what}"
                self.problem(path, message, "write it alone, without text around it.", origin)
                return text
            filled += written(variable)
        filled += text[end:]
        self._count(origin, len(filled) // 100)
        return filled

    def _lookup(self, name: str, path: FieldPath, origin: Origin) -> Value | None:
        if name.startswith(TEXT):
            return self._text_of(name.removeprefix(TEXT), path, origin)
        own = self.own.get(str(path[1]), {}) if path[:1] == ("stages",) and len(path) > 1 else {}
        if name in own:
            return own[name]
        if name == "matrix":
            message = "${matrix} is known only inside a stage with a matrix"
            self.problem(path, message, "name the variant.", origin)
        elif name not in self._stated and ("variables",) not in self.unknown:
            known = [*self._stated, *own]
            self.problem(path, f"there is no variable '{name}'", did_you_mean(name, known), origin)
        elif name in self._stated and (value := self._resolved(name)) is not None:
            return value
        self.unknown.add(path)
        return None

    def _text_of(self, file: str, path: FieldPath, origin: Origin) -> Value | None:
        """The text of a file without a comment `{# ... #}` at its beginning. The file is relative to the one
        that names it; in `--set`, to the current folder."""
        named = "" if origin.where.startswith("--set ") else origin.where.rpartition(":")[0]
        place = Path(named).parent / file
        try:
            text = read_local(place).decode()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            fix = "name a text file in UTF-8, relative to the file that names it; in --set, to this folder."
            self.problem(path, f"cannot read '{place}': {reason}", fix, origin)
            return None
        return Value(COMMENT.sub("", text).strip(), origin)

    def _resolved(self, name: str) -> Value | None:
        """The value of a variable; None if it is wrong."""
        if name in self._values:
            return self._values[name]
        path, unfilled = ("variables", name), self._stated[name]
        if name in self._open or len(self._open) == MAX_DEPTH:
            chain = " -> ".join([*self._open[self._open.index(name) if name in self._open else 0 :], name])
            message = f"more than {MAX_DEPTH} variables use each other"
            if name in self._open:
                message = f"the variables form a cycle: {chain}"
            self.problem(path, message, "set one of them without the others.", unfilled)
            return None
        self._open.append(name)
        value: Value | None = self.fill(unfilled, path)
        self._open.pop()
        if any(wrong[:2] == path for wrong in self.unknown):
            value = None
        self._values[name] = value
        return value

    def _moved(self, value: Value, place: Origin, name: str) -> Value:
        """A variable's value at the place of its use, with an origin that names both places."""
        self._count(place)
        content = value.content
        if isinstance(content, list):
            content = [self._moved(item, place, name) for item in content]
        elif isinstance(content, dict):
            content = {key: self._moved(item, place, name) for key, item in content.items()}
        of_variable = name != "matrix" and not name.startswith(TEXT)
        where = f"{place.where} ({name} from {value.origin.where})" if of_variable else place.where
        return Value(content, replace(value.origin, where=where))

    def _count(self, origin: Origin, extra: int = 0) -> None:
        self._size += 1 + extra
        if self._size > MAX_VALUES:
            raise too_large(origin)
