"""What RayCluster makes of Ray's answers; the real Ray is in tests/ray."""

from __future__ import annotations

import math
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cryptography import x509

from parashard.errors import ConfigurationError, Unreachable
from parashard.job.load import load_job
from parashard.launch import ray_cluster, ray_head
from parashard.launch.local_cluster import MODULES, ScriptCommand
from parashard.launch.ray_cluster import RayCluster
from parashard.launch.ray_head import RECONNECT, connect, draining_nodes, head_patience_s, imported, why_lost
from parashard.launch.ray_keeper import replaced
from parashard.launch.ray_settings import Ray, as_options
from parashard.launch.runs import Run
from parashard.launch.starting import Ended
from parashard.process.shell import ExitCode
from parashard.security.certs import issue
from parashard.security.credentials import Credentials
from parashard.security.identity import OF_A_JOB, Identity, Role
from parashard.security.signing import LocalKey
from support.certificates import Certificates
from support.fake_ray import (
    ActorDiedError,
    ActorUnavailableError,
    AuthenticationError,
    FakeRay,
    RayError,
    RuntimeEnvSetupError,
)
from support.small_job import SMALL_JOB
from support.waiting import eventually

SHARD, WORKER = MODULES["shard"], MODULES["worker"]
Make = Callable[..., RayCluster]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray_cluster, "imported", lambda: fake)
    monkeypatch.setattr(ray_cluster, "AGAIN_S", 0.0)
    monkeypatch.setattr(ray_cluster, "draining_nodes", lambda: fake.answer({}))
    monkeypatch.setattr(ray_cluster, "node_addresses", lambda: fake.answer(fake.addresses))
    monkeypatch.setattr(ray_head, "silence", lambda: None)
    return fake


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def make(ray: FakeRay, tmp_path: Path, told: list[str]) -> Iterator[Make]:
    """Return what makes the cluster of a small job, with more lines of its file."""
    made: list[RayCluster] = []
    (tmp_path / "logs").mkdir()

    def cluster(
        more: str = "",
        settings: Ray | None = None,
        script: ScriptCommand | None = None,
        credentials: Credentials | None = None,
    ) -> RayCluster:
        (tmp_path / "small.toml").write_text(SMALL_JOB + more)
        loaded = load_job(tmp_path / "small.toml", environ={})
        run = Run(loaded, tmp_path, script=script, credentials=credentials)
        made.append(RayCluster(run, settings or Ray(), told.append))
        return made[-1]

    yield cluster
    for one in made:
        one.end(grace_s=0.0)


# --- what is asked of Ray ---


def test_an_address_where_nothing_listens_is_told_at_once(make: Make, ray: FakeRay) -> None:
    ray.is_initialized = lambda: False  # type: ignore[method-assign]
    ray.init = lambda **_: None  # type: ignore[attr-defined]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        make(settings=Ray(f"127.0.0.1:{port}"))
    with pytest.raises(ConfigurationError, match=rf"Ray at 127\.0\.0\.1:{port}: .*refused; `ray start --head` prints"):
        make(settings=Ray(f"127.0.0.1:{port}"))


