"""Running shards with tables in this process, read as `parashard serve --fresh` reads them, and what they had when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from parashard._proto import shard_pb2 as pb
from parashard.client.pulled_rows import TableSet
from parashard.errors import ParashardError, Unreachable
from parashard.plan.embedding import EmbeddingTable, Keys
from parashard.plan.optimizers import SGD, Adagrad
from parashard.plan.partition import Plan, fixed_shards, place, split
from parashard.plan.row_rules import RowRules
from parashard.plan.variables import Initializer, Variable
from parashard.protocol.messages import Buffers, RowSlice
from parashard.serving.checkpoint_watcher import Published
from parashard.serving.live_shards import Ask, ShardWatcher
from parashard.serving.versions import PublishedShard
from parashard.transports.base import ShardAddress
from parashard_server.core.shard import Shard
from parashard_server.serving.live_reads import LiveReads
from parashard_server.shard_host import AdmissionLock, ShardHost
from parashard_server.state.rows.embedding_tables import EmbeddingTables
from support.in_process import RUN, SEED, push_for, shard_of, variables_of
from support.serving_cases import keys_of_shard
from support.waiting import DEADLINE_S

VARIABLES = variables_of(
    Variable("bias", (2,)),
    Variable("frozen", (2, 2), frozen=True),
    Variable("weight", (4, 3), Initializer("normal", 1.0)),
)
TABLES = (
    EmbeddingTable("item", 2, SGD(learning_rate=0.5), Initializer("normal", 0.5), rules=RowRules(evict_unused_steps=3)),
    EmbeddingTable(
        "capped", 1, SGD(learning_rate=1.0), rows_max=20, keys_per_step_max=8, rules=RowRules(evict_above_rows=6)
    ),
    EmbeddingTable(
        "small", 2, SGD(learning_rate=1.0), rules=RowRules(evict_norm_below=2.0, evict_norm_every=2, admit_after=2)
    ),
    EmbeddingTable("user", 3, Adagrad(0.1), Initializer("normal", 0.1), dtype="float16"),
)
IDS = 12


class Have(NamedTuple):
    """What a shard had: its weights, and of every key of each table whether it had a row, and which."""

    weights: bytes
    rows: dict[str, tuple[bytes, bytes]]


class LiveShards:
    """Shards that are pushed to, killed and restored.

    Parameters
    ----------
    shards : int
    """

    def __init__(self, shards: int = 2) -> None:
        self.plan: Plan = place(VARIABLES, split(VARIABLES, fixed_shards(shards)), shards, version=1)
        self.keys: list[Keys] = [keys_of_shard(shard, IDS, shards) for shard in range(shards)]
        self.pushed: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(shards)]
        self.had: dict[tuple[int, int, int], Have] = {}
        """By shard, incarnation and version."""
        self.hosts = [ShardHost(self._new(shard, 1), AdmissionLock(8, broken), "") for shard in range(shards)]
        self.reads = [LiveReads(_Open(host), host) for host in self.hosts]  # type: ignore[arg-type]
        self.asked: list[pb.ReadRequest] = []
        self.before_ask: Callable[[int], object] = lambda shard: None
        self.down: set[int] = set()
        self._steps = 0
        for shard in range(shards):
            self._note(shard)

    def shard(self, shard: int) -> Shard:
        """Return a shard as it is now."""
        return self.hosts[shard].shard

    def push(self, shard: int, ids: Sequence[int]) -> None:
        """Push a step for some of the shard's keys to each of its tables."""
        self._apply(self.shard(shard), self._steps, tuple(sorted(set(ids))))
        self.pushed[shard].append((self._steps, tuple(sorted(set(ids)))))
        self._steps += 1
        self._note(shard)

    def restore(self, shard: int, steps: int) -> None:
        """Put another incarnation in a shard's place, which has its first so many pushes only."""
        fresh = self._new(shard, self.shard(shard).identity.incarnation + 1)
        self.pushed[shard] = self.pushed[shard][:steps]
        for step, ids in self.pushed[shard]:
            self._apply(fresh, step, ids)
        self.hosts[shard].replace(fresh, "", taking_over=lambda shard: None)
        self._note(shard)

    def job(self) -> tuple[str, Plan]:
        """Return the run and its plan."""
        return RUN, self.plan

    def view(self, run_id: str) -> list[ShardAddress]:
        """Return where the shards are."""
        return [ShardAddress(str(n), host.shard.identity.incarnation) for n, host in enumerate(self.hosts)]

    def ask(self, address: str) -> Ask:
        """Return a function that asks a shard through messages."""
        shard = int(address)

        def ask(request: pb.ReadRequest) -> pb.ReadReply:
            if shard in self.down:
                raise Unreachable("no answer", peer=address)
            self.before_ask(shard)
            self.asked.append(pb.ReadRequest.FromString(request.SerializeToString()))
            reply = self.reads[shard].read(self.asked[-1], DEADLINE_S)
            return pb.ReadReply.FromString(reply.SerializeToString())

        return ask

    def watcher(self) -> ShardWatcher:
        """Return a watcher that knows nothing yet."""
        return ShardWatcher(self, TableSet(TABLES, SEED), clock=lambda: 60.0)

    def of(self, published: Published) -> list[Have]:
        """Return what published shards have."""
        return [self.published(shard) for shard in published.shards]

    def published(self, shard: PublishedShard) -> Have:
        """Return what a published or held shard has."""
        place_ = shard.version.id.shard
        weights = b"".join(shard.variables[placed.partition].tobytes() for placed in self.plan.layouts[place_])
        rows = {}
        for name, table in shard.tables.items():
            values, present = table.rows.look_up(self.keys[place_])
            rows[name] = present.tobytes(), values[present].tobytes()
        return Have(weights, rows)

    def _note(self, shard: int) -> None:
        it = self.shard(shard)
        assert it.tables is not None
        rows = {}
        for name, table in it.tables.by_name.items():
            found = table.pull(self.keys[shard], it.updates.version)
            rows[name] = found.present.tobytes(), found.values.astype(np.float32).tobytes()
        have = Have(it.storage.weights.tobytes(), rows)
        self.had[shard, it.identity.incarnation, it.updates.version] = have

    def _new(self, shard: int, incarnation: int) -> Shard:
        shards = len(self.plan.shards)
        return shard_of(
            self.plan, shard, incarnation=incarnation, steps=10_000, tables=EmbeddingTables(TABLES, SEED, shard, shards)
        )

    def _apply(self, shard: Shard, step: int, ids: tuple[int, ...]) -> None:
        keys = self.keys[shard.identity.shard][list(ids)]
        drawn = np.random.default_rng(step)
        pieces: list[Any] = []
        rows = []
        for table in TABLES if ids else ():
            some = keys[: table.keys_per_step_max]
            values = drawn.standard_normal((len(some), table.row_elements)).astype(np.float32)
            pieces += [some, values]
            rows.append(RowSlice(table.name, len(some), table.row_elements))
        push = push_for(shard, step, np.ones(sum(s.elements for s in push_for(shard, step, []).slices), np.float32))
        shard.push(push._replace(payload=Buffers([*push.payload.pieces, *pieces]), rows=tuple(rows)))


class _Open:
    """A request handler that takes whatever is meant for its shard."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host

    def check(self, target: Any) -> None:
        self._host.shard.check_target(target)


def broken(error: BaseException) -> None:
    """Fail a test where a shard's process would end."""
    assert isinstance(error, ParashardError), repr(error)
