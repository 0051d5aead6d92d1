"""Policy: the consistency of a job, parsed from its one-line form in the job file.

Owns the text form and its bounds. Knows nothing of leases or rounds: the coordinator picks a leasing class by `kind`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from parashard.errors import ConfigurationError

_FORM = re.compile(r"async|(?P<kind>ssp|sync):(?P<bound>0|[1-9][0-9]{0,8})")
_ALLOWED = "async, ssp:K with 0 <= K < 10^9, or sync:N with 1 <= N < 10^9"


@dataclass(frozen=True)
class Policy:
    """When a step may be leased.

    Parameters
    ----------
    kind : {"async", "ssp", "sync"}
        `async`: freely. `ssp`: stale synchronous parallel (Ho et al., NIPS 2013). `sync`: bulk synchronous rounds.
    bound : int
        `async`: 0. `ssp`: K, the largest step lag (step minus lowest incomplete step), in steps. `sync`: N, the
        steps of a round.

    Examples
    --------
    >>> Policy.parse("ssp:4")
    Policy(kind='ssp', bound=4)
    >>> str(Policy("sync", 8))
    'sync:8'
    """

    kind: Literal["async", "ssp", "sync"]
    bound: int = 0

    def __post_init__(self) -> None:
        if str(self) == "sync:0" or not _FORM.fullmatch(str(self)) or (self.kind == "async" and self.bound != 0):
            raise ConfigurationError(f"policy {self.kind!r} with bound {self.bound!r}; allowed: {_ALLOWED}")

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Return the policy that a text names; `Policy.parse(str(p)) == p`.

        Raises
        ------
        ConfigurationError
            The text is not one of the three forms.
        """
        form = _FORM.fullmatch(text)
        if form is None or text == "sync:0":
            raise ConfigurationError(f"policy {text!r}; allowed: {_ALLOWED}")
        if form["kind"] is None:
            return cls("async")
        return cls("ssp" if form["kind"] == "ssp" else "sync", int(form["bound"]))

    def __str__(self) -> str:
        return "async" if self.kind == "async" else f"{self.kind}:{self.bound}"