@pytest.mark.parametrize("address", ["http://h:10", ":", "head", "anyscale://a"])
def test_an_address_in_the_environment_that_is_none_is_refused_by_its_name(
    ray: FakeRay, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    for given in (None, "auto"):
        with pytest.raises(ConfigurationError, match=f"^RAY_ADDRESS is HOST:PORT, auto or local, found '{address}'$"):
            connect(ray, given)


def test_a_host_that_no_name_can_be_is_refused(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigurationError, match=r"Ray at aaa.*label too long"):
        connect(ray, f"{'a' * 64}:1")


@pytest.mark.parametrize("address", [None, "auto", "192.0.2.1:6379", "127.0.0.1:6379"])
def test_a_program_that_is_connected_goes_on_with_its_cluster(ray: FakeRay, address: str | None) -> None:
    assert not connect(ray, address)


@pytest.mark.parametrize("address", ["192.0.2.2:6379", "192.0.2.1:6380", "127.0.0.1:1", "local"])
def test_another_cluster_than_the_one_that_the_program_is_connected_to_is_refused(ray: FakeRay, address: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"at 192\.0\.2\.1:6379, found the address '{address}'; allowed: 192"):
        connect(ray, address)


@pytest.mark.parametrize("is_ours", [True, False])
def test_what_is_refused_after_the_connection_leaves_no_connection_of_ours(
    make: Make, ray: FakeRay, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: not is_ours)
    monkeypatch.setattr(ray, "init", lambda **_: None, raising=False)
    ray.util.get_node_ip_address = lambda: "192.0.2.9"
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.9' is off loopback"):
        make()
    assert ray.is_shut_down == is_ours


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"address": 5}, "address is text, found 5"),
        ({"worker_resources": 3}, "worker_resources is a dict of numbers, found 3"),
        ({"shard_resources": {"CPU": -1}}, r"shard_resources\['CPU'\] is a number of 0 or more, found -1"),
        ({"worker_resources": {"GPU": 1.5}}, r"worker_resources\['GPU'\] above 1 is a whole number, found 1.5"),
        ({"worker_resources": {1: 1}}, "a key of worker_resources is a name, found 1"),
        ({"worker_labels": {"zone": 1}}, r"worker_labels\['zone'\] is text, found 1"),
        ({"address": ""}, "address is HOST:PORT, auto, local or None, found ''"),
        ({"address": ":"}, "address is HOST:PORT, auto, local or None, found ':'"),
        ({"address": "http://h:10"}, "address is HOST:PORT, auto, local or None, found 'http://h:10'"),
        ({"worker_labels": "a"}, "worker_labels is a dict of texts, found 'a'"),
        ({"runtime_env": "x"}, "runtime_env is a dict, found 'x'"),
    ],
)
def test_a_setting_of_another_type_is_refused_where_it_is_given(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=f"ps.Ray: {sentence}"):
        Ray(**given)  # type: ignore[arg-type]


def test_what_ray_refuses_is_refused_in_a_sentence(make: Make, ray: FakeRay) -> None:
    def refused(*_: object, **__: object) -> None:
        raise ValueError("Bundles cannot be empty or contain only 0 values.")

    ray.util.placement_group = refused
    with pytest.raises(ConfigurationError, match=r"ps\.Ray: Bundles cannot be empty"):
        make().start("shard-0", SHARD, [])


def test_where_ray_is_gone_at_the_end_the_rest_is_tidied_up_and_a_person_hears_of_it(
    make: Make, ray: FakeRay, told: list[str], tmp_path: Path
) -> None:
    cluster = make()
    cluster.start("worker-0", WORKER, [])
    ray.kill = gone  # type: ignore[method-assign]
    cluster.end(grace_s=0.0)
    assert told == ["warning: Ray does not say whether its processes have ended: the head is gone"]
    assert list((tmp_path / "checkpoints").rglob("probe*")) == []


def gone(*_: object) -> None:
    raise RayError("the head is gone")


def test_a_worker_is_placed_by_itself_and_a_shard_in_its_bundle(make: Make, ray: FakeRay) -> None:
    cluster = make("\n[cluster]\nshards = 2\nworker_threads = 3\nshard_device = 'cuda'\n")
    cluster.start("shard-1", SHARD, [])
    cluster.start("worker-0", WORKER, [])
    assert ray.groups == [([{"CPU": 1, "GPU": 1}] * 2, "SPREAD")]
    assert (ray.actors["shard-1"].options["scheduling_strategy"], ray.actors["shard-1"].options["num_gpus"]) == (1, 1)
    options = ray.actors["worker-0"].options
    assert "scheduling_strategy" not in options
    assert (options["num_cpus"], options["max_restarts"], options["max_task_retries"]) == (3, 0, 0)


