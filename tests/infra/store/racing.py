"""Writers that write one marker at the same moment."""

import threading

from infra.store import Store


def winners(store: Store, writers: int) -> list[int]:
    """Which of them, by their numbers, were told that their `marker.json` is the one that is there."""
    wins: list[int] = []
    barrier = threading.Barrier(writers)

    def write(number: int) -> None:
        barrier.wait()
        if store.write_once("marker.json", str(number).encode()):
            wins.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wins
