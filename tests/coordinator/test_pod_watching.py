"""PodWatch with the official client and an API server of ours: it follows through all that a server may do to it."""

import json
import queue
from collections.abc import Callable, Iterator

import pytest

from parashard_coordinator import pods
from parashard_coordinator.pods import CONFLICTS_MAX, KubernetesCluster, PodWatch, Wanted
from support.fake_api_server import JOB, NAMESPACE, FakeApiServer
from support.waiting import DEADLINE_S

kubernetes = pytest.importorskip("kubernetes", reason="needs the extra kubernetes")


UNREADABLE_LINES = {
    "a blank line": b"",
    "a proxy's words": b"upstream connect error or disconnect/reset before headers",
    "JSON that is no event": b"[]",
    "an event without an object": b'{"type": "ADDED"}',
    "an object without metadata": b'{"type": "ADDED", "object": {}}',
    "an error without a reason": b'{"type": "ERROR", "object": {"code": 410, "message": "too old"}}',
    "an error whose code is no number": b'{"type": "ERROR", "object": {"code": "x", "reason": "r", "message": "m"}}',
    "a condition without a status": json.dumps(
        {
            "type": "ADDED",
            "object": {
                "metadata": {"name": "w-9", "uid": "uid-w-9", "resourceVersion": "9"},
                "status": {"phase": "Running", "conditions": [{"type": "Ready"}]},
            },
        }
    ).encode(),
}


class CallbackProgress:
    """A watch of a server of ours, what it told, and how many workers are wanted."""

    def __init__(self) -> None:
        self.server = FakeApiServer()
        self.ends: queue.Queue[str] = queue.Queue()
        self.scaled: queue.Queue[str] = queue.Queue()
        self.errors: queue.Queue[str] = queue.Queue()
        self.wanted = Wanted(2, 0)
        self.on_look: Callable[[], None] = lambda: None
        configuration = kubernetes.client.Configuration(host=self.server.url)
        configuration.retries = False
        cluster = KubernetesCluster(kubernetes.client.ApiClient(configuration), NAMESPACE, JOB)
        self.watch = PodWatch(
            cluster,
            on_end=lambda end: self.ends.put(str(end)),
            wanted=self._look,
            on_scaled=self.scaled.put,
            on_error=lambda: self.errors.put("error"),
            workers=2,
            pause_s=0.01,
            look_s=0.01,
        )

    def _look(self) -> Wanted:
        self.on_look()
        return self.wanted

    def scale(self, workers: int) -> None:
        self.wanted = Wanted(workers, self.wanted.request + 1)

    def next_scaled(self) -> str:
        return self.scaled.get(timeout=DEADLINE_S)

    def next_end(self) -> str:
        return self.ends.get(timeout=DEADLINE_S)


@pytest.fixture
def following() -> Iterator[CallbackProgress]:
    one = CallbackProgress()
    yield one
    one.watch.stop()
    one.server.close()


def test_an_end_is_reported_as_it_happens(following):
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
    assert following.server.count("list") == 2


def test_pods_that_ended_between_watches_are_found_by_the_next_list(following):
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


@pytest.mark.parametrize("line", UNREADABLE_LINES.values(), ids=UNREADABLE_LINES)
def test_after_a_malformed_line_it_lists_again_and_misses_nothing(following, line):
    server = following.server
    server.put("w-0", phase="Running")
    server.lines.extend([line, line, line])
    following.watch.start()
    server.wait_for_watch()
    server.put("w-0", phase="Failed")
    assert following.next_end() == "pod w-0 unseen"
    assert server.count("list") == 4
    assert following.errors.qsize() == 3


def test_a_malformed_list_is_requested_again(following):
    following.server.put("w-9", phase="Running", conditions=[{"type": "Ready"}])
    following.watch.start()
    assert following.errors.get(timeout=DEADLINE_S) == "error"
    assert following.errors.get(timeout=DEADLINE_S) == "error"
    following.server.put("w-9", phase="Running")
    following.server.wait_for_watch()


def test_every_error_of_the_watch_counts_and_410_is_none(following):
    following.server.answers.extend([500, 0, 403, 410])
    following.watch.start()
    following.server.wait_for_watch()
    assert following.errors.qsize() == 3


