"""The image of infra/docker, built without a registry of images, runs the smoke recipe.

Its base is NOT one of CUDA but a Debian made here, with this machine's release, sources of packages and
configuration of pip; flash-attn, vLLM and what the smoke recipe does not need are left out.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAMS = ("mmdebstrap", "buildah", "podman", "runc")
GIGABYTES = 12  # while it is built
BASE, IMAGE = "localhost/base", "localhost/apertus"


def obstacle() -> str:
    """Why no image can be built here; empty if one can be."""
    if os.geteuid() != 0:
        return "images are built as root only"
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"no {', '.join(absent)}: apt-get install --no-install-recommends {' '.join(PROGRAMS)}"
    if platform.freedesktop_os_release()["ID"] != "debian":
        return "this machine is no Debian: it has no sources of packages for one"
    if shutil.disk_usage(tempfile.gettempdir()).free < GIGABYTES * 1e9:
        return f"less than {GIGABYTES} GB are free in {tempfile.gettempdir()}"
    return ""


def output_of(*command: str | Path, seconds: float = 60, **environment: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, check=False, env=os.environ | environment
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def debian(folder: Path) -> Path:
    """A Debian of nothing but apt, as an archive."""
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    listed = output_of("apt-get", "indextargets", "--format", "$(SITE) $(RELEASE)", "Created-By: Packages")
    site = next(line.split()[0] for line in listed.splitlines() if line.split()[1:] == [release])
    options = folder / "apt.conf"
    options.write_text(
        "".join(
            line
            for line in output_of("apt-config", "dump").splitlines(True)
            if re.match(r"Acquire::https?::", line)
        )
    )
    archive = folder / "base.tar"
    made = ["--mode=root", "--variant=apt", "--include=ca-certificates", f"--aptopt={options}"]
    output_of("mmdebstrap", *made, release, archive, f"deb {site} {release} main", seconds=900)
    return archive


def pip_of_this_machine(folder: Path) -> list[str]:
    """Volumes that let pip in a container find what it finds here."""
    listed = output_of("python3", "-m", "pip", "config", "list")
    settings = dict(reversed(re.findall(r"^(?:global|:env:)\.+([a-z-]+)='(.*)'$", listed, re.M)))
    configuration = folder / "pip.conf"
    configuration.write_text("\n".join(["[global]", *map(" = ".join, settings.items()), ""]))
    named = re.findall(r"(?:^|file://|\s)(/[^/\s]+/[^/\s]+)", "\n".join(settings.values()), re.M)
    return [
        f"{configuration}:/etc/pip.conf:ro",
        "/etc/ssl/certs:/etc/ssl/certs:ro",
        *(f"{path}:{path}:ro" for path in sorted({*named}) if os.path.exists(path) and path != "/etc/ssl"),
    ]


class Images:
    """Images and containers of a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._storage = [f"--root={folder}/images", f"--runroot={folder}/run", "--storage-driver=overlay"]

    def buildah(self, *words: str | Path, seconds: float = 60) -> str:
        return output_of("buildah", *self._storage, *words, seconds=seconds, TMPDIR=str(self.folder))

    def podman(self, *words: str | Path, seconds: float = 60) -> str:
        storage = [*self._storage, "--runtime=runc", "--cgroup-manager=cgroupfs"]
        return output_of("podman", *storage, *words, seconds=seconds, TMPDIR=str(self.folder))

    def remove(self) -> None:
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted((mount for mount in mounts if mount.startswith(f"{self.folder}/")), reverse=True):
            subprocess.run(["umount", "--lazy", mount], check=False)
        shutil.rmtree(self.folder)


@pytest.fixture
def images() -> Iterator[Images]:
    if reason := obstacle():
        pytest.skip(reason)
    made = Images(Path(tempfile.mkdtemp(prefix="apertus-images-")))  # pytest keeps its own folders
    try:
        yield made
    finally:
        made.remove()


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_the_image_runs_the_smoke_recipe(images: Images) -> None:
    images.podman("import", debian(images.folder), BASE, seconds=300)
    less = {"FLASH_ATTN": "", "VLLM": "", "EXTRAS": "examples"}
    arguments = {"BUILD_BASE": BASE, "RUN_BASE": BASE, "PYTHON": "python3", **less}
    images.buildah(
        "bud",
        "--isolation=chroot",
        "--network=host",
        "--disable-compression=false",
        *(f"--volume={volume}" for volume in pip_of_this_machine(images.folder)),
        *(f"--build-arg={name}={value}" for name, value in arguments.items()),
        f"--file={ROOT}/infra/docker/Dockerfile",
        f"--tag={IMAGE}",
        ROOT,
        seconds=3600,
    )
    # lower than podman's own, which a machine may not allow
    ulimits = ["--ulimit=nofile=20000:20000", "--ulimit=nproc=1000:1000"]
    run = ["run", "--rm", "--network=none", *ulimits, IMAGE]
    text = images.podman(
        *run, "apertus", "run", "specs/recipes/smoke.yaml", "--store", "/tmp/store", seconds=1200
    )
    assert "the model is in" in text
    assert images.podman(*run, "sh", "-c", "ls /opt/*/bin/python").split() == ["/opt/apertus/bin/python"]
