"""The held-out split of a source without one of its own: a seeded choice, the same on every machine.

Owns the two options and the choice of rows. Knows nothing of formats. Called by the sources.
"""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from parashard.data.base import Indices
from parashard.plan.permutation import Permutation

_NO_EPOCH = -1  # the permutation of no job's epoch, so that a split is unrelated to any order of training


class SplitOptions(BaseModel):
    """How many examples are held out, and which."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    held_out: float = Field(
        default=0.2,
        ge=0.0,
        lt=1.0,
        description="Fraction of the examples that is kept out of training; unused where the data has its own split.",
    )
    split_seed: int = Field(
        default=0, ge=0, description="Chooses which examples are held out; independent of the job's seed."
    )

    def rows(self, examples: int) -> tuple[Indices, Indices]:
        """Return the (training, held-out) rows of `examples` >= 1 rows, each ascending; at least one is for training.

        The number held out is `held_out * examples` rounded down.
        """
        shuffled = Permutation(examples, self.split_seed, _NO_EPOCH)(np.arange(examples, dtype=np.int64))
        count = min(int(self.held_out * examples), examples - 1)
        return np.sort(shuffled[count:]), np.sort(shuffled[:count])
