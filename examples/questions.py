"""Questions about the public functions of Python files, answered from their documentation.

Invariants: files are parsed (`ast`), never imported; nothing is random: the questions and their words are a
function of the file and of hashes of the function's qualified name. All questions about a function are one
group, so they are on one side of the held-out split.

Each function gives several conversations: what it does, its arguments, its call, one sentence, its module,
the search for it, a dialogue of two turns, and a look-up with the tool `help` (with thoughts for half of the
functions), so that all kinds of blocks occur.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from apertus_model.chat.messages import Message, response_of, with_deliberation
from apertus_model.data.conversations.stored import Conversation
from apertus_model.data.documents.parsed import Rejection
from examples.documents import syntax_tree
from specs.sources import SourceSpec

SUMMARY_WORDS = (4, 40)
ANSWER_WORDS = 60
_NOT_PROSE = re.compile(r"->|>>>|::|[<>{}|\\]|\b(e\.g|i\.e|etc)\.$")
HELP = {
    "type": "function",
    "function": {
        "name": "help",
        "description": "Documentation of a function.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
    },
}


class Function(NamedTuple):
    """A documented function. `name` is qualified; `owner` is the module or class that it is in;
    `signature` is that of the source without self; `parameters` are names with stars; `defaults` maps
    optional ones to their source."""

    name: str
    owner: str
    is_method: bool
    signature: str
    parameters: list[str]
    defaults: dict[str, str]
    summary: str


def module_name(url: str, path: str) -> str:
    """The dotted name of the module in a file. A path below `installed:<package>` begins with the package."""
    parts = list(PurePosixPath(path).with_suffix("").parts)
    package = url.removeprefix("installed:")
    if package != url and package.split("/")[0] not in ("stdlib", "site-packages"):
        parts = [*package.split("/"), *parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def function_questions(file: BinaryIO, source: SourceSpec, path: str) -> Iterator[Conversation | Rejection]:
    """Conversations about the functions of one file, function by function in the order of the source."""
    module = module_name(source.url, path)
    tree = syntax_tree(file, source)
    if isinstance(tree, Rejection):
        yield tree
        return
    if any(part.startswith("_") for part in module.split(".")):
        return
    for found in _functions(tree, module):
        if isinstance(found, Rejection):
            yield found
        else:
            yield from _conversations(found)


def labelled_answers(file: BinaryIO, source: SourceSpec, path: str) -> Iterator[Conversation | Rejection]:
    """For each function of a file, its sentence as the preferred answer and the sentence of the next function
    as the rejected answer."""
    asked = [
        one
        for one in function_questions(file, source, path)
        if isinstance(one, Rejection) or one.id.endswith("/sentence")
    ]
    questions = [one for one in asked if isinstance(one, Conversation)]
    yield from (one for one in asked if isinstance(one, Rejection))
    for one, other in zip(questions, questions[1:] + questions[:1], strict=True):
        answers = [*one.completions, *other.completions]
        yield replace(one, id=f"{one.group}/labelled", completions=answers, preference=True)


def _functions(tree: ast.Module, module: str) -> Iterator[Function | Rejection]:
    """Public functions of the module and methods of its public classes, the first definition of each name."""
    seen: set[str] = set()
    pending: list[tuple[list[ast.stmt], str, bool]] = [(tree.body, module, False)]
    while pending:
        body, owner, is_class = pending.pop(0)
        for node in _definitions(body):
            name = f"{owner}.{node.name}".lstrip(".")
            if node.name.startswith("_") or name in seen:
                continue
            seen.add(name)
            if isinstance(node, ast.ClassDef):
                pending.append((node.body, name, True))
            else:
                yield _function(node, name, owner, is_class)


def _definitions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """The definitions in a body, including those under a condition."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _definitions([*node.body, *node.orelse])


def _function(
    node: ast.FunctionDef | ast.AsyncFunctionDef, name: str, owner: str, is_method: bool
) -> Function | Rejection:
    docstring = ast.get_docstring(node)
    if not docstring:
        return Rejection("no_docstring")
    summary = clean_sentence(docstring)
    if summary is None:
        return Rejection("no_clean_sentence")
    decorators = {decorator.id for decorator in node.decorator_list if isinstance(decorator, ast.Name)}
    if "property" in decorators:
        return Rejection("property")
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    if is_method and "staticmethod" not in decorators and positional:
        (arguments.posonlyargs or arguments.args).pop(0)
        positional = positional[1:]
        arguments.defaults = arguments.defaults[-len(positional) :] if positional else []
    names = [argument.arg for argument in positional]
    defaults = dict(
        zip(names[len(names) - len(arguments.defaults) :], map(ast.unparse, arguments.defaults), strict=True)
    )
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        names.append(argument.arg)
        if default is not None:
            defaults[argument.arg] = ast.unparse(default)
    names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return Function(
        name, owner, is_method, f"{name}({ast.unparse(arguments)}){returns}", names, defaults, summary
    )


