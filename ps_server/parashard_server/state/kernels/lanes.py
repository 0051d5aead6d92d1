"""Lanes: a fixed set of threads that share the runs of a vector among them.

Owns where vectors are cut and which thread does which run. Knows nothing of what a loop computes. Called by
`parashard_server.state.kernels.fused`, in whatever thread a push arrived.

Plain threads suffice, because the loops release the GIL. What a loop does to an element must depend on that element
alone, so that neither the number of lanes nor a cut changes a bit (P13).
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
"""Arrays of a call, together, below which its own thread is faster alone: to wake another one takes 40 us or more."""
RUN_MIN_BYTES = 4 << 20
"""Arrays of one run, together, at least: 1 MiB of each of Adam's four."""
RUNS_PER_LANE = 4
"""At most. More than one, so that a lane which is late or slow leaves its runs to the others; not many, because a
thread needs the GIL after each."""


class Lanes:
    """Threads that share the work of one call.

    Several threads may call at once; each works on its own call, with the lanes that are free.

    Parameters
    ----------
    threads : int
        How many work on one call, the caller's among them; >= 1.
    """

    def __init__(self, threads: int) -> None:
        assert threads >= 1, f"a call has its own thread at least, found {threads}"
        self.threads = threads
        self._others = ThreadPoolExecutor(threads - 1, "lane") if threads > 1 else None  # they start when first needed

    def run(self, loop: Callable[..., T], arrays: Sequence[Float32s], *scalars: Any) -> list[T]:
        """Call `loop(*arrays, *scalars)`: at once, or in runs on all lanes where the arrays are large.

        When this returns or raises, nothing of the call runs any more. After an exception no further run begins.

        Parameters
        ----------
        loop : callable
            Releases the GIL.
        arrays : sequence of ndarray, each of shape (elements,)
            All cut at the same places.
        scalars
            The same for every run.

        Returns
        -------
        list
            What the loop returned, in the order of the runs.
        """
        runs = cut(arrays[0].size, sum(array.nbytes for array in arrays), self.threads)
        if self._others is None or len(runs) == 1:
            return [loop(*arrays, *scalars)]
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
            begun = [other for other in others if not other.cancel()]  # who comes too late is not waited for
            wait(begun)
        for other in begun:
            other.result()
        return [results[number] for number in range(len(runs))]

    def close(self) -> None:
        """End the threads."""
        if self._others is not None:
            self._others.shutdown()


def cut(elements: int, size_bytes: int, threads: int) -> list[slice]:
    """Return the runs of a vector: equal, of whole blocks, but for the last; one, where sharing does not pay.

    Parameters
    ----------
    elements : int
        Length of the vector.
    size_bytes : int
        Of all arrays of the call, each of this length.
    threads : int
        How many will share the runs.
    """
    if threads == 1 or size_bytes < SHARED_MIN_BYTES:
        return [slice(0, elements)]
    runs = min(RUNS_PER_LANE * threads, size_bytes // RUN_MIN_BYTES)
    length = -(-elements // (runs * BLOCK_ELEMENTS)) * BLOCK_ELEMENTS
    return [slice(begin, min(begin + length, elements)) for begin in range(0, elements, length)]
