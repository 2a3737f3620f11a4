"""Forks rehearsals of ranks from a process that has imported their modules, as `apertus_model.stages.server`
forks stages: `python -m apertus_model.rehearsal.server DEVICE GPU`.

The patches for a kind of GPU are applied before torchtitan is imported, so there is a server for each kind.
"""

import contextlib
import sys

from apertus_model.rehearsal.__main__ import prepare
from apertus_model.stages.server import serve


def main(device: str, gpu: str) -> None:
    """Serves until the launcher is gone."""

    def prepared() -> None:
        with contextlib.suppress(Exception):  # a rehearsal that needs it reports the error
            prepare(device, gpu)

    serve(prepared)


if __name__ == "__main__":
    main(*sys.argv[1:])