def clean_sentence(docstring: str) -> str | None:
    """The first sentence of a docstring; None if the first paragraph does not begin with a sentence that can
    stand alone."""
    paragraph = re.split(r"\n\s*\n", docstring.strip(), maxsplit=1)[0]
    text = " ".join(paragraph.split())
    sentence = re.split(r"(?<=[a-z0-9)'\"`]\.)\s+(?=[A-Z])", text, maxsplit=1)[0]
    if re.fullmatch(r".*[\w)'\"`]", sentence):
        sentence += "."
    least, most = SUMMARY_WORDS
    if not least <= len(sentence.split()) <= most or not sentence.isprintable():
        return None
    if not re.fullmatch(r"[A-Z][a-z]*['-]?[a-z]* .*[\w)'\"`]\.", sentence) or _NOT_PROSE.search(sentence):
        return None
    pairs = all(sentence.count(left) == sentence.count(right) for left, right in ("()", "[]"))
    return sentence if pairs and not sentence.count("`") % 2 and not sentence.count('"') % 2 else None


def _conversations(function: Function) -> Iterator[Conversation]:
    name, summary = function.name, function.summary
    short = name.rsplit(".", 1)[1] if "." in name else name
    kind = "method of the class" if function.is_method else "function of the module"
    call = f"`{function.signature}`"
    dialogues: dict[str, list[Message]] = {
        "purpose": _turns(
            _words(name, f"What does {name} do?", f"What is {name} for?", f"Explain {name}."),
            f"`{short}` is a {kind} `{function.owner}`. {summary}",
        ),
        "arguments": _turns(
            _words(
                name,
                f"Which arguments does {name} take?",
                f"What are the parameters of {name}?",
                f"List the arguments of {name}.",
            ),
            f"{_arguments(function)} {summary}",
        ),
        "call": _turns(
            _words(
                name,
                f"How do I call {name}?",
                f"What is the signature of {name}?",
                f"Show me how {name} is called.",
            ),
            f"Call it as {call}. {summary}",
        ),
        "sentence": _turns(
            _words(name, f"Describe {name} in one sentence.", f"Summarise {name} in a sentence."), summary
        ),
        "search": _turns(
            _words(
                name,
                f"Which {kind} {function.owner} fits this description? {summary}",
                f"I look for a {kind} {function.owner} with this purpose: {summary}",
            ),
            f"That is `{name}`. You call it as {call}.",
        ),
        "dialogue": [
            *_turns(
                _words(name, f"Do you know {name}?", f"Tell me about {name}."),
                f"{summary} Its signature is {call}.",
            ),
            *_turns(
                _words(name, "Which of its arguments must I give?", "And what does it need?"),
                _required(function),
            ),
        ],
        "help": _looked_up(function, call),
    }
    metadata = {"function": name, "parameters": function.parameters, "summary": summary}
    for question, messages in dialogues.items():
        answers = [response for message in messages if (response := response_of(message)) is not None]
        if any(len(answer.split()) > ANSWER_WORDS for answer in answers):
            continue
        last = response_of(messages[-1])
        yield Conversation(
            id=f"{name}/{question}",
            messages=with_deliberation(messages),
            tools=[HELP] if question == "help" else None,
            completions=[] if last is None else [last],
            group=name,
            metadata=metadata,
        )


def _turns(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _arguments(function: Function) -> str:
    if not function.parameters:
        return f"`{function.name}` takes no arguments."
    defaults = function.defaults
    shown = [
        f"`{name}` (default `{defaults[name]}`)" if name in defaults else f"`{name}`"
        for name in function.parameters
    ]
    count = "one argument" if len(shown) == 1 else f"{len(shown)} arguments"
    return f"`{function.name}` takes {count}: {_listed(shown)}."


def _required(function: Function) -> str:
    needed = [
        f"`{name}`"
        for name in function.parameters
        if name not in function.defaults and not name.startswith("*")
    ]
    if not needed:
        if function.parameters:
            return "None of them: it can be called without arguments."
        return "It takes no arguments."
    others = len(function.parameters) - len(needed)
    return f"You must give {_listed(needed)}" + (
        f"; the other {others} may be left out." if others else ", and there are no others."
    )


def _looked_up(function: Function, call: str) -> list[Message]:
    """A look-up with the tool `help`."""
    name = function.name
    blocks: list[dict[str, Any]] = [
        {"type": "tool_calls", "calls": [{"name": "help", "arguments": {"name": name}}]},
        {"type": "tool_outputs", "outputs": [f"{function.signature}\n{function.summary}"]},
        {"type": "response", "text": f"Call it as {call}. {function.summary}"},
    ]
    if _hash(name) & 1:
        blocks.insert(0, {"type": "thoughts", "text": "The documentation says it exactly, so I look it up."})
    question = _words(
        name, f"Look up {name} and tell me how to use it.", f"What does the documentation say about {name}?"
    )
    return [{"role": "user", "content": question}, {"role": "assistant", "content": blocks}]


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _words(name: str, *phrases: str) -> str:
    """One of the phrases, chosen by the hash of the name and the first phrase."""
    return phrases[_hash(f"{name}\n{phrases[0]}") % len(phrases)]


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
