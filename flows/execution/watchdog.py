"""Says of a deployed run that its process is gone, when that was killed and could not: Prefect would show it as running for ever.

A worker that is told to stop kills its runs at once. The guard is a process of its own, which holds the other end of a pipe: it notices the
end of the run's process, however that came about.

Invariant: only a run that is shown as running is touched; of any other, somebody has said what became of it.
"""

from __future__ import annotations

import sys
from uuid import UUID

from flows.execution import interrupts
from infra.liveness import start_guard, wait_for_end

KILLED = "the process of this run was killed, as by a worker that stops; what was committed is kept, the next run resumes from there"


def guard(run: str) -> None:
    """Has somebody watch over this process, which works at the flow run with that id."""
    with interrupts.blocked():  # they may go to all processes at once
        start_guard([sys.executable, "-m", "flows.execution.watchdog", run])


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
