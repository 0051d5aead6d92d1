"""RayCluster: shards and workers of a run on a Ray cluster, each the child of an actor (`ray_keeper`).

Ray places them and reports draining nodes; it restarts nothing (`max_restarts=0`), because the coordinator decides
that. Each shard has a bundle of one placement group, spread over nodes. Each worker is scheduled by itself: without
room it stays pending, which an autoscaler sees. The driver owns actors and group: Ray ends them with it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from parashard.errors import ConfigurationError, ParashardError, Unreachable, shortened
from parashard.figures import counted
from parashard.launch.local_cluster import MODULES
from parashard.launch.ray_head import (
    HEAD_CALL_S,
    connect,
    draining_nodes,
    head_patience_s,
    imported,
    last_line,
    node_addresses,
    why_lost,
)
from parashard.launch.ray_keeper import News, ProcessSpec, RayKeeper
from parashard.launch.ray_settings import Ray, as_options, in_words
from parashard.launch.runs import HASH_SEED, Run, child_variables, signer_of
from parashard.launch.starting import END_GRACE_S, POLL_S, Ended, end_in_turn, write_probe
from parashard.process.addresses import checked_address, is_loopback, own_host
from parashard.process.best_effort import BestEffort, why_failed
from parashard.process.resources import THREAD_VARIABLES
from parashard.process.run_files import LOGS
from parashard.process.shell import AwakeClock, ExitCode
from parashard.security.given_credentials import check_host
from parashard.security.identity import Identity, Role
from parashard.store import open_store

HEAD_LOOK_S = 1.0
"""Pause between two polls of Ray's head."""
STALL_S = HEAD_LOOK_S + 2 * HEAD_CALL_S + 2.0  # longer than a poll can take: this process was paused
ANOTHER_HEAD = "Ray has another head (GCS) now, which knows none of the run's processes"
AGAIN_S = 1.0
"""Pause before an unreachable actor is asked again."""
GONE_S = 10.0
"""How long Ray may take to end killed actors, and to remove a placement group."""
PENDING_S = 10.0
"""A process that is unplaced for longer is reported to the user."""
SHARED = "set checkpoint.url to an object store, or to a folder that all nodes have"
CALLS_MAX = 8
"""Calls that an actor serves at once: one waits for news, others may remain from when it was unreachable."""


class _RayProcess:
    """A process: its actor, and the pending call for its news."""

    def __init__(self, actor: Any, now_s: float) -> None:
        self.actor = actor
        self.since_s = now_s
        self.node = ""
        """Id of its node, or "" before it is placed."""
        self.offset = -1
        """Of the next byte of its log; -1 before the first news."""
        self.news: Any = actor.news.remote(self.offset)
        self.again_s = math.inf
        """When to ask for news again."""
        self.is_asked = self.is_killed = False
        self.request = self.host = ""
        """Its unanswered certificate request; and the address that it reports."""


