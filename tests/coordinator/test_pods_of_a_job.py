"""A coordinator on Kubernetes, from `parashard scale` to the Job, and from a pod's end to the metrics."""

import pytest

from parashard_coordinator.__main__ import watch_pods
from parashard_coordinator.endpoints.status import coordinator_families
from parashard_coordinator.pods import KubernetesCluster
from support.coordinator_cases import core_of
from support.fake_api_server import JOB, NAMESPACE, FakeApiServer
from support.served_core import served
from support.waiting import eventually

kubernetes = pytest.importorskip("kubernetes", reason="needs the extra kubernetes")


def test_scaling_reaches_the_job_and_a_preemption_and_an_error_the_metrics():
    server = FakeApiServer()
    configuration = kubernetes.client.Configuration(host=server.url)
    configuration.retries = False
    cluster = KubernetesCluster(kubernetes.client.ApiClient(configuration), NAMESPACE, JOB)
    server.lines.append(b"upstream connect error")
    core = core_of()
    try:
        with served(core) as it:
            watch = watch_pods(cluster, it.exclusive, core.job.workers_wanted)
            watch.start()
            server.put("w-0", phase="Running")
            server.wait_for_watch()
            disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
            server.put("w-0", phase="Failed", conditions=[disrupted])
            eventually(lambda: core.job.supervision.pod_ends, "its end is told")
            it.client.scale(5)
            server.wait_for_parallelism(5)
            watch.stop()
            collected = coordinator_families(it.exclusive, it.status)
            families = {family.name: family for family in collected}
    finally:
        server.close()
    ends = families["parashard_coordinator_pod_ends"].samples
    (errors,) = families["parashard_coordinator_pod_watch_errors"].samples
    assert errors.value == 1
    assert {tuple(sample.labels.values()): sample.value for sample in ends if sample.value} == {
        ("worker", "preempted"): 1
    }
