from __future__ import annotations

import subprocess
import sys


def test_a_process_that_forks_has_built_the_specs_of_every_kind() -> None:
    code = (
        "from specs.stages import STAGES\nfrom specs.job import Job\n"
        "assert not Job.__pydantic_complete__\n"
        "import specs.built\n"
        "assert all(model.__pydantic_complete__ for model in (Job, *STAGES.values()))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
