"""What the attempts of parts print: a log in the scratch folder of a running one, in the store afterwards.

Invariant: a line is given once, without the secrets of the environment.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

from flows.planning.graph import Node
from infra.store import Store
from infra.store.scratch import PREFIX, scratch_root
from specs.job import Job
from specs.redaction import redacted

Line = tuple[str, str]
"""(name of the part, line)"""
Logs = dict[str, Callable[[], bytes]]
"""Readers of the logs of a part, by attempt; names of attempts begin with their time."""


def lines(store: Store, nodes: list[Node], scratch: str | None, every: bool = False) -> Iterator[Line]:
    """The lines of the last attempt of each part, or of `every` attempt. `scratch`: see `scratch_root`."""
    for node in nodes:
        logs = _running(store, node, scratch) | _stored(store, node)
        for attempt in sorted(logs) if every else sorted(logs)[-1:]:
            yield from _lines(node, logs[attempt]())


def follow(
    store: Store, nodes: list[Node], scratch: str | None, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Line]:
    """The lines of attempts that run now or begin later, as they come, until all parts are finished."""
    ended = {(node.name, attempt) for node in nodes for attempt in _stored(store, node)}
    given: dict[tuple[str, str], int] = {}  # bytes of the other logs
    while True:
        finished = all(node.artifact(store).complete for node in nodes)
        for node in nodes:
            stored = _stored(store, node)
            for attempt, load in (_running(store, node, scratch) | stored).items():
                name = (node.name, attempt)
                if name in ended:
                    continue
                log, begin = load(), given.get(name, 0)
                end = len(log) if attempt in stored else max(begin, log.rfind(b"\n") + 1)  # not half a line
                yield from _lines(node, log[begin:end])
                given[name] = end
                if attempt in stored:
                    ended.add(name)
        if finished:
            return
        sleep(2.0)


def _lines(node: Node, log: bytes) -> Iterator[Line]:
    for line in log.decode("utf-8", "replace").splitlines():
        yield node.name, redacted(line)


def _stored(store: Store, node: Node) -> Logs:
    folder = f"{node.path}/logs"
    files = {name.removesuffix(".txt"): f"{folder}/{name}" for name in store.names(folder)}
    return {attempt: partial(store.read_bytes, path) for attempt, path in files.items()}


def _running(store: Store, node: Node, scratch: str | None) -> Logs:
    """The logs of attempts that run on this machine, or whose scratch folder it shares."""
    logs: Logs = {}
    for file in scratch_root(scratch).glob(f"{PREFIX}{node.name.replace('/', '-')}-*/job.json"):
        log = file.with_name("log.txt")
        try:
            job = Job.model_validate_json(file.read_bytes())
            text = log.read_bytes()
        except (OSError, ValueError):  # it is being made or removed
            continue
        if (job.store, job.path) == (store.url, node.path):
            logs[job.attempt] = partial(bytes, text)
    return logs
