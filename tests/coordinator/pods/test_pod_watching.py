"""PodWatch with the official client and an API server of ours: it follows through all that a server may do to it."""

import queue
from collections.abc import Iterator

import pytest
from fake_api_server import JOB, NAMESPACE, FakeApiServer

from coordinator.pods.cluster import KubernetesCluster
from coordinator.pods.watching import CONFLICTS_MAX, PodWatch

kubernetes = pytest.importorskip("kubernetes", reason="needs the extra kubernetes")

DEADLINE_S = 20.0


class Following:
    """A watch of a server of ours, what it told, and how many workers are wanted."""

    def __init__(self) -> None:
        self.server = FakeApiServer()
        self.ends: queue.Queue[str] = queue.Queue()
        self.scaled: queue.Queue[str] = queue.Queue()
        self.wanted = 2
        configuration = kubernetes.client.Configuration(host=self.server.url)
        configuration.retries = False
        cluster = KubernetesCluster(kubernetes.client.ApiClient(configuration), NAMESPACE, JOB)
        self.watch = PodWatch(
            cluster,
            on_end=lambda end: self.ends.put(str(end)),
            wanted=lambda: self.wanted,
            on_scaled=self.scaled.put,
            workers=2,
            pause_s=0.01,
        )

    def next_end(self) -> str:
        return self.ends.get(timeout=DEADLINE_S)


@pytest.fixture
def following() -> Iterator[Following]:
    one = Following()
    yield one
    one.watch.stop()
    one.server.close()


def test_an_end_is_told_as_it_happens(following):
    following.server.put("w-0", phase="Running")
    following.watch.start()
    following.server.wait_for_watch()
    disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    following.server.put("w-0", phase="Failed", conditions=[disrupted])
    assert following.next_end() == "pod w-0 preempted (PreemptionByScheduler)"


def test_after_410_it_lists_again_and_misses_nothing(following):
    following.server.put("w-0", phase="Running")
    following.watch.start()
    following.server.wait_for_watch()
    following.server.forget()
    following.server.wait_for_watch()
    following.server.put("w-0", phase="Failed")
    assert following.next_end() == "pod w-0 unseen"
    assert [seen.split()[0] for seen in following.server.seen].count("list") == 2


def test_what_went_while_nobody_could_watch_is_told_by_the_next_list(following):
    server = following.server
    server.put("w-0", phase="Running")
    server.put("w-1", phase="Running")
    following.watch.start()
    server.wait_for_watch()
    server.answers.extend([503, 410])
    server.delete("w-0")  # heard
    assert following.next_end() == "pod w-0 unseen"
    server.forget()
    server.delete("w-1")
    assert following.next_end() == "pod w-1 unseen"


def test_a_server_that_breaks_is_asked_again_with_pauses(following):
    following.server.answers.extend([500, 0, 403, 503])
    following.watch.start()
    following.server.wait_for_watch()
    following.server.put("w-0", phase="Failed")
    assert following.next_end() == "pod w-0 unseen"


def test_the_job_is_scaled_when_another_number_is_wanted(following):
    following.watch.start()
    following.wanted = 5
    following.server.wait_for_parallelism(5)
    assert following.scaled.get(timeout=DEADLINE_S) == "the Job has 5 workers now"
    assert following.server.job["spec"]["completions"] == 5


def test_a_conflict_is_tried_again_with_the_newest_job(following):
    following.server.conflicts = CONFLICTS_MAX - 1
    following.watch.start()
    following.wanted = 3
    following.server.wait_for_parallelism(3)


def test_conflicts_without_end_are_a_reason_to_pause_not_to_give_up(following):
    following.server.conflicts = CONFLICTS_MAX + 1
    following.watch.start()
    following.wanted = 3
    following.server.wait_for_parallelism(3)


def test_a_job_that_cannot_be_scaled_is_told_and_left(following):
    following.server.job["status"]["conditions"] = [{"type": "Complete", "status": "True"}]
    following.watch.start()
    following.wanted = 3
    assert (
        following.scaled.get(timeout=DEADLINE_S)
        == "not scaled: the Job team/digits-worker is over: it cannot be scaled"
    )
    assert following.server.job["spec"]["parallelism"] == 2


def test_nothing_is_changed_while_as_many_are_wanted_as_there_are(following):
    following.watch.start()
    following.server.wait_for_watch()
    assert "patch" not in following.server.seen
