"""A pool of threads that divide large vectors among them, by work that releases the GIL: NumPy's, compiled loops."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from numpy.typing import NDArray

T = TypeVar("T")

SHARED_MIN_BYTES = 32 << 20
"""Total size of a call's arrays below which one thread is faster: waking another takes 40 us or more."""
RUN_MIN_BYTES = 4 << 20
"""Smallest total size of a run's arrays: 1 MiB of each of Adam's four, 2 MiB of a copy."""
RUNS_PER_LANE = 4
"""Largest number of runs per lane. More than one, so that other lanes take over runs of a slow one; not many,
because a thread needs the GIL after each."""
RUN_GRAIN = 1 << 14
"""Runs have a multiple of this number of elements: whole blocks of a sum, whole pages of bytes."""


class Lanes:
    """A pool of threads that divide vectors among them; an element's result must depend on that element alone."""

    def __init__(self, threads: int) -> None:
        assert threads >= 1, f"a call has its own thread at least, found {threads}"
        self.threads = threads
        self.divides_from_bytes = SHARED_MIN_BYTES if threads > 1 else math.inf  # all arrays of a call together
        self._others = ThreadPoolExecutor(threads - 1, "lane") if threads > 1 else None  # they start when first needed

    def run(self, loop: Callable[..., T], arrays: Sequence[NDArray[Any]], *scalars: Any) -> list[T]:
        """Call `loop(*arrays, *scalars)`, in runs on all lanes if the equally long arrays are large; as `each`."""
        size_bytes = arrays[0].nbytes * len(arrays)
        if size_bytes < self.divides_from_bytes:
            return [loop(*arrays, *scalars)]
        runs = cut(arrays[0].size, size_bytes, self.threads)
        return self.each(lambda run: loop(*(array[run] for array in arrays), *scalars), runs)

    def each(self, work: Callable[[slice], T], runs: Sequence[slice]) -> list[T]:
        """Call `work` with each run on all lanes, results in order; no run is active when this returns or raises."""
        if self._others is None or len(runs) < 2:
            return [work(run) for run in runs]
        waiting = deque(enumerate(runs))
        results: dict[int, T] = {}

        def some() -> None:
            while waiting:
                try:
                    number, run = waiting.popleft()
                except IndexError:
                    return  # another lane took the last one
                try:
                    results[number] = work(run)
                except BaseException:
                    waiting.clear()
                    raise

        others: list[Future[None]] = []
        try:
            for _ in range(min(self.threads, len(runs)) - 1):
                others.append(self._others.submit(some))
            some()
        finally:
            waiting.clear()  # also where a lane could not be started
            begun = [other for other in others if not other.cancel()]  # lanes that have not started are not waited for
            wait(begun)
        for other in begun:
            other.result()
        return [results[number] for number in range(len(runs))]

    def close(self) -> None:
        """End the threads."""
        if self._others is not None:
            self._others.shutdown()


def cut(elements: int, size_bytes: int, threads: int) -> list[slice]:
    """Return the runs of a vector: equal, multiples of `RUN_GRAIN`, except the last; a single one for small arrays."""
    # `size_bytes` is of all arrays of the call, each of `elements`.
    if threads == 1 or size_bytes < SHARED_MIN_BYTES:
        return [slice(0, elements)]
    runs = min(RUNS_PER_LANE * threads, size_bytes // RUN_MIN_BYTES)
    length = -(-elements // (runs * RUN_GRAIN)) * RUN_GRAIN
    return [slice(begin, min(begin + length, elements)) for begin in range(0, elements, length)]
