"""A worker: a process that computes and commits units of one stage, and loads what they share once.

    python -m apertus_model.work.worker PIPE              of a local pool (apertus_model.work.local)
    python -m apertus_model.work.worker STORE FILE INDEX  of a job on a cluster (apertus_model.work.cluster)

The first form reads the job and then keys of units from standard input, one per line, and reports through the
pipe PIPE which are committed. The second form computes share INDEX of the units in `FILE` of the store,
divided among as many workers as its GPUs allow.

Invariants:
- No two workers write the same path, so one that was thought dead damages nothing.
- A worker ends with its stage: at the end of its standard input, or `lost_seconds` after the last heartbeat.
"""

import contextlib
import os
import queue
import sys
import threading
from pathlib import Path
from typing import IO

from apertus_model.work.local import run_in_processes, workers_here
from apertus_model.work.units import Committed, Shares, failure_file, reported, run_share
from infra.liveness import LONGEST_GAP, Silence
from infra.store import Store
from infra.store.documents import to_json
from infra.store.scratch import temporary_folder
from specs.job import Job


def in_pool(pipe: int) -> int:
    """Runs a worker of a local pool, and returns its exit code."""
    keys: queue.SimpleQueue[str] = queue.SimpleQueue()
    job = Job.model_validate_json(sys.stdin.readline())
    threading.Thread(target=_read_keys, args=(sys.stdin, keys), daemon=True).start()
    with os.fdopen(pipe, "w") as answers:
        try:
            for key in run_share(job, iter(keys.get, None)):
                print(Committed(unit=key).model_dump_json(), file=answers, flush=True)
        except Exception as error:
            print(reported(error).model_dump_json(), file=answers, flush=True)
            return 1
    return 0


def _read_keys(lines: IO[str], keys: queue.SimpleQueue[str]) -> None:
    for line in lines:
        keys.put(line.rstrip("\n"))
    os._exit(1)  # the stage is gone, or needs no worker any more


def on_cluster(url: str, file: str, index: int) -> int:
    """Runs a worker of a job on a cluster, and returns its exit code."""
    store, folder = Store.open(url), file.rpartition("/")[0]
    shares = Shares.model_validate_json(store.read_bytes(file))
    os.environ |= {
        "TOKENIZERS_PARALLELISM": "true" if shares.cpus > 1 else "false",
        "RAYON_NUM_THREADS": str(shares.cpus),
    }
    over = threading.Event()
    threading.Thread(target=_end_with_stage, args=(store, shares, over), daemon=True).start()
    keys = shares.shares[index]
    try:
        with temporary_folder("worker") as scratch:
            job = shares.job.model_copy(update={"scratch": str(scratch)})
            workers = min(workers_here(job, 1, by_count=False), len(keys))
            with contextlib.closing(
                run_in_processes(job, keys, workers) if workers > 1 else run_share(job, keys)
            ) as done:
                for key in done:
                    print(f"unit {key} is committed", flush=True)
    except Exception as error:
        number = Path(file).stem
        store.overwrite(failure_file(folder, f"{number}-{index}"), to_json(reported(error)))
        return 1
    finally:
        over.set()
    return 0


def _end_with_stage(store: Store, shares: Shares, over: threading.Event) -> None:
    stage, last = Silence(LONGEST_GAP), None
    while stage.after(last) < shares.lost_seconds:
        if over.wait(min(30.0, shares.lost_seconds / 10)):
            return
        with contextlib.suppress(Exception):  # storage that does not answer says nothing about the stage
            last = store.read_if_there(shares.alive)
    print(f"no heartbeat from the stage for {shares.lost_seconds:g} s: this worker ends", flush=True)
    os._exit(1)


def main(*words: str) -> int:
    return in_pool(int(words[0])) if len(words) == 1 else on_cluster(words[0], words[1], int(words[2]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
