"""Every failure that parashard raises on purpose, grouped by what the caller must do::

    ParashardError
    ├── InvalidRequest          fix the caller; the same request never succeeds
    │   ├── MalformedFrame          bytes that are not one of our frames
    │   ├── LimitExceeded           a declared size or count over its bound
    │   ├── UnknownVariable         a variable or row range that the shard does not hold
    │   ├── ShapeMismatch           a slice with another shape or dtype than the plan says
    │   └── NonFiniteGradient       a gradient with NaN or infinity in it
    ├── StaleRequest            refresh the view of the job, then do the whole operation again
    │   ├── StalePlan               the request names another plan version
    │   ├── StaleIncarnation        the request names a shard's earlier (or later) incarnation
    │   ├── StaleRound              a synchronous request names a round that is not the current one
    │   ├── TooEarly                the weights lack updates that the step needs, still after a moment
    │   └── UnknownWorker           a coordinator that was started again does not know this worker: join again
    ├── Fenced                  a newer process has this identity, or this is another run: stop
    │   ├── Superseded              a newer incarnation took over
    │   └── WrongRun                the run id, the job's digest or the machine's arithmetic differs
    ├── RetryLater              send the same request again after a pause
    │   ├── QueueFull               a bounded queue or memory budget has no room now
    │   ├── NotReady                the process is starting or draining
    │   ├── Unreachable             no answer from the peer before the deadline
    │   └── Unavailable             this machine lacks it now: a port, a disk's bytes, a GPU, a certificate in its time
    ├── ConfigurationError      fix the job file or the command line (local, at start)
    │   ├── BadData                 fix the data: a file that is missing, damaged or of another format
    │   ├── NewerFormat             use a newer version: stored bytes are of a format that this one does not read
    │   └── NotAllowed              use another certificate: no role of the one that was shown may do this
    ├── StoreFailed             the checkpoint store gave an error; what was asked for has not happened
    │   ├── AlreadyStored           a conditional create found something under that name
    │   ├── NotStored               there is nothing under that name
    │   └── DamagedCheckpoint       stored bytes are not what was written: truncated, changed or of another format
    ├── PeerFailed              the peer broke while answering: its log says more
    └── JobFailed               the job cannot go on; the message says why

Each leaf has a permanent `code` that travels in the trailing metadata of a gRPC answer (`parashard.protocol.rpc`), and
the client raises the same class again. Broken invariants are assertions: they crash
the process and are not listed here.
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
    """Return a foreign text shortened to its beginning, for an error message."""
    return text if len(text) <= most else f"{text[:most]}..."


def shown_names(names: Iterable[str]) -> str:
    """Return a list of foreign names, shortened for an error message."""
    given = list(names)
    more = [f"and {len(given) - SHOWN_NAMES:,} more"] if len(given) > SHOWN_NAMES else []
    return ", ".join([*map(shortened, given[:SHOWN_NAMES]), *more])


def may_pass(error: BaseException) -> bool:
    """Tell whether a failure is the system's at this moment, as of a disk or a limit, not of what a path says."""
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
        """Address of the process that answered with this error; None where it arose here."""

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
    """The bytes are not one of our frames."""


class LimitExceeded(InvalidRequest, code="limit-exceeded"):
    """A declared size or count is over its bound; nothing was allocated."""


class UnknownVariable(InvalidRequest, code="unknown-variable"):
    """The shard does not hold this variable or this range of its rows."""


class ShapeMismatch(InvalidRequest, code="shape-mismatch"):
    """A slice has another shape or dtype than the plan says; nothing was written."""


class NonFiniteGradient(InvalidRequest, code="non-finite-gradient"):
    """The gradient has NaN or infinity in it; nothing was written."""


class StaleRequest(ParashardError):
    """Refresh the view of the job, then do the whole operation again."""


class StalePlan(StaleRequest, code="stale-plan"):
    """The request names another version of the plan."""


class StaleIncarnation(StaleRequest, code="stale-incarnation"):
    """The request names another incarnation of this shard."""


class StaleRound(StaleRequest, code="stale-round"):
    """A synchronous request names a round that is not the shard's current one."""


class TooEarly(StaleRequest, code="too-early"):
    """The weights lack updates that the step needs, and a moment's wait did not bring them: lease again."""


class UnknownWorker(StaleRequest, code="unacquainted"):
    """A coordinator that was started again does not know this worker: join again, and keep what is held."""


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
    """This machine lacks it now: a port, bytes of a disk, a GPU, a certificate in its time; another may have it."""


class ConfigurationError(ParashardError, code="configuration"):
    """Fix the job file, the environment or the command line."""


class BadData(ConfigurationError, code="bad-data"):
    """Fix the data: a file that is missing, damaged or of another format."""


class NewerFormat(ConfigurationError, code="newer-format"):
    """Use the newer version that wrote it: these stored bytes are of a format that this one does not read."""


class NotAllowed(ConfigurationError, code="not-allowed"):
    """Use another certificate: no role of the one that was shown may do this; nothing was done."""


class StoreFailed(ParashardError, code="store-failed"):
    """The checkpoint store gave an error; what was asked for has not happened."""


class AlreadyStored(StoreFailed, code="already-stored"):
    """A conditional create found something under that name."""


class NotStored(StoreFailed, code="not-stored"):
    """There is nothing under that name."""


class DamagedCheckpoint(StoreFailed, code="damaged-checkpoint"):
    """Stored bytes are not what was written: truncated, changed or of another format."""


class PeerFailed(ParashardError, code="peer-failed"):
    """The peer broke while answering; its log says more."""


class JobFailed(ParashardError, code="job-failed"):
    """The job cannot go on; the message says why."""


class WrongModel(ValueError):
    """A model computes what no step can be made of. It is a failure of the step, as any other error in a model."""
