"""Reports a run whose process was killed, which its Prefect server would show as running for ever.

A worker that is told to stop kills its runs at once. The guard is a separate process that holds the other end
of a pipe: it notices the end of the run's process, whatever the cause.

Invariant: it changes only a run that is shown as running; the state of any other has been reported.
"""

import subprocess
import sys
from uuid import UUID

from flows.execution import interrupts
from infra.liveness import start_guard, wait_for_end

KILLED = "the process of this run was killed, as by a stopping worker; the next run resumes its work"


def guard(run: str) -> subprocess.Popen[bytes]:
    """Starts the guard of this process and its flow run, to be killed when the run's end is reported."""
    with interrupts.blocked():  # signals may be sent to all processes at once
        return start_guard([sys.executable, "-m", "flows.execution.watchdog", run])


def main(run: str) -> None:
    """Waits for the end of standard input, and tells Prefect."""
    wait_for_end()
    from prefect.client.orchestration import get_client
    from prefect.states import Crashed

    with get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(run)).state
        if state is not None and state.is_running():
            client.set_flow_run_state(UUID(run), Crashed(message=KILLED))


if __name__ == "__main__":
    main(sys.argv[1])
