"""Turns an error in the process of a stage into a report to the launcher."""

from infra.store.records import DamagedCheckpoint
from specs.errors import StageError
from specs.job import DamagedInput, Failure
from specs.redaction import redacted

# errors of storage, network, collectives and devices; another attempt cannot mend a wrong recipe
WORTH_ANOTHER_TRY = (OSError, RuntimeError)


def failure_of(error: Exception) -> Failure:
    """The error as a report, without secrets: only its message if the error is one for users."""
    known = isinstance(error, StageError)
    message = redacted(str(error) if known else f"{type(error).__name__}: {error}")
    again = isinstance(error, WORTH_ANOTHER_TRY) and not isinstance(error, NotImplementedError)
    damaged = None
    if isinstance(error, DamagedCheckpoint):
        damaged = DamagedInput(artifact=error.artifact, step=error.step)
    return Failure(message=message, again=again, damaged=damaged)
