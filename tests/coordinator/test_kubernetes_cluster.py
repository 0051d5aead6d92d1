"""KubernetesCluster: the official client against an API server of ours; its errors come out as ours."""

from collections.abc import Iterator

import pytest

from parashard.errors import ConfigurationError, RetryLater, Unreachable
from parashard_coordinator.core.supervision import Pod
from parashard_coordinator.pods import (
    SAID_CHARACTERS_MAX,
    Conflict,
    KubernetesCluster,
    StaleList,
    Unreadable,
    open_cluster,
)
from support.fake_api_server import JOB, NAMESPACE, FakeApiServer

kubernetes = pytest.importorskip("kubernetes", reason="needs the extra kubernetes")


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    fake = FakeApiServer()
    yield fake
    fake.close()


@pytest.fixture
def cluster(server) -> KubernetesCluster:
    configuration = kubernetes.client.Configuration(host=server.url)
    configuration.retries = False
    return KubernetesCluster(kubernetes.client.ApiClient(configuration), NAMESPACE, JOB)


def terminated(exit_code: int) -> dict:
    return {"terminated": {"exitCode": exit_code}}


def test_a_list_is_of_the_jobs_shards_and_workers(server, cluster):
    server.put("digits-worker-0-abcde", phase="Running")
    pods, version = cluster.list_pods()
    assert pods == [Pod("uid-digits-worker-0-abcde", "digits-worker-0-abcde", "worker", "Running")]
    assert version == "2"
    assert server.seen[-1] == "list app.kubernetes.io/instance=digits,app.kubernetes.io/component in (shard,worker)"


def test_a_pod_is_read_with_its_ends_and_its_disruption(server, cluster):
    server.put(
        "digits-shard-0",
        role="shard",
        phase="Failed",
        conditions=[
            {"type": "Ready", "status": "False"},
            {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"},
        ],
        containerStatuses=[
            {
                "name": "shard",
                "image": "parashard",
                "imageID": "",
                "ready": False,
                "restartCount": 2,
                "state": terminated(75),
                "lastState": terminated(137),
            }
        ],
    )
    ((pod,), _) = cluster.list_pods()
    assert pod == Pod("uid-digits-shard-0", "digits-shard-0", "shard", "Failed", 75, 2, 137, "PreemptionByScheduler")


def test_a_watch_goes_on_from_the_list(server, cluster):
    server.put("digits-worker-0", phase="Running")
    _, version = cluster.list_pods()
    server.put("digits-worker-0", phase="Failed")
    server.delete("digits-worker-0")
    watch = cluster.watch_pods(version)
    assert [(kind, pod.phase, at) for kind, pod, at in (next(watch), next(watch))] == [
        ("MODIFIED", "Failed", "3"),
        ("DELETED", "Failed", "4"),
    ]


def test_410_as_a_status_says_that_the_list_is_stale(server, cluster):
    server.forget()
    with pytest.raises(StaleList):
        next(cluster.watch_pods("1"))


def test_410_as_an_event_does_so_too(server, cluster):
    _, version = cluster.list_pods()
    server.put("digits-worker-0", phase="Running")
    watch = cluster.watch_pods(version)
    next(watch)
    server.wait_for_watch()
    server.forget()
    with pytest.raises(StaleList):
        next(watch)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_is_not_well_is_asked_again_later(server, cluster, status):
    server.answers.append(status)
    with pytest.raises(RetryLater, match=f"cannot list the pods of team: the API server answered {status}"):
        cluster.list_pods()


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_is_not_allowed_is_reported(server, cluster, status):
    server.answers.append(status)
    with pytest.raises(ConfigurationError, match=f"cannot scale the Job team/digits-worker: .* answered {status}"):
        cluster.scale_workers(3)


def test_a_server_that_hangs_up_is_unreachable(server, cluster):
    server.answers.append(0)
    with pytest.raises(Unreachable, match="the API server does not answer"):
        cluster.list_pods()


def test_the_clients_decoding_errors_are_bounded_texts(server, cluster):
    server.lines.append(b'{"type": "' + b"x" * 10_000 + b'"}')
    with pytest.raises(Unreadable, match="cannot watch the pods of team: the client cannot read the answer: KeyError"):
        next(cluster.watch_pods("1"))
    server.lines.append(
        b'{"type": "ERROR", "object": {"code": "1", "reason": "r", "message": "' + b"x" * 10_000 + b'"}}'
    )
    with pytest.raises(Unreadable) as raised:
        next(cluster.watch_pods("1"))
    assert len(str(raised.value)) <= SAID_CHARACTERS_MAX


def test_a_pod_that_the_client_does_not_understand_is_no_crash(server, cluster):
    server.put("digits-worker-0", phase="Running", conditions=[{"type": "Ready"}])
    with pytest.raises(Unreadable, match="cannot list the pods of team: the client cannot read the answer: ValueError"):
        cluster.list_pods()


@pytest.mark.parametrize(("workers", "numbers"), [(5, (5, 5)), (0, (0, 2))])
def test_scaling_changes_both_numbers_unless_to_0_which_would_complete_the_job(server, cluster, workers, numbers):
    cluster.scale_workers(workers)
    assert (server.job["spec"]["parallelism"], server.job["spec"]["completions"]) == numbers


def test_a_job_that_changed_meanwhile_is_a_conflict(server, cluster):
    server.conflicts = 1
    with pytest.raises(Conflict):
        cluster.scale_workers(5)
    assert server.job["spec"]["parallelism"] == 2


@pytest.mark.parametrize(("workers", "completions"), [(2, 2), (0, 2)])
def test_a_job_that_has_the_number_already_is_left_as_it_is(server, cluster, workers, completions):
    server.job["spec"].update(parallelism=workers, completions=completions)
    cluster.scale_workers(workers)
    assert "patch" not in server.seen


def test_a_job_whose_two_numbers_differ_gets_both(server, cluster):
    server.job["spec"].update(parallelism=0, completions=4)  # paused
    cluster.scale_workers(4)
    server.job["spec"].update(parallelism=4, completions=2)
    cluster.scale_workers(4)
    assert (server.job["spec"]["parallelism"], server.job["spec"]["completions"]) == (4, 4)
    assert server.count("patch") == 2


def test_a_job_that_is_over_is_not_scaled(server, cluster):
    server.job["status"]["conditions"] = [{"type": "Complete", "status": "True"}]
    with pytest.raises(ConfigurationError, match="the Job team/digits-worker is over"):
        cluster.scale_workers(5)


def test_a_job_whose_pods_cannot_be_found_is_a_mistake_in_the_manifests(server, cluster):
    server.job["spec"]["template"]["metadata"]["labels"] = {"app": "mine"}
    with pytest.raises(ConfigurationError, match=r"no label app.kubernetes.io/instance"):
        cluster.list_pods()


def test_a_process_outside_a_cluster_is_told_so(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigurationError, match='launcher = "kubernetes", and this process is no pod'):
        open_cluster(JOB)
