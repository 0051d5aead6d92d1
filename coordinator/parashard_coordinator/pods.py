"""The pods of a job on Kubernetes: list, watch and scale them, on two threads of their own.

`KubernetesCluster` owns the official client, its models, and the mapping of its errors to ours: `RetryLater` where a
retry helps, `StaleList` where the resource version is too old to watch from, `Unreadable` for an invalid answer,
`ConfigurationError` where the cluster does not allow it. `PodWatch` owns the retries: with back-off after an error,
with a new list after 410 Gone or an unreadable answer, at once and a bounded number of times after a conflict, with a
long back-off or on a new request after a refused scaling. `parashard_coordinator.core.supervision` classifies a pod's
end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from parashard.errors import ConfigurationError, ParashardError, RetryLater, Unreachable
from parashard.process.backoff import backoff_s
from parashard.process.extras import install
from parashard.process.logs import log
from parashard_coordinator.core.supervision import Pod, PodEnd, PodLedger

INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
REQUEST_S = 10.0
WATCH_S = 30.0
"""Duration of a watch before it is renewed, which bounds an undetected silence of the server."""
SAID_CHARACTERS_MAX = 200
"""Length of an answer quoted in an error: it may be a whole page of a proxy."""


class StaleList(Exception):
    """410 Gone: the changes since the list are no longer available; list again."""


class Conflict(Exception):
    """409: a concurrent change of the object; read it again."""


class Unreadable(Exception):
    """The answer cannot be parsed, such as a proxy's error page; the outcome of the request is unknown."""


class KubernetesCluster:
    """The API server, for one job's objects."""

    def __init__(self, api_client: Any, namespace: str, job: str) -> None:
        from kubernetes import client, watch

        self._core = client.CoreV1Api(api_client)
        self._batch = client.BatchV1Api(api_client)
        self._new_watch = watch.Watch
        self._namespace = namespace
        self._job = job
        self._selector = ""

    def list_pods(self) -> tuple[list[Pod], str]:
        """Return all pods of the job's shards and workers, and the version of that list."""
        with _our_errors(f"list the pods of {self._namespace}"):
            listed = self._core.list_namespaced_pod(
                self._namespace, label_selector=self._label_selector(), _request_timeout=REQUEST_S
            )
            return [pod_of(item) for item in listed.items], listed.metadata.resource_version

    def watch_pods(self, version: str) -> Iterator[tuple[str, Pod, str]]:
        """Yield the changes since a version, until the server ends the watch, at the latest after `WATCH_S`."""
        with _our_errors(f"watch the pods of {self._namespace}"):
            # With a server-side timeout the client does not retry by itself: the caller does.
            for event in self._new_watch().stream(
                self._core.list_namespaced_pod,
                self._namespace,
                label_selector=self._label_selector(),
                resource_version=version,
                timeout_seconds=int(WATCH_S),
                _request_timeout=(REQUEST_S, WATCH_S + REQUEST_S),
            ):
                pod = event["object"]
                yield event["type"], pod_of(pod), pod.metadata.resource_version

    def scale_workers(self, workers: int) -> None:
        """Set the number of workers: `parallelism` and `completions`, which must be equal for either to change."""
        # With 0 only `parallelism` changes, which pauses the Job: without completions it would be complete. Nothing is
        # written if the Job has that number already.
        with _our_errors(f"scale the Job {self._namespace}/{self._job}"):
            job = self._read_job()
            spec = {"parallelism": workers} if workers == 0 else {"parallelism": workers, "completions": workers}
            if all(getattr(job.spec, name) == number for name, number in spec.items()):
                return
            if any(c.type in ("Complete", "Failed") and c.status == "True" for c in job.status.conditions or ()):
                raise ConfigurationError(f"the Job {self._namespace}/{self._job} is over: it cannot be scaled")
            self._batch.patch_namespaced_job(
                self._job,
                self._namespace,
                {"metadata": {"resourceVersion": job.metadata.resource_version}, "spec": spec},
                _request_timeout=REQUEST_S,
            )

    def _label_selector(self) -> str:
        """Return the label selector of the job's pods."""
        if not self._selector:
            instance = (self._read_job().spec.template.metadata.labels or {}).get(INSTANCE)
            if not instance:
                raise ConfigurationError(
                    f"the Job {self._namespace}/{self._job}: its pods have no label {INSTANCE} to be found by"
                )
            self._selector = f"{INSTANCE}={instance},{COMPONENT} in (shard,worker)"
        return self._selector

    def _read_job(self) -> Any:
        return self._batch.read_namespaced_job(self._job, self._namespace, _request_timeout=REQUEST_S)


