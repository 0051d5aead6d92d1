"""RayCluster: shards and workers of a run on a Ray cluster, each the child of an actor (`ray_keeper`).

Ray places them and says which nodes end; it restarts nothing (`max_restarts=0`), for the coordinator decides. Shards
have the bundles of a placement group that is spread over nodes. A worker is placed by itself: without room it stays
pending, which an autoscaler sees. Actors and the group belong to the driver: Ray ends them with it.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from parashard.errors import ConfigurationError, ParashardError
from parashard.figures import counted
from parashard.launch.local_cluster import MODULES
from parashard.launch.ray_keeper import News, Order, RayKeeper
from parashard.launch.ray_settings import Ray, as_options, in_words
from parashard.launch.runs import HASH_SEED, Run, child_variables, signer_of
from parashard.launch.starting import END_GRACE_S, POLL_S, Ended, end_in_turn, write_probe
from parashard.process.addresses import checked_address, is_loopback, own_host, split_address
from parashard.process.best_effort import BestEffort, why_failed
from parashard.process.extras import install
from parashard.process.resources import THREAD_VARIABLES
from parashard.process.run_files import LOGS
from parashard.process.shell import ExitCode
from parashard.security.given_credentials import check_host
from parashard.security.identity import Identity, Role
from parashard.store import open_store

NODES_LOOK_S = 1.0
"""Between two questions which nodes there are, and which are drained."""
AGAIN_S = 1.0
"""Before an actor that could not be reached is asked again."""
GONE_S = 10.0
"""How long Ray may take to end killed actors and to remove a placement group."""
PENDING_S = 10.0
"""How long a process has no place before a person hears of it."""
DIAL_S = 5.0
"""For a head to accept a connection."""
SHARED = "set checkpoint.url to an object store, or to a folder that all nodes have"
CALLS_MAX = 8
"""Calls that an actor serves at once: one waits for news, others may be left over from when it could not be reached."""


class _Kept:
    """A process: the actor that keeps it, and the call that waits for its news."""

    def __init__(self, actor: Any, now_s: float) -> None:
        self.actor = actor
        self.since_s = now_s
        self.node = ""
        """Where it is; "": it has no place yet."""
        self.offset = -1
        """Of the next byte of its log; -1: nothing is known of it."""
        self.news: Any = actor.news.remote(self.offset)
        self.again_s = math.inf
        """When to ask for news again."""
        self.is_asked = self.is_killed = False
        self.request = self.host = ""
        """For a certificate, not answered yet; and where it says that it listens."""


class RayCluster:
    """The shards and workers of one run: a `Starter`."""

    def __init__(self, run: Run, settings: Ray, tell: Callable[[str], None]) -> None:
        self._ray = ray = imported()
        self._run, self._settings, self._tell = run, settings, tell
        self._kept: dict[str, _Kept] = {}
        self._ended: list[Ended] = []
        self._numbers = 0
        self._is_ours = connect(ray, settings.address, settings.runtime_env)
        options = run.job.cluster
        host = own_host(options.listens_on)
        self.reached_at = str(ray.util.get_node_ip_address()) if is_loopback(host) else host
        check_host(self.reached_at, options.insecure, run.credentials)
        if run.credentials is not None:
            run.credentials.check_host(self.reached_at)
        self._signer = signer_of(run)
        self._host = options.listens_on if options.interface or options.host == "auto" else ""
        self._logs, self._log_files = run.folder / LOGS, BestEffort("log files", self._told)
        self._variables = _variables(run)
        self._probe = write_probe(run.store_url, run.folder)
        self._group: Any = None
        self._is_told = False  # a person has heard of processes without a place
        self._draining: Mapping[str, float] = {}
        self._addresses: Mapping[str, str] = {}
        self._over = threading.Event()
        self._look_at_nodes()
        threading.Thread(target=self._watch_nodes, name="ray-nodes", daemon=True).start()

    @property
    def running(self) -> list[str]:
        """Names of the processes that have been started and not been reaped, placed or not."""
        return list(self._kept)

    def start(self, name: str, module: str, arguments: Sequence[str]) -> None:
        """Have Ray place an actor that starts the process, now or when there is room."""
        assert name not in self._kept, f"{name} runs already"
        is_worker, script = name.startswith("worker"), self._run.script
        order = Order(
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
        # Ray takes a working_dir of this machine only for all that a driver has.
        environment = {} if self._is_ours else dict(self._settings.runtime_env or {})
        try:
            options = self._worker_options() if is_worker else self._shard_options(int(name.rpartition("-")[2]))
            remote = self._ray.remote(RayKeeper).options(
                max_restarts=0, max_task_retries=0, max_concurrency=CALLS_MAX, runtime_env=environment, **options
            )
            self._kept[name] = _Kept(remote.remote(json.dumps(order._asdict())), time.monotonic())
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"ps.Ray: {error}") from None
        except self._ray.exceptions.RayError as error:
            self._end(name, ExitCode.IO_ERROR, f"Ray cannot start it: {error}")

    def reap(self) -> list[Ended]:
        """Return the processes that have ended since the last call; write to the run's logs what was printed."""
        self._look()
        ended, self._ended = self._ended, []
        return ended

    def coming_ends(self) -> Mapping[str, float]:
        """Return the processes on nodes that are drained, and by when these end."""
        return {name: self._draining[kept.node] for name, kept in self._kept.items() if kept.node in self._draining}

    def ask_to_end(self, name: str) -> None:
        """Send SIGTERM to a process if it is running, or give up its place if it has none yet."""
        self._look()
        kept = self._kept.get(name)
        if kept is not None and kept.node:
            kept.is_asked = True
            kept.actor.ask_to_end.remote()
        elif kept is not None:
            self._kill(kept)

    def kill(self, name: str) -> None:
        """Kill a process with its actor if it is running; one without a place is not silent, and goes on waiting."""
        self._look()
        kept = self._kept.get(name)
        if kept is not None and kept.node:
            self._kill(kept)

    def end(self, grace_s: float = END_GRACE_S) -> None:
        """End every process, workers first; remove actors and the placement group."""
        if self._over.is_set():
            return
        try:
            self._end_all(grace_s)
        except self._ray.exceptions.RayError as error:  # such as a head that is gone, and what it has kept with it
            self._tell(f"warning: Ray does not say whether its processes have ended: {_last_line(error)}")
        self._over.set()
        with suppress(ParashardError):
            open_store(self._run.store_url).delete(self._probe)
        if self._is_ours:
            self._ray.shutdown()

    def _end_all(self, grace_s: float) -> None:
        end_in_turn(self, grace_s)
        for kept in self._kept.values():
            self._kill(kept)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        until_s = time.monotonic() + GONE_S
        while (self._kept or not self._is_removed()) and time.monotonic() < until_s:
            self.reap()
            time.sleep(POLL_S)

    # --- placing ---

    def _shard_options(self, shard: int) -> dict[str, Any]:
        """Return the options of a shard, which has its bundle, but where that is on a node that is about to go."""
        util, bundle = self._ray.util, self._settings.of_shard(self._run.job.cluster)
        if self._group is None:
            self._group = util.placement_group([bundle] * self._run.job.cluster.shards, strategy="SPREAD")
        at = util.placement_group_table(self._group)["bundles_to_node_id"].get(shard, "")
        strategy: Any = "SPREAD"
        if at not in self._draining:
            strategy = util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, shard)
        return {**as_options(bundle), "scheduling_strategy": strategy}

    def _worker_options(self) -> dict[str, Any]:
        options = as_options(self._settings.of_worker(self._run.job.cluster))
        labels = self._settings.worker_labels
        return {**options, "label_selector": dict(labels)} if labels else options

    def _needs(self, name: str) -> str:
        """Return in words what a process waits for."""
        cluster, settings = self._run.job.cluster, self._settings
        if name.startswith("worker"):
            return in_words({**settings.of_worker(cluster), **(settings.worker_labels or {})})
        return f"each of {counted(cluster.shards, 'shard')} {in_words(settings.of_shard(cluster))}, all at once"

    # --- what Ray tells ---

    def _look(self) -> None:
        """Take what has come of all processes, without a wait: one can crash where Ray goes away meanwhile."""
        now_s = time.monotonic()
        calls = {kept.news: name for name, kept in self._kept.items() if kept.news is not None}
        if calls:
            for answer in self._ray.wait(list(calls), num_returns=len(calls), timeout=0)[0]:
                self._hear(calls[answer], answer, now_s)
        for kept in self._kept.values():
            if now_s >= kept.again_s:
                kept.news, kept.again_s = kept.actor.news.remote(kept.offset), math.inf
                if kept.is_asked:  # which may not have come
                    kept.actor.ask_to_end.remote()
        for name, kept in list(self._kept.items()):
            if kept.request:
                self._certify(name, kept)
        waiting = [name for name, kept in self._kept.items() if not kept.node and now_s - kept.since_s > PENDING_S]
        if waiting and not self._is_told:
            who = f"{waiting[0]} waits" if len(waiting) == 1 else f"{waiting[0]} and {len(waiting) - 1} more wait"
            self._tell(f"{who} for a place on a node of Ray: {self._needs(waiting[0])}")
        self._is_told = bool(waiting)

    def _kill(self, kept: _Kept) -> None:
        kept.is_killed = True
        self._ray.kill(kept.actor)

    def _hear(self, name: str, answer: Any, now_s: float) -> None:
        """Take a process's news, or that there are no more."""
        kept, errors = self._kept[name], self._ray.exceptions
        kept.news = None
        try:
            news = News(**json.loads(self._ray.get(answer)))
        except errors.ActorUnavailableError:  # no end: a node that stands still, or is cut off, may come back
            kept.again_s = now_s + AGAIN_S
        except errors.RuntimeEnvSetupError as error:
            self._end(name, ExitCode.CONFIGURATION, f"runtime_env: {_last_line(error)}")
        except errors.ActorDiedError as error:
            why = "" if kept.is_killed else f": its node or its actor of Ray is gone ({_last_line(error)})"
            self._end(name, -signal.SIGKILL, f"killed by SIGKILL{why}")
        except errors.RayError as error:
            self._end(name, ExitCode.FAILED, f"its actor on a node of Ray failed: {_last_line(error)}")
        else:
            kept.node, kept.offset = news.node, news.offset
            self._write(name, news.output)
            if news.request:
                kept.request, kept.host = news.request, news.host
            if news.exit_code is None:
                kept.news = kept.actor.news.remote(kept.offset)
            else:
                self._end(name, news.exit_code, news.reason)

    def _certify(self, name: str, kept: _Kept) -> None:
        """Answer a process that asks for a certificate, which is for its name and its node's address."""
        known = self._addresses.get(kept.node)
        if self._signer is None or (known is None and not self._host):
            return  # Ray soon says which address a new node has
        try:
            host = known if known and not self._host else checked_address(kept.host) if kept.host else ""
            answer = self._signer.answer(kept.request, [identity_of(name)], [host] if host else [])
        except ParashardError as error:
            self._end(name, ExitCode.FAILED, f"its request for a certificate is refused: {error}")
        else:
            kept.request = ""
            kept.actor.take_certificate.remote(json.dumps(answer))

    def _end(self, name: str, exit_code: int, reason: str) -> None:
        """Take a process off, and have `reap` return its end; without its handle an actor would live on."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            self._ray.kill(kept.actor)
        self._numbers += 1
        self._ended.append(Ended(name, exit_code, reason, self._numbers))

    def _write(self, name: str, output: str) -> None:
        """Append to the log of a process in the run's folder; Ray's own folder on its node has it, too."""
        try:
            with (self._logs / f"{name}.log").open("a", encoding="utf-8") as log:
                log.write(output)
        except OSError as error:
            self._log_files.failed(why_failed(error))
        else:
            self._log_files.succeeded()

    def _told(self, text: str, over: bool) -> None:
        self._tell(text if over else f"warning: {text}")

    def _watch_nodes(self) -> None:
        while not self._over.wait(NODES_LOOK_S):
            self._look_at_nodes()

    def _look_at_nodes(self) -> None:
        with suppress(Exception):  # Ray's own errors of any kind while its head is away: what was known stays
            self._draining = draining_nodes(self._ray)
            self._addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}

    def _is_removed(self) -> bool:
        """Tell whether nothing of the placement group is left."""
        if self._group is None:
            return True
        return bool(self._ray.util.placement_group_table(self._group)["state"] == "REMOVED")


def identity_of(name: str) -> Identity:
    """Return what a process is, such as worker-0."""
    return Identity(Role.WORKER if name.startswith("worker") else Role.SHARD, name)


def imported() -> Any:
    """Return Ray; ConfigurationError where it cannot be imported."""
    try:
        importlib.import_module("ray.util.scheduling_strategies")
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigurationError(f'cluster.launcher = "ray" needs Ray ({error}): {install("ray")}') from None


def connect(ray: Any, address: str | None, runtime_env: Mapping[str, Any] | None = None) -> bool:
    """Connect this process to a cluster of Ray, unless the program has; return whether this did.

    All that Ray runs for it has the runtime environment, then.

    Raises ConfigurationError if there is none, or if this process is on none of its nodes.
    """
    if ray.is_initialized():
        remote = ray.util.client.ray.is_connected()
    else:
        remote = (address or os.environ.get("RAY_ADDRESS", "")).startswith("ray://")
    if remote:
        raise ConfigurationError(
            "Ray's client (ray://) connects from outside of the cluster, and the coordinator runs here, where workers "
            "must reach it; start this on a node of the cluster, or by `ray job submit`"
        )
    if ray.is_initialized():
        return False
    _dial(address or os.environ.get("RAY_ADDRESS", ""))
    try:
        environment = {"runtime_env": dict(runtime_env)} if runtime_env else {}
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **environment)
    except (ConnectionError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigurationError(f"Ray at {address or 'its own address'}: {_last_line(error)}") from None
    return True


def _dial(address: str) -> None:
    """Raise ConfigurationError if nothing listens at HOST:PORT: Ray would look for it for minutes."""
    if ":" not in address or "/" in address:  # such as auto, or none
        return
    try:
        socket.create_connection(split_address(address), DIAL_S).close()
    except OSError as error:
        raise ConfigurationError(
            f"Ray at {address}: {error.strerror or error}; `ray start --head` prints the address of a cluster"
        ) from None


def draining_nodes(ray: Any) -> dict[str, float]:
    """Return the nodes that are drained, and when they end, as `time.monotonic` counts.

    The call is private to Ray, which has no public one that says so.
    """
    module = importlib.import_module("ray._private.state")
    nodes: Mapping[str, int] = module.state.get_draining_nodes()
    since_s = time.monotonic() - time.time()
    return {node: at_ms / 1000.0 + since_s if at_ms else math.inf for node, at_ms in nodes.items()}


def _variables(run: Run) -> dict[str, str]:
    """Return the variables of a worker; Ray says how many threads it has, unless the job does."""
    options, names = run.job.cluster, [HASH_SEED]
    if options.worker_threads or run.job.consistency.policy.kind == "sync":
        names += THREAD_VARIABLES
    found = child_variables(run.job, {}, jax=False)[MODULES["worker"]]
    return {name: os.environ.get(name, found[name]) if name == HASH_SEED else found[name] for name in names}


def _last_line(error: BaseException) -> str:
    """Return the cause in an error of Ray's, which may have twenty lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
