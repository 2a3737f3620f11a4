"""The interval between saves that wastes the least time, for a given write time and failure rate.

The advice on checkpoint intervals follows from it. Let t be the work between two saves, d the time of a write
and M the mean of exponentially distributed times between failures, and let restarts cost nothing. Then the
expected time per second of work is (Daly 2006, eq. 13, R = 0)

    T(t) = M (exp((t + d) / M) - 1) / t.
"""

import math


def expected_time(interval: float, write_seconds: float, mean_time_between_failures: float) -> float:
    """Expected seconds per second of work, T(t) above; infinite where it is too large for a float. All
    arguments are in seconds and positive."""
    exponent = (interval + write_seconds) / mean_time_between_failures
    return mean_time_between_failures * math.expm1(exponent) / interval if exponent < 700 else math.inf


def longest_interval(
    more: float, best: float, write_seconds: float, mean_time_between_failures: float
) -> float:
    """The longest interval whose expected time per second of work exceeds that of the interval `best` by at
    most `more` seconds; can be infinite."""
    limit = expected_time(best, write_seconds, mean_time_between_failures) + more
    if limit == math.inf:
        return math.inf
    low = high = best
    while expected_time(high, write_seconds, mean_time_between_failures) <= limit:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        longer = expected_time(middle, write_seconds, mean_time_between_failures) <= limit
        low, high = (middle, high) if longer else (low, middle)
    return low


def young(write_seconds: float, mean_time_between_failures: float) -> float:
    """The first-order optimum (J. W. Young, "A first order approximation to the optimum checkpoint interval",
    CACM 17(9), 1974): sqrt(2 d M) seconds of work between saves."""
    return math.sqrt(2 * write_seconds * mean_time_between_failures)


def young_daly(write_seconds: float, mean_time_between_failures: float) -> float:
    """The higher-order optimum (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
    restart dumps", FGCS 22(3), 2006, eq. 37).

        t = sqrt(2 d M) [1 + sqrt(d / (2 M)) / 3 + (d / (2 M)) / 9] - d    for d < 2 M
        t = M                                                             otherwise

    Returns the seconds of work between the end of a save and the beginning of the next. d is the time for
    which training stops at a save (with asynchronous saves, the stall), and M that of the whole job: a node's
    divided by the number of nodes. Raises ValueError for an argument that is not positive."""
    if write_seconds <= 0 or mean_time_between_failures <= 0:
        failures = f"failures every {mean_time_between_failures} s"
        raise ValueError(f"a write time of {write_seconds} s and {failures}: both must be positive")
    if write_seconds >= 2 * mean_time_between_failures:
        return mean_time_between_failures
    ratio = write_seconds / (2 * mean_time_between_failures)
    work = young(write_seconds, mean_time_between_failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9)
    return work - write_seconds