def open_cluster(job: str) -> KubernetesCluster:
    """Return the cluster of this process's pod."""
    try:
        from kubernetes import client, config
    except ModuleNotFoundError:
        raise ConfigurationError(
            f'cluster.launcher = "kubernetes" needs the Kubernetes client: {install("kubernetes")}'
        ) from None
    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
        namespace = NAMESPACE_FILE.read_text().strip()
    except (config.ConfigException, OSError) as error:
        raise ConfigurationError(
            f'cluster.launcher = "kubernetes", and this process is no pod that may ask the API: {error}'
        ) from None
    configuration.retries = False  # the caller retries
    return KubernetesCluster(client.ApiClient(configuration), namespace, job)


def pod_of(item: Any) -> Pod:
    """Convert a pod of the client's model."""
    status = item.status
    container = next(iter(status.container_statuses or ()), None)
    ended = container.state.terminated if container and container.state else None
    before = container.last_state.terminated if container and container.last_state else None
    disruption = next((c for c in status.conditions or () if c.type == "DisruptionTarget" and c.status == "True"), None)
    return Pod(
        uid=item.metadata.uid,
        name=item.metadata.name,
        role=(item.metadata.labels or {}).get(COMPONENT, ""),
        phase=status.phase or "",
        exit_code=ended.exit_code if ended else None,
        restarts=container.restart_count if container else 0,
        last_exit_code=before.exit_code if before else None,
        disruption=(disruption.reason or "DisruptionTarget") if disruption else "",
    )


