"""Lanes: a thread pool that processes a vector in parallel runs.

Owns the division of vectors into runs and their distribution. Knows nothing of what a loop computes.

Threads suffice, because the loops release the GIL. A loop's result for an element must depend on that element
alone, so that the bits depend neither on the number of lanes nor on the division.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from parashard.plan.variables import Float32s
from parashard_server.state.kernels.scalars import BLOCK_ELEMENTS

T = TypeVar("T")

SHARED_MIN_BYTES = 32 << 20
"""Total size of a call's arrays below which one thread is faster: waking another takes 40 us or more."""
RUN_MIN_BYTES = 4 << 20
"""Smallest total size of a run's arrays: 1 MiB of each of Adam's four."""
RUNS_PER_LANE = 4
"""Largest number of runs per lane. More than one, so that other lanes take over runs of a slow one; not many,
because a thread needs the GIL after each."""


class Lanes:
    """A thread pool for data-parallel loops.

    Several threads may call concurrently; each works on its own call, with the lanes that are free.

    Parameters
    ----------
    threads : int
        Threads of one call, the caller included; >= 1.
    """

    def __init__(self, threads: int) -> None:
        assert threads >= 1, f"a call has its own thread at least, found {threads}"
        self.threads = threads
        self._others = ThreadPoolExecutor(threads - 1, "lane") if threads > 1 else None  # they start when first needed

    def run(self, loop: Callable[..., T], arrays: Sequence[Float32s], *scalars: Any) -> list[T]:
        """Call `loop(*arrays, *scalars)`: directly, or in runs on all lanes if the arrays are large.

        When this returns or raises, no run is active. After an exception no further run begins.

        Parameters
        ----------
        loop : callable
            Releases the GIL.
        arrays : sequence of ndarray, each of shape (elements,)
            Of one size; all cut at the same places.
        scalars
            The same for every run.

        Returns
        -------
        list
            What the loop returned, in the order of the runs.
        """
        size_bytes = arrays[0].nbytes * len(arrays)
        if self._others is None or size_bytes < SHARED_MIN_BYTES:
            return [loop(*arrays, *scalars)]
        runs = cut(arrays[0].size, size_bytes, self.threads)
        waiting = deque(enumerate(runs))
        results: dict[int, T] = {}

        def work() -> None:
            while waiting:
                try:
                    number, run = waiting.popleft()
                except IndexError:
                    return  # another lane took the last one
                try:
                    results[number] = loop(*(array[run] for array in arrays), *scalars)
                except BaseException:
                    waiting.clear()
                    raise

        others = [self._others.submit(work) for _ in range(min(self.threads, len(runs)) - 1)]
        try:
            work()
        finally:
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
    """Return the runs of a vector: equal, of whole blocks, except the last; a single one for small arrays.

    Parameters
    ----------
    elements : int
        Length of the vector.
    size_bytes : int
        Of all arrays of the call, each of this length.
    threads : int
        Number of threads.
    """
    if threads == 1 or size_bytes < SHARED_MIN_BYTES:
        return [slice(0, elements)]
    runs = min(RUNS_PER_LANE * threads, size_bytes // RUN_MIN_BYTES)
    length = -(-elements // (runs * BLOCK_ELEMENTS)) * BLOCK_ELEMENTS
    return [slice(begin, min(begin + length, elements)) for begin in range(0, elements, length)]