def test_resources_labels_and_the_runtime_environment_go_through(make: Make, ray: FakeRay) -> None:
    where = Ray(
        worker_resources={"GPU": 0.5, "memory": 1e9, "fast": 1},
        worker_labels={"zone": "a"},
        runtime_env={"env_vars": {"A": "b"}},
    )
    make(settings=where).start("worker-0", WORKER, [])
    options = ray.actors["worker-0"].options
    expected = {"num_cpus": 0, "num_gpus": 0.5, "memory": 1e9, "resources": {"fast": 1}}
    assert {name: options[name] for name in expected} == expected
    assert (options["label_selector"], options["runtime_env"]) == ({"zone": "a"}, {"env_vars": {"A": "b"}})


def test_numpys_numbers_go_through_as_pythons(make: Make, ray: FakeRay) -> None:
    where = Ray(worker_resources={"CPU": np.int64(2)}, shard_resources={"CPU": np.float32(0.5)})
    cluster = make(settings=where)
    cluster.start("worker-0", WORKER, [])
    cluster.start("shard-0", SHARD, [])
    cpus = ray.actors["worker-0"].options["num_cpus"], ray.groups[0][0][0]["CPU"]
    assert [(cpu, type(cpu)) for cpu in cpus] == [(2, int), (0.5, float)], "Ray refuses others"


def test_all_that_ray_runs_has_the_runtime_environment_where_no_program_has_connected(
    make: Make, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: given.update(options), raising=False)
    make(settings=Ray(runtime_env={"working_dir": "."})).start("worker-0", WORKER, [])
    assert given["runtime_env"] == {"working_dir": "."}
    assert ray.actors["worker-0"].options["runtime_env"] == {}, "Ray refuses a folder of this machine there"


def test_a_shard_whose_bundle_is_on_a_drained_node_is_placed_elsewhere(
    make: Make, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make()
    ray.bundle_nodes = {0: "old", 1: "new"}
    monkeypatch.setattr(cluster, "_draining", {"old": math.inf})
    for name in ("shard-0", "shard-1"):
        cluster.start(name, SHARD, [])
    assert [ray.actors[f"shard-{i}"].options["scheduling_strategy"] for i in (0, 1)] == ["SPREAD", 1]


@pytest.mark.parametrize(("policy", "said"), [("sync:4", True), ("async", False)])
def test_a_worker_has_the_jobs_threads_where_these_matter_for_bits_and_rays_else(
    make: Make, ray: FakeRay, policy: str, said: bool
) -> None:
    make(f'\n[consistency]\npolicy = "{policy}"\n').start("worker-0", WORKER, [])
    variables = ray.actors["worker-0"].order["variables"]
    assert ("OMP_NUM_THREADS" in variables) is said
    assert "PYTHONHASHSEED" in variables


def test_a_script_is_run_again_by_the_nodes_own_python(make: Make, ray: FakeRay) -> None:
    cluster = make(script=ScriptCommand(("/here/python", "/home/me/train.py", "3"), "/home/me"))
    cluster.start("worker-0", WORKER, [])
    cluster.start("shard-0", SHARD, [])
    assert [ray.actors[name].order["script"] for name in ("worker-0", "shard-0")] == [["/home/me/train.py", "3"], []]


# --- what Ray answers ---


def test_news_go_to_the_log_and_ask_for_more(make: Make, ray: FakeRay, tmp_path: Path) -> None:
    cluster = make()
    cluster.start("worker-0", WORKER, [])
    actor = ray.actors["worker-0"]
    for output, offset in (("one\n", 4), ("two\n", 8)):
        actor.tell("node-a", output, offset)
        assert cluster.reap() == []
    assert actor.calls == ["news -1", "news 4", "news 8"]
    actor.tell("node-a", "three\n", 14, exit_code=3, reason="the file is torn (exit code 3)")
    assert cluster.reap() == [Ended("worker-0", 3, "the file is torn (exit code 3)", 1)]
    assert (tmp_path / "logs" / "worker-0.log").read_text() == "one\ntwo\nthree\n"
    assert (actor.is_killed, cluster.running) == (True, [])


def test_an_actor_that_cannot_be_reached_has_not_ended(make: Make, ray: FakeRay) -> None:
    cluster = make()
    cluster.start("worker-0", WORKER, [])
    actor = ray.actors["worker-0"]
    actor.tell("node-a", "one\n", 4)
    cluster.reap()
    cluster.ask_to_end("worker-0")
    actor.fail(ActorUnavailableError("the node stands still"))
    assert cluster.reap() == []
    assert (cluster.running, cluster.reap()) == (["worker-0"], [])
    assert actor.calls[3:5] == ["news 4", "ask_to_end"], "the wish may not have come"
    actor.tell("node-a", "", 4, exit_code=0, reason="exit code 0")
    assert [ended.exit_code for ended in cluster.reap()] == [0]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ActorDiedError("The actor died.\n\tclass: K\nIts node has died."), -signal.SIGKILL, "Its node has died."),
        (RuntimeEnvSetupError("Failed to setup runtime environment.\nno pip"), ExitCode.CONFIGURATION, "no pip"),
        (RayError("something new"), ExitCode.FAILED, "something new"),
    ],
    ids=["died", "environment", "other"],
)
def test_an_error_of_ray_is_an_end_with_its_last_line(
    make: Make, ray: FakeRay, error: RayError, code: int, said: str
) -> None:
    cluster = make()
    cluster.start("worker-0", WORKER, [])
    ray.actors["worker-0"].fail(error)
    (ended,) = cluster.reap()
    assert (ended.exit_code, said in ended.reason, "\n" in ended.reason) == (code, True, False)


