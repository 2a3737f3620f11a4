"""Profiles: facts about a cluster, in a file of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from specs.errors import SpecError
from specs.launch import Launch
from specs.profiles import Profile, SlurmProfile, load_profile
from specs.units import Duration

PROFILES = Path(__file__).resolve().parents[2] / "infra" / "profiles"


def test_without_a_file_stages_run_on_this_machine() -> None:
    assert load_profile(None).launcher == load_profile("").launcher == "local"


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_valid_and_name_no_account(path: Path) -> None:
    profile = load_profile(path)
    assert profile.launcher == path.stem.partition("-")[0]
    assert "account" not in {**profile.slurm.arguments} or str(profile.slurm.arguments["account"]).startswith(
        "<"
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("array", "set by the launcher"),
        ("time", "a field of its own"),
        ("no-requeue", "set by the launcher"),
        ("--account", "not a long option"),
    ],
)
def test_an_option_of_sbatch_that_would_break_the_job_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Profile.model_validate({"slurm": {"arguments": {name: "x"}}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"environment": {"AWS_SECRET_ACCESS_KEY": "x"}}, "looks like a secret"),
        ({"environment": {"DB_PASS": "x"}}, "looks like a secret"),
        ({"environment": {"HTTPS_PROXY": "http://me:a/b@proxy:8080"}}, "a URL with credentials in it"),
        ({"scratch": "s3://me:a/b@bucket"}, "a URL with credentials in it"),
        ({"launcher": "kubernetes"}, "write 'ray'"),
        ({"executor": "kubernetes"}, "write 'ray'"),
        ({"kubernetes": {"image": "apertus"}}, r"write ray: \{address"),
        ({"launcher": "ray", "modules": ["cuda"]}, "are for Slurm"),
        ({"slurm": {"memory": "lots"}}, "string_pattern_mismatch"),
    ],
)
def test_meaningless_sources_are_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Profile.model_validate(content)


def test_variable_that_only_looks_like_a_secret_is_accepted() -> None:
    environment = {"TOKENIZERS_PARALLELISM": "true", "MAX_TOKENS": "5", "HTTPS_PROXY": "http://proxy:8080"}
    assert Profile.model_validate({"environment": environment}).environment == environment


def test_a_mistake_names_file_line_field_and_fix(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("launcher: slurm\nslurm:\n  partitions: normal\n")
    with pytest.raises(SpecError) as error:
        load_profile(file)
    assert (
        "cluster.yaml:3: slurm.partitions: there is no field 'partitions' here. Fix: did you mean"
        " 'partition'?" in str(error.value)
    )


@pytest.mark.parametrize("text", ["", "- a", "root:x:0:0"])
def test_a_file_that_is_no_mapping_is_told_what_a_profile_is(tmp_path: Path, text: str) -> None:
    (tmp_path / "cluster.yaml").write_text(text)
    with pytest.raises(SpecError, match=r"cluster\.yaml: a profile is a mapping with launcher"):
        load_profile(tmp_path / "cluster.yaml")


def test_a_stage_that_would_be_told_to_stop_as_it_begins_is_refused() -> None:
    with pytest.raises(ValidationError, match="stop_before_end is 600s and time_limit 300s"):
        SlurmProfile(time_limit=Duration(300), stop_before_end=Duration(600))
    with pytest.raises(ValidationError, match="stop_before_end is 300s and time_limit 300s"):
        SlurmProfile(time_limit=Duration(300))
    assert SlurmProfile(time_limit=Duration(301)).stop_before_end == Duration(300)


def test_workers_of_a_recipe_win_over_those_of_the_profile() -> None:
    workers = {"units_per_job": 50, "count": 100}
    profile = Profile.model_validate({"executor": "slurm", "workers": workers})
    found = profile.launch_of(Launch(threads=2))
    assert (found.executor, found.threads) == ("slurm", 2)
    assert found.workers is not None and found.workers.stated() == workers
    stated = Launch.model_validate({"executor": "local", "workers": {"count": 1}})
    assert profile.launch_of(stated) == stated
    assert Profile().launch_of(stated) == stated


def test_every_mistake_of_a_profile_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    path.write_text("launcher: slrum\nslurm:\n  partiton: a\nmodules: cuda\nworkers: {count: some}\n")
    with pytest.raises(SpecError) as caught:
        load_profile(path)
    assert sorted(str(caught.value).splitlines()) == [
        f"{path}:1: launcher: 'slrum' is not one of the choices. Fix: did you mean 'slurm'?",
        f"{path}:3: slurm.partiton: there is no field 'partiton' here. Fix: did you mean 'partition'?",
        f"{path}:4: modules: 'cuda' is not a list. Fix: write a list, such as [a, b].",
        f"{path}:5: workers.count: 'some' is not a whole number. Fix: write a whole number, such as 100.",
    ]
