"""Every failure that parashard raises on purpose, grouped by what the caller must do::

    ParashardError
    ├── InvalidRequest          fix the caller; the same request never succeeds
    │   ├── MalformedFrame          the bytes are not a valid frame of this protocol
    │   ├── LimitExceeded           a declared size or count over its bound
    │   ├── UnknownVariable         a variable or row range that the shard does not hold
    │   ├── ShapeMismatch           a slice with another shape or dtype than the plan says
    │   └── NonFiniteGradient       a gradient contains NaN or infinity
    ├── StaleRequest            refresh the view of the job, then do the whole operation again
    │   ├── StalePlan               the request names another plan version
    │   ├── StaleIncarnation        the request names a shard's earlier (or later) incarnation
    │   ├── StaleRound              a synchronous request names a round that is not the current one
    │   ├── TooEarly                the weights still lack updates that the step needs, after a short wait
    │   └── UnknownWorker           a restarted coordinator does not know this worker: join again
    ├── Fenced                  a newer process has this identity, or this is another run: stop
    │   ├── Superseded              a newer incarnation took over
    │   └── WrongRun                the run id, the job's digest or the machine's arithmetic differs
    ├── RetryLater              send the same request again after a pause
    │   ├── QueueFull               a bounded queue or memory budget has no room now
    │   ├── NotReady                the process is starting or draining
    │   ├── Unreachable             no answer from the peer before the deadline
    │   └── Unavailable             a resource of this machine: a port, disk space, a GPU, a currently valid certificate
    ├── ConfigurationError      fix the job file or the command line (local, at start)
    │   ├── BadData                 fix the data: a file that is missing, damaged or of another format
    │   ├── NewerFormat             use a newer version: this one cannot read the format of the stored bytes
    │   └── NotAllowed              use another certificate: this one has no role that may do this
    ├── StoreFailed             the checkpoint store gave an error; the operation did not happen
    │   ├── AlreadyStored           a conditional create found an object of that name
    │   ├── NotStored               there is no object of that name
    │   └── DamagedCheckpoint       stored bytes are truncated, changed or of another format
    ├── PeerFailed              the peer failed while answering: its log says more
    └── JobFailed               the job cannot continue; the message says why

Each leaf has a permanent `code`, sent in the trailing metadata of a gRPC answer (`parashard.protocol.rpc`); the client
raises the same class. Broken invariants are assertions: they crash the process and are not listed here.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import ClassVar

_OF_THE_PATH = frozenset(
    (
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EACCES,
        errno.EPERM,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EINVAL,
    )
)


SHOWN_CHARACTERS = 40
SHOWN_NAMES = 20


def shortened(text: str, most: int = SHOWN_CHARACTERS) -> str:
    """Return an untrusted text, cut to its first `most` characters, for an error message."""
    return text if len(text) <= most else f"{text[:most]}..."


def shown_names(names: Iterable[str]) -> str:
    """Return untrusted names as a list, shortened for an error message."""
    given = list(names)
    more = [f"and {len(given) - SHOWN_NAMES:,} more"] if len(given) > SHOWN_NAMES else []
    return ", ".join([*map(shortened, given[:SHOWN_NAMES]), *more])


def is_transient(error: BaseException) -> bool:
    """Tell whether an error may be transient, such as a full disk or a limit, rather than caused by the path."""
    return isinstance(error, OSError) and error.errno is not None and error.errno not in _OF_THE_PATH


class ParashardError(Exception):
    """Base of all errors that parashard raises on purpose."""

    code: ClassVar[str] = ""
    _by_code: ClassVar[dict[str, type[ParashardError]]] = {}

    def __init_subclass__(cls, code: str = "") -> None:
        super().__init_subclass__()
        cls.code = code
        if code:
            if code in ParashardError._by_code:
                raise TypeError(f"error code {code!r} is used twice")
            ParashardError._by_code[code] = cls

    def __init__(self, message: str, *, peer: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.peer = peer
        """Address of the process that answered with this error; None if it arose here."""

    def __str__(self) -> str:
        return f"{self.message} (from {self.peer})" if self.peer else self.message

    @classmethod
    def from_code(cls, code: str) -> type[ParashardError] | None:
        """Return the class with this permanent code, or None."""
        return cls._by_code.get(code)

    @classmethod
    def leaves(cls) -> tuple[type[ParashardError], ...]:
        """Return every class that has a code, in the order of the tree."""
        return tuple(cls._by_code.values())


class InvalidRequest(ParashardError):
    """Fix the caller; the same request never succeeds."""


class MalformedFrame(InvalidRequest, code="malformed-frame"):
    """The bytes are not a valid frame of this protocol."""


class LimitExceeded(InvalidRequest, code="limit-exceeded"):
    """A declared size or count exceeds its bound; nothing was allocated."""


class UnknownVariable(InvalidRequest, code="unknown-variable"):
    """The shard does not hold this variable or this range of its rows."""


class ShapeMismatch(InvalidRequest, code="shape-mismatch"):
    """A slice has another shape or dtype than the plan says; nothing was written."""


class NonFiniteGradient(InvalidRequest, code="non-finite-gradient"):
    """The gradient contains NaN or infinity; nothing was written."""


class StaleRequest(ParashardError):
    """Refresh the view of the job, then do the whole operation again."""


class StalePlan(StaleRequest, code="stale-plan"):
    """The request names another version of the plan."""


class StaleIncarnation(StaleRequest, code="stale-incarnation"):
    """The request names another incarnation of this shard."""


class StaleRound(StaleRequest, code="stale-round"):
    """A synchronous request names a round that is not the shard's current one."""