def test_a_process_without_a_place_waits_and_a_person_hears_of_it(
    make: Make, ray: FakeRay, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "PENDING_S", 0.0)
    cluster = make()
    cluster.start("worker-0", WORKER, [])
    cluster.kill("worker-0")  # which the coordinator wants of a silent one
    assert (cluster.reap(), cluster.running) == ([], ["worker-0"])
    assert told == ["worker-0 waits for a place on a node of Ray: CPU 1"]
    cluster.ask_to_end("worker-0")
    assert [ended.name for ended in cluster.reap()] == ["worker-0"]


def test_processes_on_a_drained_node_are_told(make: Make, ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make()
    for name, node in (("worker-0", "old"), ("worker-1", "new")):
        cluster.start(name, WORKER, [])
        ray.actors[name].tell(node)
    cluster.reap()
    monkeypatch.setattr(cluster, "_draining", {"old": 12.0})
    assert cluster.coming_ends() == {"worker-0": 12.0}


def test_the_end_removes_actors_and_the_group_and_leaves_the_programs_connection(make: Make, ray: FakeRay) -> None:
    cluster = make()
    cluster.start("shard-0", SHARD, [])
    cluster.end(grace_s=0.0)
    assert (ray.actors["shard-0"].is_killed, ray.is_removed, ray.is_shut_down) == (True, True, False)
    assert cluster.running == []


def test_a_group_that_ray_does_not_remove_is_waited_for_no_longer_than_the_end_takes(
    make: Make, ray: FakeRay, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "GONE_S", 0.01)
    cluster = make()
    cluster.start("shard-0", SHARD, [])
    ray.util.placement_group_table = lambda group: {"state": "CREATED", "bundles_to_node_id": {}}
    ray.kill = lambda actor: None  # type: ignore[method-assign]
    cluster.end(grace_s=0.0)
    assert told == ["warning: Ray has not ended after 0 s: shard-0, the placement group"]
    eventually(lambda: not [one for one in threading.enumerate() if one.name == "ray-group"], "nobody asks Ray")


# --- its head ---


def test_a_head_is_lost_once_it_has_not_answered_for_longer_than_patience() -> None:
    assert why_lost(100.0, 130.0, 30.0) == ""
    assert why_lost(100.0, 130.6, 30.0) == "the head of the Ray cluster (its GCS) has not answered for 31 s"


@pytest.mark.parametrize(("setting", "patience_s"), [(None, 30.0), ("120", 60.0), ("soon", 30.0)])
def test_patience_is_half_of_rays(setting: str | None, patience_s: float) -> None:
    assert head_patience_s({} if setting is None else {RECONNECT: setting}) == patience_s


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RayError("Timed out while waiting for GCS to become available."), "has not answered for 0 s"),
        (AuthenticationError("RPC error: WrongClusterID"), "another head .* knows none of the run's processes"),
    ],
    ids=["silent", "another"],
)
def test_without_its_head_a_run_is_ended_by_calls_that_need_none(
    make: Make, ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: RayError, why: str
) -> None:
    monkeypatch.setattr(ray_cluster, "HEAD_LOOK_S", 0.001)
    monkeypatch.setenv(RECONNECT, "0")
    cluster = make()
    for name, module in (("shard-0", SHARD), ("worker-0", WORKER)):
        cluster.start(name, module, [])
        ray.actors[name].tell("node-a")
    cluster.reap()
    ray.head_error = error

    def lost() -> bool:
        try:
            cluster.reap()
        except Unreachable as found:
            return bool(re.search(f"{why}; the run's checkpoints are in {tmp_path / 'checkpoints'}", str(found)))
        return False

    eventually(lost, "the run cannot go on")
    cluster.end(grace_s=0.0)
    assert [actor.calls[-2:] for actor in ray.actors.values()] == [["ask_to_end", "leave"]] * 2
    assert (cluster.running, ray.is_removed) == ([], False)


