"""Computing a few results ahead of their consumer, in threads.

Invariants: results come in the order of the calls; at most `ahead` of them are held; a call is made only when a result is asked for, so
nothing is busy while the consumer is. Closing the generator begins no further call and waits for none: it may be closed by the garbage
collector, in a thread that is about to start or end and holds what the end of another thread needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def computed_ahead(calls: Iterable[Callable[[], T]], ahead: int, threads: int = 1) -> Generator[T, None, None]:
    """The results of `calls`, in order, while the next `ahead` ones are computed by `threads` threads.

    One thread is the right number for calls that compute: more of them spend their time on taking turns. Calls that wait for a network
    overlap in as many threads as there are.

    What a call raises is raised where its result was due, with the traceback of the thread. Closing the generator drops what was not begun;
    its threads end with the call that they are at. With `ahead` 0 every call is made when it is due, in the thread of the consumer.
    """
    if not ahead:
        for call in calls:
            yield call()
        return
    pending: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="prefetch")
    try:
        for call in calls:
            pending.append(pool.submit(call))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
