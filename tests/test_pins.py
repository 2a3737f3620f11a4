"""constraints.txt can be installed on every platform and Python that the README names, with either build of
torch.

Needs a package index."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GLIBC = 28  # the newest minor version of glibc 2 that a wheel may need: Debian 10, RHEL 8
SOURCE_ONLY = ("langdetect", "rouge_score", "sqlitedict", "word2number")  # pure Python, no wheel on the index
NVIDIA = re.compile(r"(nvidia|cuda)-")  # what the CUDA build of torch pins itself

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def canonical(name: str) -> str:
    """The name as PEP 503 writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    """Version by canonical name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {
        canonical(name): version
        for name, _, version in (line.partition("==") for line in lines if not line.startswith("#"))
    }


def pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels of what has none on the index, this project's requirements among it: pip resolves for other
    platforms from wheels alone."""
    folder, project = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("project")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    version = pins()
    sources = [f"{name}=={version[canonical(name)]}" for name in SOURCE_ONLY]
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(project), *sources)
    return folder


def resolved(folder: Path, wheels: Path, *arguments: str) -> dict[str, str]:
    """What pip would install: version by canonical name."""
    report = folder / "report.json"
    options = ["--dry-run", "--ignore-installed", "--quiet", "--report", str(report)]
    pip("install", *options, "--find-links", str(wheels), "-c", "constraints.txt", *arguments)
    install = (item["metadata"] for item in json.loads(report.read_text())["install"])
    return {canonical(item["name"]): item["version"] for item in install}


def assert_everything_is_pinned(found: dict[str, str]) -> None:
    version = pins()
    assert [
        name for name in found if name not in version and name != "apertus" and not NVIDIA.match(name)
    ] == []


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_pins_resolve_with_the_cuda_build_of_torch(
    python: str, machine: str, wheels: Path, tmp_path: Path
) -> None:
    tags = [f"manylinux_2_{minor}" for minor in range(5, GLIBC + 1)] + [
        "manylinux1",
        "manylinux2010",
        "manylinux2014",
        "linux",
    ]
    platforms = [argument for tag in tags for argument in ("--platform", f"{tag}_{machine}")]
    target = [
        "--target",
        str(tmp_path / "target"),
        "--only-binary",
        ":all:",
        "--python-version",
        python,
        *platforms,
    ]
    # `===` leaves out builds with a local version, such as 2.13.0+cpu
    requirements = ["apertus[dev,docs,kuberay]", f"torch==={pins()['torch']}"]
    found = resolved(tmp_path, wheels, *target, *requirements)
    assert found["torch"] == pins()["torch"]
    assert found["triton"] == pins()["triton"]
    assert any(NVIDIA.match(name) for name in found)
    assert_everything_is_pinned(found)


def test_pins_resolve_with_the_build_of_torch_that_this_machine_finds(wheels: Path, tmp_path: Path) -> None:
    assert_everything_is_pinned(resolved(tmp_path, wheels, "apertus[dev,docs,kuberay]"))