def test_while_the_head_is_away_a_start_is_put_off(make: Make, ray: FakeRay) -> None:
    cluster = make()
    ray.head_error = RayError("Timed out while waiting for GCS to become available.")
    cluster._ask_head()
    cluster.start("worker-0", WORKER, [])
    assert [(ended.exit_code, cluster.running) for ended in cluster.reap()] == [(ExitCode.IO_ERROR, [])]
    ray.head_error = None
    cluster._ask_head()
    cluster.start("worker-0", WORKER, [])
    assert (cluster.reap(), cluster.running) == ([], ["worker-0"])


# --- certificates ---


@pytest.fixture
def secured(make: Make, ray: FakeRay, tmp_path: Path, certificates: Certificates) -> Callable[..., RayCluster]:
    """Return what makes a cluster whose processes get certificates, on a node a."""
    issue(
        certificates.authority,
        tmp_path / "tls",
        [Identity(role, "me") for role in OF_A_JOB],
        hosts=["127.0.0.2"],
        valid_days=1,
    )
    ray.addresses = {"a": "10.0.0.7"}

    def cluster(more: str = "") -> RayCluster:
        lines = f'\n[cluster]\nauthority = "{certificates.authority}"\n{more}'
        return make(lines, credentials=Credentials(tmp_path / "tls"))

    return cluster


def request_of(role: Role, name: str, folder: Path) -> str:
    return LocalKey(folder, [Identity(role, name)]).due()


def test_a_process_gets_a_certificate_for_its_name_and_the_address_of_its_node(
    secured: Callable[..., RayCluster], ray: FakeRay, tmp_path: Path
) -> None:
    cluster = secured()
    cluster.start("shard-0", SHARD, [])
    actor = ray.actors["shard-0"]
    assert actor.order["identity"] == "parashard://shard/shard-0"
    actor.tell("a", request=request_of(Role.SHARD, "shard-0", tmp_path), host="192.0.2.66")
    assert cluster.reap() == []
    (answer,) = actor.answers_to_requests
    certificate = x509.load_pem_x509_certificate(answer["certificate"].encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.IPAddress) == [ip_address("10.0.0.7")], "as Ray knows it, not as it says"
    assert (cluster.reap(), len(actor.answers_to_requests)) == ([], 1)


