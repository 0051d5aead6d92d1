"""Policy: the consistency of a job, parsed from its one-line form in the job file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from parashard.errors import ConfigurationError

PARTS_MAX = 4096
_FORM = re.compile(r"auto|async|(?P<kind>auto|ssp|sync):(?P<bound>0|[1-9][0-9]{0,8})")
_ALLOWED = "auto, async, ssp:K with 0 <= K < 10^9, or sync:N with 1 <= N < 10^9"


@dataclass(frozen=True)
class Policy:
    """When a step may be leased.

    Examples
    --------
    >>> Policy.parse("ssp:4")
    Policy(kind='ssp', bound=4)
    >>> str(Policy("sync", 8))
    'sync:8'
    """

    # `auto`: each batch is split into parts, one step each, which together are one update. `async`: freely. `ssp`:
    # stale synchronous parallel (Ho et al., NIPS 2013). `sync`: bulk synchronous rounds.
    kind: Literal["auto", "async", "ssp", "sync"]
    # `auto`: the parts of a batch; 0 until `Job.complete` chooses them. `async`: 0. `ssp`: K, the largest
    # step lag (step minus lowest incomplete step), in steps. `sync`: N, the steps of a round.
    bound: int = 0

    @property
    def parts(self) -> int:
        """Steps of a batch: 1 but in `auto`."""
        return self.bound if self.kind == "auto" else 1

    @property
    def steps_of_update(self) -> int:
        """Steps whose gradients move the weights together."""
        return self.bound if self.kind in ("auto", "sync") else 1

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Return the policy that a text names; `Policy.parse(str(p)) == p`."""
        if not _allowed(text):
            raise ConfigurationError(f"policy {text!r}; allowed: {_ALLOWED}")
        kind, _, bound = text.partition(":")
        return cls(kind, int(bound or 0))  # type: ignore[arg-type]  # one of the kinds, as it is allowed

    def __str__(self) -> str:
        has_bound = self.bound or self.kind in ("ssp", "sync")
        return f"{self.kind}:{self.bound}" if has_bound else self.kind


def _allowed(text: str) -> bool:
    form = _FORM.fullmatch(text)
    if form is None or text in ("sync:0", "auto:0"):
        return False
    return form["kind"] != "auto" or int(form["bound"]) <= PARTS_MAX