class RayCluster:
    """The shards and workers of one run: a `Starter`."""

    def __init__(self, run: Run, settings: Ray, tell: Callable[[str], None]) -> None:
        self._ray = ray = imported()
        self._run, self._settings, self._tell = run, settings, tell
        self._kept: dict[str, _RayProcess] = {}
        self._ended: list[Ended] = []
        self._numbers = 0
        self._is_ours = connect(ray, settings.address, settings.runtime_env)
        options = run.job.cluster
        try:
            host = own_host(options.listens_on)
            self.launcher_address = str(ray.util.get_node_ip_address()) if is_loopback(host) else host
            check_host(self.launcher_address, options.insecure, run.credentials)
            if run.credentials is not None:
                run.credentials.check_host(self.launcher_address)
            self._signer = signer_of(run)
            self._probe = write_probe(run.store_url, run.folder)
        except BaseException:
            if self._is_ours:  # else the next run would take the connection for the program's
                ray.shutdown()
            raise
        self._host = options.listens_on if options.interface or options.host == "auto" else ""
        self._logs, self._log_files = run.folder / LOGS, BestEffort("log files", self._told)
        self._variables = _variables(run)
        self._group: Any = None
        self._is_told = False  # the user was told of unplaced processes
        self._draining: Mapping[str, float] = {}
        self._addresses: Mapping[str, str] = {}
        self._over = threading.Event()
        self._clock = AwakeClock(STALL_S)
        self._answered_s = self._clock.now_s()
        self._is_away = self._ends = False
        self._lost = ""  # why the run cannot go on with Ray's head
        self._leaving: list[Any] = []
        """Calls that end actors without Ray's head."""
        self._ask_head()
        threading.Thread(target=self._watch_head, name="ray-head", daemon=True).start()

    @property
    def running(self) -> list[str]:
        """Names of the processes that have been started and not been reaped, placed or not."""
        return list(self._kept)

    def start(self, name: str, module: str, arguments: Sequence[str]) -> None:
        """Let Ray place an actor that starts the process, now or when there is room."""
        assert name not in self._kept, f"{name} runs already"
        if self._is_away:  # some of Ray's calls would block
            self._end(name, ExitCode.IO_ERROR, "it cannot be started: Ray's head (GCS) does not answer")
            return
        is_worker, script = name.startswith("worker"), self._run.script
        spec = ProcessSpec(
            name=name,
            module=module,
            words=list(arguments),
            host=self._host,
            variables=self._variables if is_worker else {},
            folder=script.folder if script is not None else os.getcwd(),
            run_dir=str(self._run.folder),
            script=list(script.words[1:]) if script is not None and is_worker else [],
            store=self._run.store_url,
            probe=self._probe,
            advice=SHARED,
            identity="" if self._signer is None else identity_of(name).uri,
        )
        # Ray accepts a working_dir of this machine only for a whole driver, not for one actor.
        environment = {} if self._is_ours else dict(self._settings.runtime_env or {})
        try:
            options = self._worker_options() if is_worker else self._shard_options(int(name.rpartition("-")[2]))
            remote = self._ray.remote(RayKeeper).options(
                max_restarts=0, max_task_retries=0, max_concurrency=CALLS_MAX, runtime_env=environment, **options
            )
            self._kept[name] = _RayProcess(remote.remote(json.dumps(spec._asdict())), time.monotonic())
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"ps.Ray: {error}") from None
        except self._ray.exceptions.RayError as error:
            self._end(name, ExitCode.IO_ERROR, f"Ray cannot start it: {error}")

    def reap(self) -> list[Ended]:
        """Return the processes that have ended since the last call; append all processes' output to the run's logs."""
        if self._lost and not self._ends:
            raise Unreachable(f"{self._lost}; the run's checkpoints are in {self._run.store_url}")
        self._look()
        ended, self._ended = self._ended, []
        return ended

    def coming_ends(self) -> Mapping[str, float]:
        """Return the processes on draining nodes, each with its node's deadline."""
        return {name: self._draining[kept.node] for name, kept in self._kept.items() if kept.node in self._draining}

    def ask_to_end(self, name: str) -> None:
        """Send SIGTERM to a process if it is running; cancel one that is not placed yet."""
        self._look()
        kept = self._kept.get(name)
        if kept is not None and kept.node:
            kept.is_asked = True
            kept.actor.ask_to_end.remote()
        elif kept is not None:
            self._kill(kept)

    def kill(self, name: str) -> None:
        """Kill a process with its actor if it is running; an unplaced one is not silent, and keeps waiting."""
        self._look()
        kept = self._kept.get(name)
        if kept is not None and kept.node:
            self._kill(kept)

    def end(self, grace_s: float = END_GRACE_S) -> None:
        """End every process, workers first; remove actors and the placement group."""
        if self._over.is_set():
            return
        self._ends = True
        try:
            self._end_all(grace_s)
        except self._ray.exceptions.RayError as error:  # such as a head that is gone, and its state with it
            self._tell(f"warning: Ray does not say whether its processes have ended: {last_line(error)}")
        self._over.set()
        with suppress(ParashardError):
            open_store(self._run.store_url).delete(self._probe)
        if self._is_ours:
            self._ray.shutdown()

    def _end_all(self, grace_s: float) -> None:
        end_in_turn(self, grace_s)
        for kept in self._kept.values():
            self._kill(kept)
        removing = threading.Thread(target=self._remove_group, name="ray-group", daemon=True)
        removing.start()  # in a thread: it would block if the head is gone
        until_s = time.monotonic() + GONE_S
        while (left := self._left(removing)) and time.monotonic() < until_s:
            self.reap()
            time.sleep(POLL_S)
        if left:
            self._tell(f"warning: Ray has not ended after {GONE_S:.0f} s: {shortened(', '.join(left))}")

    def _left(self, removing: threading.Thread) -> list[str]:
        """Return what Ray has not ended yet."""
        group = ["the placement group"] if removing.is_alive() else []
        return [*self._kept, *(["actors that were asked to leave"] if self._still_leaving() else []), *group]

    # --- placing ---

    def _shard_options(self, shard: int) -> dict[str, Any]:
        """Return the options of a shard: its bundle, unless that is on a draining node."""
        util, bundle = self._ray.util, self._settings.of_shard(self._run.job.cluster)
        if self._group is None:
            self._group = util.placement_group([bundle] * self._run.job.cluster.shards, strategy="SPREAD")
        strategy: Any = util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, shard)
        if self._draining:
            at = util.placement_group_table(self._group)["bundles_to_node_id"].get(shard, "")
            strategy = "SPREAD" if at in self._draining else strategy
        return {**as_options(bundle), "scheduling_strategy": strategy}

    def _worker_options(self) -> dict[str, Any]:
        options = as_options(self._settings.of_worker(self._run.job.cluster))
        labels = self._settings.worker_labels
        return {**options, "label_selector": dict(labels)} if labels else options

    def _needs(self, name: str) -> str:
        """Describe the resources that a process waits for."""
        cluster, settings = self._run.job.cluster, self._settings
        if name.startswith("worker"):
            return in_words({**settings.of_worker(cluster), **(settings.worker_labels or {})})
        return f"each of {counted(cluster.shards, 'shard')} {in_words(settings.of_shard(cluster))}, all at once"

    # --- news from Ray ---

    def _look(self) -> None:
        """Handle all processes' news without blocking: a blocking wait can crash if Ray goes away meanwhile."""
        now_s = time.monotonic()
        calls = {kept.news: name for name, kept in self._kept.items() if kept.news is not None}
        if calls:
            for answer in self._ray.wait(list(calls), num_returns=len(calls), timeout=0)[0]:
                self._take_news(calls[answer], answer, now_s)
        for kept in self._kept.values():
            if now_s >= kept.again_s:
                kept.news, kept.again_s = kept.actor.news.remote(kept.offset), math.inf
                if kept.is_asked:  # the first request may have been lost
                    kept.actor.ask_to_end.remote()
        for name, kept in list(self._kept.items()):
            if kept.request:
                self._certify(name, kept)
        waiting = [name for name, kept in self._kept.items() if not kept.node and now_s - kept.since_s > PENDING_S]
        if waiting and not self._is_told:
            who = f"{waiting[0]} waits" if len(waiting) == 1 else f"{waiting[0]} and {len(waiting) - 1} more wait"
            self._tell(f"{who} for a place on a node of Ray: {self._needs(waiting[0])}")
        self._is_told = bool(waiting)

    def _kill(self, kept: _RayProcess) -> None:
        kept.is_killed = True
        self._let_go(kept.actor)

    def _let_go(self, actor: Any) -> None:
        """End an actor; without its handle it would live on while it serves a call."""
        self._ray.kill(actor)
        if self._lost:  # Ray kills through its head
            self._leaving.append(actor.leave.remote())

    def _still_leaving(self) -> bool:
        return bool(self._leaving and self._ray.wait(self._leaving, num_returns=len(self._leaving), timeout=0)[1])

    def _take_news(self, name: str, answer: Any, now_s: float) -> None:
        """Handle a process's news, or the failure of its actor."""
        kept, errors = self._kept[name], self._ray.exceptions
        kept.news = None
        try:
            news = News(**json.loads(self._ray.get(answer)))
        except errors.ActorUnavailableError:
            if kept.is_killed and self._lost:
                self._end(name, -signal.SIGKILL, "killed by SIGKILL")
            else:  # not an end: a paused or disconnected node may come back
                kept.again_s = now_s + AGAIN_S
        except errors.RuntimeEnvSetupError as error:
            self._end(name, ExitCode.CONFIGURATION, f"runtime_env: {last_line(error)}")
        except errors.ActorDiedError as error:
            why = "" if kept.is_killed else f": its node or its actor of Ray is gone ({last_line(error)})"
            self._end(name, -signal.SIGKILL, f"killed by SIGKILL{why}")
        except errors.RayError as error:
            self._end(name, ExitCode.FAILED, f"its actor on a node of Ray failed: {last_line(error)}")
        else:
            kept.node, kept.offset = news.node, news.offset
            self._write(name, news.output)
            if news.request:
                kept.request, kept.host = news.request, news.host
            if news.exit_code is None:
                kept.news = kept.actor.news.remote(kept.offset)
            else:
                self._end(name, news.exit_code, news.reason)

    def _certify(self, name: str, kept: _RayProcess) -> None:
        """Answer a process's certificate request, for its name and its node's address."""
        known = self._addresses.get(kept.node)
        if self._signer is None or (known is None and not self._host):
            return  # a later poll has a new node's address
        try:
            host = known if known and not self._host else checked_address(kept.host) if kept.host else ""
            answer = self._signer.answer(kept.request, [identity_of(name)], [host] if host else [])
        except ParashardError as error:
            self._end(name, ExitCode.FAILED, f"its request for a certificate is refused: {error}")
        else:
            kept.request = ""
            kept.actor.take_certificate.remote(json.dumps(answer))

    def _end(self, name: str, exit_code: int, reason: str) -> None:
        """Drop a process, and let `reap` return its end."""
        kept = self._kept.pop(name, None)
        if kept is not None and not kept.is_killed:
            self._let_go(kept.actor)
        self._numbers += 1
        self._ended.append(Ended(name, exit_code, reason, self._numbers))

    def _write(self, name: str, output: str) -> None:
        """Append to a process's log in the run's folder; Ray's log folder on its node has it, too."""
        try:
            with (self._logs / f"{name}.log").open("a", encoding="utf-8") as log:
                log.write(output)
        except OSError as error:
            self._log_files.failed(why_failed(error))
        else:
            self._log_files.succeeded()

    def _told(self, text: str, over: bool) -> None:
        self._tell(text if over else f"warning: {text}")

    def _watch_head(self) -> None:
        patience_s = head_patience_s(os.environ)
        while not self._lost and not self._over.wait(HEAD_LOOK_S):
            self._ask_head()
            if self._is_away and not self._lost:
                self._lost = why_lost(self._answered_s, self._clock.now_s(), patience_s)

    def _ask_head(self) -> None:
        """Poll Ray's head for draining nodes and nodes' addresses; without an answer keep the last ones."""
        try:
            self._draining = draining_nodes()
            if self._signer is not None:
                self._addresses = node_addresses()
        except self._ray.exceptions.AuthenticationError:
            self._lost = ANOTHER_HEAD
        except Exception:  # noqa: BLE001  # Ray raises errors of any class
            self._is_away = True
        else:
            self._is_away, self._answered_s = False, self._clock.now_s()

    def _remove_group(self) -> None:
        """Remove the placement group, and wait until it is gone or `end` stops waiting."""
        if self._group is None or self._lost:
            return
        with suppress(self._ray.exceptions.RayError):
            self._ray.util.remove_placement_group(self._group)
            table = self._ray.util.placement_group_table
            while table(self._group)["state"] != "REMOVED" and not self._over.wait(POLL_S):
                pass


def identity_of(name: str) -> Identity:
    """Return the identity of a process, such as worker-0."""
    return Identity(Role.WORKER if name.startswith("worker") else Role.SHARD, name)


def _variables(run: Run) -> dict[str, str]:
    """Return a worker's environment variables; Ray sets its number of threads, unless the job does."""
    options, names = run.job.cluster, [HASH_SEED]
    if options.worker_threads or run.job.consistency.policy.kind == "sync":
        names += THREAD_VARIABLES
    found = child_variables(run.job, {}, jax=False)[MODULES["worker"]]
    return {name: os.environ.get(name, found[name]) if name == HASH_SEED else found[name] for name in names}
