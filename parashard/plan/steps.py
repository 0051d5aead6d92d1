"""StepPlan: the epoch and the exact examples of each step of a job, as a pure function.

A step determines its examples completely: any worker can compute it at any time, and recomputing it uses the same data.
Where batches are split, a step is one part of a batch, and the parts of a batch follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from parashard.errors import ConfigurationError
from parashard.plan.seeding import MAX_LENGTH, Indices, Permutation

EXAMPLES_SHOWN = 8
BLOCK_EXAMPLES = 4096  # indices that are computed at once
PART_EXAMPLES_MIN = 4
"""Fewest examples of a part of a batch: batch normalisation needs a few."""
PARTS_OF_OPEN_CLUSTER = 4
"""Parts of a batch if the number of workers is not known at the start."""


def parts_of_batch(workers: int, examples: int) -> int:
    """Return the number of parts of a batch: one for each worker, as far as the examples suffice."""
    return max(1, min(workers or PARTS_OF_OPEN_CLUSTER, examples // PART_EXAMPLES_MIN))


@dataclass(frozen=True)
class StepPlan:
    """The numbered steps 0 .. total - 1 of a job.

    A pass cuts its own permutation of all examples into batches, so each example is in exactly one batch of it. Where
    `batch_size` does not divide `examples`, the last batch of a pass is shorter, or left out. The e-th epoch is the
    steps [e * steps_per_epoch, (e + 1) * steps_per_epoch): one pass, unless `epoch_batches` says otherwise; passes
    continue from one epoch into the next. Step s is part s % parts of batch s // parts; a short batch has fewer parts,
    and its last steps have no examples.

    Parameters
    ----------
    examples : int
        Length of the training split, 1 to 2**40.
    batch_size : int
        Examples in a batch, >= 1.
    epochs : int
        >= 1.
    seed : int
        The job's seed.
    first_epoch : int
        The number of the epoch that step 0 lies in, >= 0: those before it were another job's.
    epoch_batches : int, optional
        Batches of an epoch; None: those of a pass.
    drop_last : bool
        Leave the shorter last batch of a pass out.
    shuffle : bool
        False: each pass has the examples in their own order.
    passes_before : int
        Passes of earlier jobs that this one continues, besides those of the epochs before `first_epoch`.
    parts : int
        Steps of a batch, >= 1.
    batched : bool
        An index of the data is a whole batch: each part of it names that index, and takes its rows (`rows_of_part`).

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
    epoch_batches: int | None = None
    drop_last: bool = False
    shuffle: bool = True
    passes_before: int = 0
    parts: int = 1
    batched: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.examples <= MAX_LENGTH:
            raise ConfigurationError(f"a job needs 1 to {MAX_LENGTH} training examples, found {self.examples}")
        if not self.steps_per_pass:
            raise ConfigurationError(
                f"drop_last leaves no batch: a batch has {self.batch_size} examples, and there are {self.examples}"
            )

    @property
    def steps_per_pass(self) -> int:
        """Steps of ceil(examples / batch_size) batches, or floor where the last one is dropped."""
        batches = self.examples // self.batch_size if self.drop_last else -(-self.examples // self.batch_size)
        return batches * self.parts

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one epoch."""
        return self.epoch_batches * self.parts if self.epoch_batches else self.steps_per_pass

    @property
    def steps_before(self) -> int:
        """Steps before the job: the order of its examples and the random numbers of its steps continue from there."""
        return self.first_epoch * self.steps_per_epoch + self.passes_before * self.steps_per_pass

    @property
    def passes_after(self) -> int:
        """Passes that have begun when the job ends, including those before it."""
        return self._place(self.total - 1)[0] + 1

    @property
    def dropped(self) -> int:
        """Number of examples that each pass leaves out; a shuffled pass leaves out other ones each time."""
        return self.examples % self.batch_size if self.drop_last else 0

    @property
    def total(self) -> int:
        """Steps in the whole job."""
        return self.epochs * self.steps_per_epoch

    @property
    def short(self) -> int:
        """Examples of the shorter last batch of a pass; 0: the job has none."""
        rest = self.examples % self.batch_size
        has_last = self._place(0)[1] * self.parts + self.total >= self.steps_per_pass
        return rest if not self.drop_last and has_last else 0

    @property
    def sizes(self) -> list[int]:
        """Different numbers of examples that steps have, other than 0: those of whole batches first."""
        batches = [min(self.batch_size, self.examples), *([self.short] if self.short else [])]
        parts = [_rows(part, self.parts, rows) for rows in batches for part in range(self.parts)]
        return [size for size in dict.fromkeys(part.stop - part.start for part in parts) if size]

    def epoch_of(self, step: int) -> int:
        """Return the epoch that a step lies in; ValueError if the job has no such step."""
        if not 0 <= step < self.total:
            raise ValueError(f"the job's steps are [0, {self.total}), found step {step}")
        return self.first_epoch + step // self.steps_per_epoch

    def size(self, step: int) -> int:
        """Return the number of examples of a step; if an index is a whole batch, of its indices."""
        if self.batched:
            return 1
        rows = self.rows_of_part(step, self._size_of_batch(step))
        return int(rows.stop - rows.start)

    def share(self, step: int) -> float:
        """Return a step's share of the examples of its batch; 1 if an index is a whole batch."""
        return 1.0 if self.batched else self.size(step) / self._size_of_batch(step)

    def rows_of_part(self, step: int, rows: int) -> slice:
        """Return a step's rows of its batch, which has `rows` rows."""
        return _rows(step % self.parts, self.parts, rows)

    def indices(self, step: int) -> Indices:
        """Return the examples of a step, a new array of distinct indices; ValueError: the job has no such step."""
        whole = self.indices_of_batch(step)
        return whole if self.batched else whole[self.rows_of_part(step, len(whole))]

    def indices_of_batch(self, step: int) -> Indices:
        """Return the examples of the batch that a step is a part of; otherwise as `indices`."""
        self.epoch_of(step)  # raises if there is no such step
        number, place = self._place(step)
        if not self.shuffle:
            return np.arange(place * self.batch_size, min((place + 1) * self.batch_size, self.examples), dtype=np.int64)
        of_block = max(1, BLOCK_EXAMPLES // self.batch_size)
        block, place = divmod(place, of_block)
        start = place * self.batch_size
        size = of_block * self.batch_size
        return _block(self.examples, self.seed, number, block * size, size)[start : start + self.batch_size].copy()

    def _size_of_batch(self, step: int) -> int:
        return min(self.batch_size, self.examples - self._place(step)[1] * self.batch_size)

    def _place(self, step: int) -> tuple[int, int]:
        """Return the number of the pass that a step lies in, and the place of its batch there."""
        number, place = divmod(self.steps_before + step, self.steps_per_pass)
        return number, place // self.parts

    def examples_in_words(self, step: int) -> str:
        """Return " (examples ...)", the first examples of a step, to append to an error message."""
        indices = self.indices(step)
        shown = ", ".join(str(i) for i in indices[:EXAMPLES_SHOWN])
        return f" (examples {shown}{', ...' if len(indices) > EXAMPLES_SHOWN else ''})"


def _rows(part: int, parts: int, rows: int) -> slice:
    """Return the rows of a part of a batch; an empty slice for the parts that a short batch lacks."""
    used = min(parts, max(1, rows // PART_EXAMPLES_MIN))
    return slice(rows * min(part, used) // used, rows * min(part + 1, used) // used)


@lru_cache(maxsize=8)  # the steps of a worker are near each other
def _block(examples: int, seed: int, number: int, start: int, size: int) -> Indices:
    """Return a run of a pass's permutation: much cheaper per index than a step's few."""
    positions = np.arange(start, min(start + size, examples), dtype=np.int64)
    return _permutation(examples, seed, number)(positions)


@lru_cache(maxsize=4)  # around a pass's end the leases of two alternate
def _permutation(length: int, seed: int, number: int) -> Permutation:
    return Permutation(length, seed, number)
