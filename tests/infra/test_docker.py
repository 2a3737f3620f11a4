"""The container files, as far as that goes without Docker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from apertus_model.vllm_client import VLLM_PYTHON

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "infra" / "docker"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    services: dict[str, Any] = YAML(typ="safe").load(FOLDER / "compose.yaml")["services"]
    return services


def test_every_image_has_a_version_and_every_port_is_of_this_machine(services: dict[str, Any]) -> None:
    assert {
        service["image"] for service in services.values() if not re.search(r":[\w.-]*\d", service["image"])
    } == {"apertus"}
    assert all(
        port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", [])
    )


def test_a_service_waits_for_what_it_needs_and_that_can_say_when_it_is_ready(
    services: dict[str, Any],
) -> None:
    waits = [pair for service in services.values() for pair in service.get("depends_on", {}).items()]
    assert len(waits) >= 2  # the server for its database, the worker for the server
    for needed, condition in waits:
        assert condition == {"condition": "service_healthy"}
        assert "healthcheck" in services[needed]


def test_secrets_are_asked_for_and_have_no_default() -> None:
    text = (FOLDER / "compose.yaml").read_text()
    names = set(re.findall(r"(?<!\$)\$\{(\w+)", text))
    assert names == {
        line.split("=")[0] for line in (FOLDER / ".env.example").read_text().splitlines() if "=" in line
    }
    assert all(
        line.endswith("=")
        for line in (FOLDER / ".env.example").read_text().splitlines()
        if not line.startswith("#")
    )
    for secret in names - {"TORCH_INDEX"}:
        assert f"${{{secret}:?" in text and f"${{{secret}:-" not in text


def test_the_image_copies_what_is_there_and_the_context_lets_it_through() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert all((ROOT / name).exists() for name in allowed)
    recipe = (FOLDER / "Dockerfile").read_text()
    copied = {
        name
        for line in re.findall(r"^COPY (?!--from)(.+) \./$", recipe, re.M)
        for name in line.split()
        if name != "."
    }
    assert copied <= allowed
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    assert f"prefecthq/prefect:{pinned['prefect']}-" in (FOLDER / "compose.yaml").read_text()


def test_flash_attn_has_one_version() -> None:
    extra = re.search(r'^flash = \["flash-attn==([\w.]+)"\]', (ROOT / "pyproject.toml").read_text(), re.M)
    recipe = (FOLDER / "Dockerfile").read_text()
    assert (
        extra is not None
        and f"\nARG FLASH_ATTN={extra[1]}\n" in recipe
        and recipe.count("flash-attn==${FLASH_ATTN}") == 1
    )


def test_the_image_has_vllm_where_it_says() -> None:
    recipe = (FOLDER / "Dockerfile").read_text()
    (folder,) = re.findall(rf"^ENV {VLLM_PYTHON}=(\S+)/bin/python$", recipe, re.M)
    assert re.search(rf"{folder}/bin/pip install .*vllm==\S+ \$\(grep \^lm_eval= constraints.txt\)", recipe)
    assert len(re.findall(r"^lm_eval=", (ROOT / "constraints.txt").read_text(), re.M)) == 1
    assert f"COPY --from=build {folder} {folder}\n" in recipe


def test_the_worker_starts_with_modules_that_exist(services: dict[str, Any]) -> None:
    script = services["worker"]["command"][-1]
    modules = re.findall(r"python -m ([\w.]+)", script)
    assert modules
    assert all((ROOT / f"{module.replace('.', '/')}.py").exists() for module in modules)
