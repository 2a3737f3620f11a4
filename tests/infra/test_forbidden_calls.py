"""No module of ours runs data as code: calls and arguments that would are not written anywhere."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("apertus_model", "flows", "infra", "specs")


# Our own packages

FORBIDDEN_CALLS = {
    *(
        "eval",
        "exec",
        "compile",
        "__import__",
        "pickle.load",
        "pickle.loads",
        "dill.load",
        "cloudpickle.load",
        "marshal.loads",
        "shelve.open",
    ),
    *(
        "yaml.load",
        "yaml.unsafe_load",
        "yaml.full_load",
        "os.system",
        "os.popen",
        "joblib.load",
        "torch.jit.load",
        "torch.hub.load",
    ),
    *("runpy.run_path", "runpy.run_module", "datasets.load_dataset", "load_dataset"),
}
FORBIDDEN_ARGUMENTS = {
    ("trust_remote_code", True),
    ("weights_only", False),
    ("allow_pickle", True),
    ("shell", True),
}
STATED = {"np.load": "allow_pickle", "numpy.load": "allow_pickle", "torch.load": "weights_only"}


def findings(source: str) -> list[str]:
    """What a module says that could run data as code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name, arguments = ast.unparse(node.func), {keyword.arg: keyword.value for keyword in node.keywords}
        found += [f"{name}()" for _ in range(name in FORBIDDEN_CALLS)]
        for argument, value in FORBIDDEN_ARGUMENTS:
            if isinstance(given := arguments.get(argument), ast.Constant) and given.value is value:
                found.append(f"{name}({argument}={value})")
        if name in STATED and STATED[name] not in arguments:
            found.append(f"{name}() without {STATED[name]}")
        if name.endswith((".from_pretrained", ".from_config")) and name.startswith("Auto"):
            given = arguments.get("trust_remote_code")
            if not (isinstance(given, ast.Constant) and given.value is False):
                found.append(f"{name}() without trust_remote_code=False")
        if name == "YAML" and ast.unparse(arguments.get("typ", ast.Constant(None))) not in ("'safe'", "'rt'"):
            found.append("YAML() without typ='safe' or 'rt', which makes no objects either")
    return found


SAFE = {
    # loaders derived from PyYAML's safe one, in C: the task files of the harness are thousands
    "apertus_model/evaluation/harness/data.py": ["yaml.load()"],
    "apertus_model/evaluation/harness/tasks.py": ["yaml.load()"],
    # inside of bubblewrap: tests/apertus_model/evaluation/test_sandbox.py
    "apertus_model/evaluation/sandbox_runner.py": ["exec()", "compile()"],
}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_of_ours_runs_data_as_code(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    assert {
        str(file.relative_to(ROOT)): found for file in files if (found := findings(file.read_text("utf-8")))
    } == {path: calls for path, calls in SAFE.items() if path.startswith(f"{package}/")}


@pytest.mark.parametrize(
    "line",
    [
        *(
            "eval(text)",
            "pickle.load(file)",
            "yaml.load(text)",
            "torch.load(file)",
            "torch.load(file, weights_only=False)",
            "np.load(file)",
        ),
        *(
            "np.load(f, allow_pickle=True)",
            "AutoModel.from_pretrained(x)",
            "AutoModel.from_pretrained(x, trust_remote_code=True)",
            "YAML()",
            "YAML(typ='unsafe')",
        ),
        "subprocess.run(x, shell=True)",
    ],
)
def test_such_a_line_would_be_found(line: str) -> None:
    assert findings(line)
