"""StepPlan: what step s of a job is, as a pure function: its epoch and its exact examples.

A step determines its examples completely: any worker can compute it at any time, and recomputing it uses the same data.
Knows nothing of leases, workers or where the examples come from. Called by the coordinator (how many steps there are)
and by the workers (which examples a leased step has).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from parashard.data.base import Indices
from parashard.errors import ConfigurationError
from parashard.plan.permutation import MAX_LENGTH, Permutation

EXAMPLES_SHOWN = 8
BLOCK_EXAMPLES = 4096  # indices that are computed at once


@dataclass(frozen=True)
class StepPlan:
    """The numbered steps 0 .. total - 1 of a job.

    A pass cuts its own permutation of all examples into batches, so each example is in exactly one step of it. Where
    `batch_size` does not divide `examples`, the last step of a pass is shorter, or left out. The e-th epoch is the
    steps [e * steps_per_epoch, (e + 1) * steps_per_epoch): one pass, unless `epoch_steps` says otherwise; passes go on
    from one epoch into the next.

    Parameters
    ----------
    examples : int
        Length of the training split, 1 to 2**40.
    batch_size : int
        Examples in a step, >= 1.
    epochs : int
        >= 1.
    seed : int
        The job's seed.
    first_epoch : int
        The number of the epoch that step 0 lies in, >= 0: those before it were another job's.
    epoch_steps : int, optional
        Steps of an epoch; None: those of a pass.
    drop_last : bool
        Leave the shorter last step of a pass out.
    shuffle : bool
        False: each pass has the examples in their own order.
    passes_before : int
        Passes of jobs that this one goes on from, besides those of the epochs before `first_epoch`.

    Examples
    --------
    >>> plan = StepPlan(examples=5, batch_size=2, epochs=3, seed=0)
    >>> plan.steps_per_epoch, plan.total, plan.epoch_of(4)
    (3, 9, 1)
    >>> [plan.indices(step).tolist() for step in range(3)]
    [[4, 1], [3, 0], [2]]
    """

    examples: int
    batch_size: int
    epochs: int
    seed: int
    first_epoch: int = 0
    epoch_steps: int | None = None
    drop_last: bool = False
    shuffle: bool = True
    passes_before: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.examples <= MAX_LENGTH:
            raise ConfigurationError(f"a job needs 1 to {MAX_LENGTH} training examples, found {self.examples}")
        if self.batch_size < 1:
            raise ConfigurationError(f"batch_size must be at least 1, found {self.batch_size}")
        if self.epochs < 1:
            raise ConfigurationError(f"epochs must be at least 1, found {self.epochs}")
        if not self.steps_per_pass:
            raise ConfigurationError(
                f"drop_last leaves no step: a step has {self.batch_size} examples, and there are {self.examples}"
            )

    @property
    def steps_per_pass(self) -> int:
        """Steps that have each example once: ceil(examples / batch_size), or floor where the last is dropped."""
        return self.examples // self.batch_size if self.drop_last else -(-self.examples // self.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one epoch."""
        return self.epoch_steps or self.steps_per_pass

    @property
    def steps_before(self) -> int:
        """Steps before the job: the order of its examples and what is random in its steps go on from there."""
        return self.first_epoch * self.steps_per_epoch + self.passes_before * self.steps_per_pass

    @property
    def passes_after(self) -> int:
        """Passes that have begun when the job ends, with those before it."""
        return self._place(self.total - 1)[0] + 1

    @property
    def dropped(self) -> int:
        """Examples that each pass leaves out, others each time where it is shuffled."""
        return self.examples % self.batch_size if self.drop_last else 0

    @property
    def total(self) -> int:
        """Steps in the whole job."""
        return self.epochs * self.steps_per_epoch

    @property
    def short(self) -> int:
        """Examples of the shorter last step of a pass; 0: the job has none."""
        rest = self.examples % self.batch_size
        return rest if not self.drop_last and self._place(0)[1] + self.total >= self.steps_per_pass else 0

    def epoch_of(self, step: int) -> int:
        """Return the epoch that a step lies in; ValueError if the job has no such step."""
        if not 0 <= step < self.total:
            raise ValueError(f"the job's steps are [0, {self.total}), found step {step}")
        return self.first_epoch + step // self.steps_per_epoch

    def size(self, step: int) -> int:
        """Return how many examples a step has."""
        return min(self.batch_size, self.examples - self._place(step)[1] * self.batch_size)

    def indices(self, step: int) -> Indices:
        """Return the examples of a step.

        Returns
        -------
        ndarray of int64, shape (size,)
            A new array of `batch_size` distinct indices, fewer in the last step of a pass.

        Raises
        ------
        ValueError
            The job has no such step.
        """
        self.epoch_of(step)  # there is such a step
        number, place = self._place(step)
        if not self.shuffle:
            return np.arange(place * self.batch_size, min((place + 1) * self.batch_size, self.examples), dtype=np.int64)
        of_block = max(1, BLOCK_EXAMPLES // self.batch_size)
        block, place = divmod(place, of_block)
        start = place * self.batch_size
        size = of_block * self.batch_size
        return _block(self.examples, self.seed, number, block * size, size)[start : start + self.batch_size].copy()

    def _place(self, step: int) -> tuple[int, int]:
        """Return the number of the pass that a step lies in, and its place there."""
        return divmod(self.steps_before + step, self.steps_per_pass)

    def examples_in_words(self, step: int) -> str:
        """Return " (examples ...)", the first examples of a step, to append to an error message."""
        indices = self.indices(step)
        shown = ", ".join(str(i) for i in indices[:EXAMPLES_SHOWN])
        return f" (examples {shown}{', ...' if len(indices) > EXAMPLES_SHOWN else ''})"


@lru_cache(maxsize=8)  # the steps of a worker are near each other
def _block(examples: int, seed: int, number: int, start: int, size: int) -> Indices:
    """Return a run of a pass's permutation: much cheaper an index than a step's few."""
    positions = np.arange(start, min(start + size, examples), dtype=np.int64)
    return _permutation(examples, seed, number)(positions)


@lru_cache(maxsize=4)  # around a pass's end the leases of two alternate
def _permutation(length: int, seed: int, number: int) -> Permutation:
    return Permutation(length, seed, number)
