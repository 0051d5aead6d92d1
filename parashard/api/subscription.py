"""subscribe: a local copy of a run's rows and variables, kept up to date by a server's differences.

For inference servers, and for programs that act by a policy that is still in training.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from parashard._proto import serving_pb2 as pb
from parashard._proto import serving_pb2_grpc
from parashard.checkpoints.catalogue import CheckpointId
from parashard.client.pulled_rows import TableSet
from parashard.errors import (
    ConfigurationError,
    MalformedFrame,
    NotReady,
    ParashardError,
    PeerFailed,
    RetryLater,
    Unreachable,
)
from parashard.plan.embedding import mixed
from parashard.plan.variables import Float32s, Variable
from parashard.process.arguments import checked_timeout_s
from parashard.process.logs import log
from parashard.protocol import rpc
from parashard.security.credentials import Credentials
from parashard.security.given_credentials import credentials_in, tls_folder
from parashard.security.identity import Role
from parashard.serving.checkpoint_watcher import Sight
from parashard.serving.differences import Replica
from parashard.serving.messages import id_of, sight_of, tables_of_served, variables_of_served
from parashard.serving.versions import Behind, LookedUp, behind, look_up, variable_of

WAIT_S = 5.0
"""How long the server may wait for a newer version before it answers."""
CALL_S = 3600.0
"""Deadline of one difference; keepalives detect a stalled server much earlier."""
RETRY_S = 0.5
"""Pause between attempts at a server that does not answer."""


class Subscription:
    """A copy of the newest committed rows and variables of a run; safe to read from any thread. Made by `subscribe`.

    A version becomes visible once it has arrived completely, so rows are never torn; versions never go back. While the
    server is unreachable, the copy stays readable and `behind` grows.

    Attributes
    ----------
    problem : str
        Why no newer version arrives, for example because the server is unreachable or has an older one; "" if all is
        well.
    fresh : bool
        Whether the server has live weights; a later incarnation of a shard may then lack some of their steps.
    """

    def __init__(
        self,
        address: str,
        tables: Sequence[str] | None,
        variables: Sequence[str] | None,
        timeout_s: float,
        credentials: Credentials | None = None,
    ) -> None:
        checked_timeout_s(timeout_s)
        self._address = address
        self._channel = rpc.connect(address, credentials)
        self._stub = serving_pb2_grpc.ServingStub(self._channel)  # type: ignore[no-untyped-call]
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._failed: ParashardError | None = None
        self._sight, self._clock_s, self.problem = Sight(), 0.0, ""
        self._call: object = None
        try:
            served = self._first(time.monotonic() + timeout_s)
            self._run_id = served.run_id
            names = _wanted("tables", tables, [table.name for table in served.tables])
            self._tables: TableSet = tables_of_served(served, names)
            wanted = _wanted("variables", variables, [variable.name for variable in served.variables])
            self._variables: dict[str, Variable] = variables_of_served(served, wanted)
            self._elements = {name: table.row_elements for name, table in self._tables.by_name.items()}
            self.fresh = served.fresh
            self._replica = Replica(self._elements, self._variables, fresh=self.fresh)
            self._note(served.sight)
            self._thread = threading.Thread(target=self._follow, name="subscription", daemon=True)
            self._thread.start()
            self.wait_for(lambda held: bool(held.versions), timeout_s)
        except BaseException:
            self.close()
            raise

    def rows(self, table: str, keys: npt.ArrayLike) -> Float32s:
        """Return the rows of keys, float32 of shape (keys, dimension); initial values for keys without a row.

        Raises
        ------
        UnknownVariable
            If the table was not subscribed to.
        """
        return self.look_up(table, keys).rows

    def look_up(self, table: str, keys: npt.ArrayLike) -> LookedUp:
        """Return the `rows`, which keys are `present`, and the rows' `versions`; raises as `rows` does."""
        return look_up(self._tables, self._replica.shards, table, mixed(np.ravel(keys)))

    def variable(self, name: str) -> Float32s:
        """Return a variable as a new array, from one version of each shard.

        Raises
        ------
        UnknownVariable
            If the variable was not subscribed to.
        """
        return variable_of(self._variables, self._replica.shards, name)

    @property
    def versions(self) -> tuple[CheckpointId, ...]:
        """The version of each shard: plan_version, shard, incarnation, number; as text "p1/s0/i3/c7"."""
        return tuple(version.id for version in self._replica.versions)

    @property
    def resyncs(self) -> int:
        """Number of switches to another incarnation of a shard or to a new plan; with `fresh`, each may lose steps."""
        return self._replica.resyncs

    @property
    def steps(self) -> int:
        """Steps in the shard version that has the fewest."""
        return min((len(version.steps) for version in self._replica.versions), default=0)

    @property
    def behind(self) -> Behind:
        """How far behind the run: `versions`, and `seconds` since the oldest was committed; 0.0 once this is `done`."""
        now_s = self._clock_s + time.monotonic()
        sight = self._sight
        return behind(self._replica.versions, sight.newest, sight.final_steps, now_s, sight.looked_at)

    @property
    def done(self) -> bool:
        """Whether the job is done and its final version is here."""
        return self._sight.final_steps is not None and self.behind == Behind(0, 0.0)

    def wait_for(self, condition: Callable[[Subscription], bool], timeout_s: float = 60.0) -> None:
        """Wait until a condition of this subscription holds, such as ``lambda s: s.steps >= 1000``.

        It is evaluated in the caller's thread after each message from the server.

        Raises
        ------
        Unreachable
            If it does not hold within `timeout_s`.
        ParashardError
            If the server refuses the subscription permanently.
        """
        until_s = time.monotonic() + checked_timeout_s(timeout_s)
        with self._changed:
            while not condition(self):
                if self._failed is not None:
                    raise self._failed
                left_s = until_s - time.monotonic()
                if left_s <= 0 or self._stopping.is_set():
                    raise Unreachable(
                        f"what is waited for did not come within {timeout_s:g} s; {self.problem or 'nothing is wrong'}",
                        peer=self._address,
                    )
                self._changed.wait(left_s)

    def close(self) -> None:
        """End the subscription; the copy can still be read."""
        self._stopping.set()
        cancel = getattr(self._call, "cancel", None)
        if cancel is not None:
            cancel()
        self._channel.close()
        thread = getattr(self, "_thread", None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=rpc.CONTROL_DEADLINE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _first(self, until_s: float) -> pb.GetServedReply:
        while True:
            try:
                with rpc.our_errors(self._address):
                    reply: pb.GetServedReply = self._stub.GetServed(
                        pb.GetServedRequest(), timeout=rpc.CONTROL_DEADLINE_S
                    )
                    return reply
            except RetryLater as error:
                if time.monotonic() >= until_s:
                    raise (
                        error if isinstance(error, NotReady) else Unreachable(error.message, peer=error.peer)
                    ) from None
                time.sleep(min(RETRY_S, max(0.0, until_s - time.monotonic())))

    def _follow(self) -> None:
        while not self._stopping.is_set():
            try:
                with rpc.our_errors(self._address):
                    self._difference()
            except (RetryLater, MalformedFrame, PeerFailed) as error:
                if self._stopping.is_set():
                    return
                self._tell(str(error))
                self._stopping.wait(RETRY_S)
            except Exception as error:  # noqa: BLE001  # callers of `wait_for` must see bugs too
                if not self._stopping.is_set():  # else the channel was closed
                    self._fail(error)
                return

    def _difference(self) -> None:
        """Request the differences since the held versions, and apply them."""
        request = pb.SubscribeRequest(
            run_id=self._run_id,
            tables=sorted(self._elements),
            variables=sorted(self._variables),
            held=self._replica.held(),
            wait_s=WAIT_S,
            fresh=self.fresh,
        )
        call = self._call = self._stub.Subscribe(request, timeout=CALL_S)
        for message in call:
            if message.WhichOneof("part") == "sight":
                self._note(message.sight)
            elif self._replica.feed(message):
                self._wake()

    def _note(self, message: pb.Sight) -> None:
        self._sight = sight_of(message)
        self._clock_s = message.now - time.monotonic()
        own = {id_[:2]: id_ for id_ in self.versions}
        older = [id_ for id_ in map(id_of, message.served) if own.get(id_[:2], id_) > id_]
        older_plan = bool(own) and any(id_.plan_version < max(own)[0] for id_ in map(id_of, message.served))
        problem = f"the server has {older[0]}, older than what is held, which is kept" if older else ""
        if older_plan:
            problem = "the server has an older plan than what is held, which is kept"
        self._tell(problem or self._replica.problem or message.problem)

    def _tell(self, problem: str) -> None:
        if problem and problem != self.problem:
            log.warning("subscription", address=self._address, problem=problem)
        self.problem = problem
        self._wake()

    def _fail(self, error: Exception) -> None:
        """End permanently; the copy stays readable."""
        ours = error if isinstance(error, ParashardError) else PeerFailed(f"{type(error).__name__}: {error}")
        self._failed = ours
        self._tell(str(ours))

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def subscribe(
    address: str,
    *,
    tables: Sequence[str] | None = None,
    variables: Sequence[str] | None = None,
    timeout_s: float = 60.0,
    tls_dir: str | os.PathLike[str] | None = None,
) -> Subscription:
    """Subscribe to a run at a server's address; return once one version of every shard has arrived.

    ::

        with ps.subscribe("127.0.0.1:7070", tables=["deep"], variables=["dense/weight"]) as served:
            rows = served.rows("deep", [17, 4711])

    Parameters
    ----------
    address : str
        The gRPC host:port that `parashard serve` prints.
    tables, variables : sequence of str, optional
        Names to subscribe to; None: all.
    timeout_s : float
        How long to wait for the server, and then for a first version.
    tls_dir : path, optional
        Folder with `ca.pem`, `cert.pem` and `key.pem`, for the role `reader`; default: `PARASHARD_TLS_DIR`.

    Raises
    ------
    ConfigurationError
        If the run has no such table or variable, or the folder of credentials is invalid.
    NotAllowed
        If the certificate lacks the role.
    Unreachable, NotReady
        If no version arrived in time: the server is unreachable, or has nothing to serve yet.
    """
    if not isinstance(address, str) or ":" not in address:
        raise ConfigurationError(f"ps.subscribe takes the host:port that `parashard serve` prints, found {address!r}")
    credentials = credentials_in(tls_folder(tls_dir))
    if credentials is not None:
        credentials.require(Role.READER)
    return Subscription(address, tables, variables, timeout_s, credentials)


def _wanted(what: str, names: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    if names is None:
        return list(known)
    if isinstance(names, str):
        raise ConfigurationError(f"ps.subscribe: {what}: found {names!r}; allowed: a list of names")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigurationError(
            f"ps.subscribe: {what}: found {unknown[0]!r}; the run has {', '.join(known) or 'none'}"
        )
    return list(names)