class TooEarly(StaleRequest, code="too-early"):
    """The weights still lack updates that the step needs, after a short wait: lease again."""


class UnknownWorker(StaleRequest, code="unacquainted"):
    """A restarted coordinator does not know this worker: join again, and keep leases and unsaved reports."""


class Fenced(ParashardError):
    """A newer process has this identity, or this is another run: stop."""


class Superseded(Fenced, code="superseded"):
    """A newer incarnation of this process took over its identity."""


class WrongRun(Fenced, code="wrong-run"):
    """The run id, the job's digest or the machine's arithmetic differs."""


class RetryLater(ParashardError):
    """Send the same request again after a pause."""


class QueueFull(RetryLater, code="queue-full"):
    """A bounded queue or memory budget has no room now."""


class NotReady(RetryLater, code="not-ready"):
    """The process is starting or draining."""


class Unreachable(RetryLater, code="unreachable"):
    """The peer did not answer before the deadline."""


class Unavailable(RetryLater, code="unavailable"):
    """This machine lacks a resource now, which another may have: a port, disk space, a GPU, a valid certificate."""


class ConfigurationError(ParashardError, code="configuration"):
    """Fix the job file, the environment or the command line."""


class BadData(ConfigurationError, code="bad-data"):
    """Fix the data: a file that is missing, damaged or of another format."""


class NewerFormat(ConfigurationError, code="newer-format"):
    """Use the newer version that wrote these bytes: this one cannot read their format."""


class NotAllowed(ConfigurationError, code="not-allowed"):
    """Use another certificate: this one has no role that may do this; nothing was done."""


class StoreFailed(ParashardError, code="store-failed"):
    """The checkpoint store gave an error; the operation did not happen."""


class AlreadyStored(StoreFailed, code="already-stored"):
    """A conditional create found an object of that name."""


class NotStored(StoreFailed, code="not-stored"):
    """There is no object of that name."""


class DamagedCheckpoint(StoreFailed, code="damaged-checkpoint"):
    """Stored bytes are truncated, changed or of another format."""


class PeerFailed(ParashardError, code="peer-failed"):
    """The peer failed while answering; its log says more."""


class JobFailed(ParashardError, code="job-failed"):
    """The job cannot continue; the message says why."""


class WrongModel(ValueError):
    """A model's result cannot be used for a step. The step fails, as with any other error in a model."""
