"""Paired rounds: what is compared is measured in turns, so that other work hits both sides."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

ROUNDS = 5
_PAUSE = 0.03  # seconds in which the threads of the side before stop spinning


@contextlib.contextmanager
def undisturbed(priority: int) -> Iterator[bool]:
    """Run in real time if this user may, so that other processes wait meanwhile.

    That holds for all threads that there are (PyTorch's may be older, and one that waits for its
    turn would hold up those that wait for it), and for threads and processes started inside.

    Args:
        priority: 1 to 99; 0: as usual.

    Returns:
        Whether it does.
    """
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    granted = False
    if priority:
        with contextlib.suppress(PermissionError):
            _schedule(os.SCHED_RR, os.sched_param(priority))
            granted = True
    try:
        yield granted
    finally:
        if granted:
            _schedule(*before)


def _schedule(policy: int, parameter: os.sched_param) -> None:
    """Set the policy of every thread of this process."""
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setscheduler(int(task), policy, parameter)


def paired(sides: Sequence[Callable[[], float]], rounds: int = ROUNDS) -> list[list[float]]:
    """Measure all sides once a round, every other round in the opposite order.

    Args:
        sides: Each measures one thing and returns a number.
        rounds: How often.

    Returns:
        A row a round, in the order of ``sides``.
    """
    rows = []
    for index in range(rounds):
        row = [0.0] * len(sides)
        order = range(len(sides)) if index % 2 == 0 else reversed(range(len(sides)))
        for place in order:
            time.sleep(_PAUSE)
            row[place] = sides[place]()
        rows.append(row)
    return rows


def median_ratio(rows: Sequence[Sequence[float]]) -> float:
    """Median over rounds of the first side over the second."""
    return statistics.median(row[0] / row[1] for row in rows)


def median_time(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call."""
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)