def test_the_job_is_scaled_when_another_number_is_wanted(following):
    following.watch.start()
    following.scale(5)
    following.server.wait_for_parallelism(5)
    assert following.next_scaled() == "the Job has 5 workers now"
    assert following.server.job["spec"]["completions"] == 5


def test_a_conflict_is_tried_again_with_the_newest_job(following):
    following.server.conflicts = CONFLICTS_MAX - 1
    following.watch.start()
    following.scale(3)
    following.server.wait_for_parallelism(3)


def test_conflicts_without_end_are_a_reason_to_pause_not_to_give_up(following):
    following.server.conflicts = CONFLICTS_MAX + 1
    following.watch.start()
    following.scale(3)
    following.server.wait_for_parallelism(3)


def test_a_job_that_cannot_be_scaled_is_reported_and_left(following):
    following.server.job["status"]["conditions"] = [{"type": "Complete", "status": "True"}]
    following.watch.start()
    following.scale(3)
    assert following.next_scaled() == "not scaled: the Job team/digits-worker is over: it cannot be scaled"
    assert following.server.job["spec"]["parallelism"] == 2


def test_a_refused_scaling_is_tried_again_by_itself_and_reported_once(following):
    following.server.refuses_patches = True
    following.watch.start()
    following.scale(4)
    assert "answered 403" in following.next_scaled()
    following.server.wait_for_requests("patch", 3)
    following.server.refuses_patches = False
    assert following.next_scaled() == "the Job has 4 workers now"
    assert following.server.job["spec"]["parallelism"] == 4


def test_asking_for_the_same_number_again_is_a_new_request(following, monkeypatch):
    monkeypatch.setattr(pods, "REFUSED_LOOKS", 1 << 40)  # by itself: never
    monkeypatch.setattr(pods, "REFUSED_LOOKS_MAX", 1 << 40)
    following.server.refuses_patches = True
    following.watch.start()
    following.scale(4)
    assert "answered 403" in following.next_scaled()
    following.scale(4)
    assert "answered 403" in following.next_scaled()
    following.server.refuses_patches = False
    following.scale(4)
    assert following.next_scaled() == "the Job has 4 workers now"
    assert following.server.count("patch") == 3


def test_asking_for_what_the_job_has_ends_a_refused_scaling(following, monkeypatch):
    monkeypatch.setattr(pods, "REFUSED_LOOKS", 1 << 40)
    monkeypatch.setattr(pods, "REFUSED_LOOKS_MAX", 1 << 40)
    following.server.refuses_patches = True
    following.watch.start()
    following.scale(4)
    assert "answered 403" in following.next_scaled()
    following.server.refuses_patches = False
    following.scale(2)
    assert following.next_scaled() == "the Job has 2 workers now"
    assert following.server.count("patch") == 1


def test_a_repeated_request_overrides_a_concurrent_change_of_the_job(following):
    following.watch.start()
    following.scale(4)
    assert following.next_scaled() == "the Job has 4 workers now"
    following.server.job["spec"].update(parallelism=2, completions=2)  # as `kubectl apply -k` does
    following.scale(4)
    assert following.next_scaled() == "the Job has 4 workers now"
    assert following.server.job["spec"]["parallelism"] == 4


def test_what_an_earlier_coordinator_decided_is_carried_out_at_the_start(following):
    following.server.job["spec"].update(parallelism=4, completions=4)
    following.scale(2)  # the manifests' number: it died before it told the Job
    following.watch.start()
    assert following.next_scaled() == "the Job has 2 workers now"
    assert following.server.job["spec"]["parallelism"] == 2


def test_scaling_is_retried_after_a_malformed_answer(following):
    following.watch.start()
    following.server.wait_for_watch()
    following.server.job["spec"]["template"]["spec"]["containers"] = [{}]  # one without a name
    reads = following.server.count("get")
    following.scale(4)
    following.server.wait_for_requests("get", reads + 2)
    following.server.job["spec"]["template"]["spec"]["containers"] = [{"name": "worker"}]
    assert following.next_scaled() == "the Job has 4 workers now"


def test_nothing_is_changed_without_a_request_to_scale(following):
    following.server.job["spec"].update(parallelism=4, completions=4)  # by another client
    looks = queue.Queue()
    following.on_look = lambda: looks.put("look")
    following.watch.start()
    for _ in range(3):
        looks.get(timeout=DEADLINE_S)
    assert "patch" not in following.server.seen
    assert following.scaled.empty()
