"""The error tree: permanent codes, and a picture at the top of the file that is true."""

import inspect
import re

import pytest

from parashard import errors
from parashard.errors import BadData, ParashardError
from parashard.protocol.rpc import status_of

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, ParashardError)]
LEAVES = ParashardError.leaves()


def drawn_tree() -> dict[str, str]:
    """Return (class, its parent) of every class in the docstring's picture, read by indentation."""
    parents: dict[str, str] = {}
    line_of: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^( {4}[ │├└─]*)([A-Z]\w+)(?: {2,}|$)", line)
        if match:
            column, name = len(match[1]), match[2]
            while line_of and line_of[-1][0] >= column:
                line_of.pop()
            parents[name] = line_of[-1][1] if line_of else ""
            line_of.append((column, name))
    return parents


def test_the_picture_is_the_tree():
    classes = {kind.__name__: kind.__bases__[0].__name__ for kind in CLASSES if kind is not ParashardError}
    assert drawn_tree() == {"ParashardError": "", **classes}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_whatever_has_no_classes_below_it_has_a_code(kind):
    if not kind.__subclasses__():
        assert kind.code, f"{kind.__name__} cannot travel"
    assert kind.__doc__


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_a_code_leads_back_to_its_class_and_has_a_status(kind):
    assert ParashardError.from_code(kind.code) is kind
    assert re.fullmatch("[a-z]+(-[a-z]+)*", kind.code)
    assert status_of(kind("why")) is not None


def test_codes_are_permanent():
    # These travel between versions and lie in logs: a code may be added, never changed or given to another class.
    assert {kind.code: kind.__name__ for kind in LEAVES} == {
        "malformed-frame": "MalformedFrame",
        "limit-exceeded": "LimitExceeded",
        "unknown-variable": "UnknownVariable",
        "shape-mismatch": "ShapeMismatch",
        "non-finite-gradient": "NonFiniteGradient",
        "unavailable": "Unavailable",
        "stale-plan": "StalePlan",
        "stale-incarnation": "StaleIncarnation",
        "stale-round": "StaleRound",
        "too-early": "TooEarly",
        "unacquainted": "UnknownWorker",
        "superseded": "Superseded",
        "wrong-run": "WrongRun",
        "queue-full": "QueueFull",
        "not-ready": "NotReady",
        "unreachable": "Unreachable",
        "configuration": "ConfigurationError",
        "bad-data": "BadData",
        "newer-format": "NewerFormat",
        "not-allowed": "NotAllowed",
        "store-failed": "StoreFailed",
        "already-stored": "AlreadyStored",
        "not-stored": "NotStored",
        "damaged-checkpoint": "DamagedCheckpoint",
        "peer-failed": "PeerFailed",
        "job-failed": "JobFailed",
    }


def test_a_code_cannot_be_used_twice():
    with pytest.raises(TypeError, match="'queue-full' is used twice"):

        class _Impostor(ParashardError, code="queue-full"):
            """Never registered."""

    assert ParashardError.from_code("queue-full") is errors.QueueFull


def test_an_unknown_code_and_no_code_lead_nowhere():
    assert ParashardError.from_code("no-such-code") is None
    assert ParashardError.from_code("") is None


def test_the_peer_is_named_where_there_is_one():
    assert str(BadData("torn")) == "torn"
    remote = BadData("torn", peer="10.0.0.1:7")
    assert (str(remote), remote.message, remote.peer) == ("torn (from 10.0.0.1:7)", "torn", "10.0.0.1:7")