@contextmanager
def _our_errors(what: str) -> Iterator[None]:
    """Map the Kubernetes client's errors to parashard's."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        if error.status == 410:
            raise StaleList from None
        if error.status == 409:
            raise Conflict from None
        said = f"cannot {what}: the API server answered {error.status} {error.reason}"[:SAID_CHARACTERS_MAX]
        if not isinstance(error.status, int):  # a watch's event may have any content
            raise Unreadable(said) from None
        if error.status == 429 or error.status >= 500:
            raise RetryLater(said) from None
        raise ConfigurationError(said) from None
    except HTTPError as error:
        raise Unreachable(f"cannot {what}: the API server does not answer: {type(error).__name__}") from None
    except ParashardError:
        raise
    except Exception as error:
        # The client does not validate answers, and raises various errors for invalid ones.
        said = f"{type(error).__name__}: {error}"[:SAID_CHARACTERS_MAX]
        raise Unreadable(f"cannot {what}: the client cannot read the answer: {said}") from error


PAUSE_S = 0.5  # after the second error in a row; doubles
REST_S = 0.1  # before the next watch: a server may end each at once
LOOK_S = 0.5  # interval of checks of the wanted number of workers
CONFLICTS_MAX = 10
REFUSED_LOOKS = 10  # checks until a refused scaling is retried; doubles
REFUSED_LOOKS_MAX = 640  # 5 minutes and 20 seconds


class Wanted(NamedTuple):
    """The wanted number of workers, and the number of its request: a repeated request has a new one."""

    workers: int
    request: int


class PodWatch:
    """Watches pods, and scales.

    `on_end` is called with every end of a pod, `on_scaled` with the outcome of each scaling. Nothing is changed while
    the manifests' number of workers is wanted and no request to scale was made.
    """

    def __init__(
        self,
        cluster: KubernetesCluster,
        on_end: Callable[[PodEnd], None],
        wanted: Callable[[], Wanted],
        on_scaled: Callable[[str], None],
        on_error: Callable[[], None],
        workers: int,
        *,
        pause_s: float = PAUSE_S,
        look_s: float = LOOK_S,
    ) -> None:
        self._cluster = cluster
        self._on_end = on_end
        self._wanted = wanted
        self._on_scaled = on_scaled
        self._on_error = on_error
        self._settled = Wanted(workers, 0)
        self._pause_s = pause_s
        self._look_s = look_s
        self._ledger = PodLedger()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._follow, name="pods", daemon=True),
            threading.Thread(target=self._keep_scaled, name="scale", daemon=True),
        ]

    def start(self) -> None:
        """Start both threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ask both threads to end; a watch in progress is abandoned, and ends with the process."""
        self._stopping.set()

    # --- following ---

    def _follow(self) -> None:
        version, errors, unreadable = "", 0, 0
        while not self._stopping.is_set():
            try:
                if not version:
                    pods, version = self._cluster.list_pods()
                    self._tell(self._ledger.listed(pods))
                for kind, pod, newer in self._cluster.watch_pods(version):
                    self._tell(self._ledger.deleted(pod) if kind == "DELETED" else self._ledger.changed(pod))
                    version, errors = newer, 0
                errors, unreadable = 0, 0
            except StaleList:
                log.info("listing-again", why="the list is too old to go on from")
                version, errors = "", errors + 1
            except Unreadable as error:
                # Only a watch that ended regularly resets the back-off, not events before an error.
                version, unreadable = "", unreadable + 1
                self._on_error()
                if unreadable.bit_count() == 1:  # log the 1st, 2nd, 4th, 8th, ...: it may last for days
                    log.warning("pods-not-watched", error=str(error), times=unreadable, then="they are listed again")
            except (RetryLater, ConfigurationError) as error:
                # A missing permission may be granted later.
                errors += 1
                self._on_error()
                log.warning("pods-not-watched", error=str(error), times=errors)
            # An unreadable answer is followed by a pause at once.
            pause_s = max(backoff_s(self._pause_s, errors), backoff_s(self._pause_s, unreadable and unreadable + 1))
            self._stopping.wait(REST_S + pause_s)

    def _tell(self, ends: list[PodEnd]) -> None:
        for end in ends:
            self._on_end(end)

    # --- scaling ---

    def _keep_scaled(self) -> None:
        errors = 0
        refused: Wanted | None = None
        looks = looks_left = 0  # checks between retries of a refused scaling; until the next one
        while not self._stopping.wait(self._look_s + backoff_s(self._pause_s, errors)):
            wanted = self._wanted()
            if wanted == self._settled:
                continue
            if wanted == refused and looks_left:
                looks_left -= 1
                continue
            try:
                self._scale(wanted.workers)
            except (RetryLater, Unreadable) as error:
                errors += 1
                log.warning("not-scaled", workers=wanted.workers, error=str(error), times=errors)
            except ConfigurationError as error:
                # The Role may be changed, or the user may repeat the request.
                if wanted != refused:
                    refused, looks = wanted, REFUSED_LOOKS // 2
                    self._on_scaled(f"not scaled: {error}")
                looks = looks_left = min(2 * looks, REFUSED_LOOKS_MAX)
                errors = 0
                log.warning("not-scaled", workers=wanted.workers, error=str(error))
            else:
                self._on_scaled(f"the Job has {wanted.workers} workers now")
                self._settled, refused, errors = wanted, None, 0

    def _scale(self, workers: int) -> None:
        for _ in range(CONFLICTS_MAX):
            try:
                return self._cluster.scale_workers(workers)
            except Conflict:
                continue
        raise RetryLater(f"the Job was changed concurrently {CONFLICTS_MAX} times")
