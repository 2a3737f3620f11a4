"""Makes `questions.jsonl` from the docstrings of the standard library that runs this script: `python make.py
> questions.jsonl`.

A question is a public function with its signature; its choices are the first sentences of its own
documentation and of that of three other functions of the same module. Choices are plain sentences that do not
name the function.
"""

import ast
import json
import re
import sys
import sysconfig
from pathlib import Path
from random import Random

QUESTIONS = 100
PER_MODULE = 4
CHOICES = 4


def summaries(path: Path) -> dict[str, tuple[str, str]]:
    """name -> (signature, first sentence) of the public functions of a module that are documented in one
    plain sentence."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.parse(path.read_text("utf-8")).body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        paragraph = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        sentence = re.split(r"(?<=[a-z)])\. ", paragraph)[0].rstrip(".") + "."
        plain = re.fullmatch(r"[A-Z][A-Za-z0-9 ,.'()/-]{24,139}", sentence)
        if (
            plain
            and node.name.lower() not in sentence.lower()
            and sentence not in {other for _, other in found.values()}
        ):
            found[node.name] = (f"({ast.unparse(node.args)})", sentence)
    return found


def main() -> None:
    random = Random(0)
    root = Path(sysconfig.get_paths()["stdlib"])
    questions = []
    for path in sorted([*root.glob("*.py"), *root.glob("[a-z]*/*.py")]):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if re.search(
            r"(^|\.)_|test|idlelib|lib2to3|distutils|tkinter|turtle|site-packages|antigravity|this$", module
        ):
            continue
        functions = summaries(path)
        if len(functions) < CHOICES:
            continue
        for name in random.sample(sorted(functions), min(PER_MODULE, len(functions))):
            signature, own = functions[name]
            choices = random.sample(
                sorted(sentence for other, (_, sentence) in functions.items() if other != name), CHOICES - 1
            )
            choices.insert(random.randrange(CHOICES), own)
            row = {
                "module": module,
                "name": name,
                "signature": signature,
                "choices": choices,
                "answer": choices.index(own),
            }
            questions.append(row)
    chosen = sorted(
        random.sample(questions, min(QUESTIONS, len(questions))), key=lambda row: (row["module"], row["name"])
    )
    for row in chosen:
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