def test_a_node_that_ray_does_not_know_yet_is_answered_once_it_does(
    secured: Callable[..., RayCluster], ray: FakeRay, tmp_path: Path
) -> None:
    cluster = secured()
    cluster.start("worker-0", WORKER, [])
    actor = ray.actors["worker-0"]
    actor.tell("b", request=request_of(Role.WORKER, "worker-0", tmp_path))
    assert (cluster.reap(), actor.answers_to_requests) == ([], [])
    actor.tell("b", "a line\n", 7)  # without a request: it is not sent with all news
    ray.addresses["b"] = "10.0.0.8"
    cluster._ask_head()
    assert (cluster.reap(), len(actor.answers_to_requests)) == ([], 1)


def test_where_each_machine_looks_for_itself_its_own_address_is_taken_and_no_name(
    secured: Callable[..., RayCluster], ray: FakeRay, tmp_path: Path
) -> None:
    cluster = secured('interface = "lo"')
    for name, host in (("shard-0", "192.0.2.66"), ("shard-1", "train.example")):
        cluster.start(name, SHARD, [])
        ray.actors[name].tell("a", request=request_of(Role.SHARD, name, tmp_path), host=host)
    (ended,) = cluster.reap()
    assert (ended.name, len(ray.actors["shard-0"].answers_to_requests)) == ("shard-1", 1)
    assert ended.reason.endswith("its address is said to be 'train.example'; allowed: an IP address")


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ((Role.WORKER, "worker-1"), "was asked for of worker/worker-1; allowed: worker/worker-0, no more"),
        ((Role.SHARD, "worker-0"), "was asked for of shard/worker-0; allowed: worker/worker-0, no more"),
        ("x" * 5000, "has 5000 characters; allowed: 4096"),
        ("not a request", "cannot be read"),
    ],
)
def test_a_request_for_anything_else_ends_its_process(
    secured: Callable[..., RayCluster], ray: FakeRay, tmp_path: Path, request_: str | tuple[Role, str], why: str
) -> None:
    cluster = secured()
    cluster.start("worker-0", WORKER, [])
    actor = ray.actors["worker-0"]
    actor.tell("a", request=request_ if isinstance(request_, str) else request_of(*request_, tmp_path))
    (ended,) = cluster.reap()
    assert (ended.exit_code, actor.is_killed, actor.answers_to_requests) == (ExitCode.FAILED, True, [])
    assert ended.reason.startswith("its request for a certificate is refused: ")
    assert why in ended.reason


# --- pieces ---


def test_deadlines_of_nodes_are_of_this_process_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"a": int((time.time() + 30.0) * 1000), "b": 0}
    client = SimpleNamespace(get_draining_nodes=lambda timeout: given)
    module = SimpleNamespace(internal_kv_get_gcs_client=lambda: client)
    monkeypatch.setitem(__import__("sys").modules, "ray.experimental.internal_kv", module)
    found = draining_nodes()
    assert 25.0 < found["a"] - time.monotonic() <= 30.0
    assert found["b"] == math.inf


def test_rays_client_is_refused(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigurationError, match="start this on a node of the cluster"):
        connect(ray, "ray://head:10001")


def test_without_ray_the_error_says_how_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"cluster.launcher = \"ray\" needs Ray .*\[ray\]"):
        imported()


def test_a_flag_of_a_command_gets_another_value_where_it_is() -> None:
    assert replaced(["--host", "10.0.0.1", "--name", "a"], "--host", "10.0.0.2") == [
        "--host",
        "10.0.0.2",
        "--name",
        "a",
    ]
    assert replaced(["--name", "a"], "--host", "10.0.0.2") == ["--name", "a"]


def test_options_of_an_actor_take_no_cpu_unless_it_is_said() -> None:
    assert as_options({"GPU": 1}) == {"num_cpus": 0, "num_gpus": 1, "resources": {}}
