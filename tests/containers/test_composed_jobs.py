"""The compose file, brought up: it trains, it keeps the promise under kills, and each container is a restricted one."""

from __future__ import annotations

from composed_job import eventually

LEDGER_STEPS = (200, 900, 1600, 2300)  # after each something is killed
QUICK_STEPS = 2600
KILLED = 137
ENDED = {"Status": "exited", "ExitCode": 0}
ROLES = {"certificates_1", "coordinator_1", "shard-0_1", "shard-1_1", "worker_1", "worker_2", "worker_3"}


def test_digits_train_in_six_containers_that_may_do_little(compose):
    job = compose("digits.toml", workers=3)
    containers = job.containers()
    assert set(containers) == ROLES
    for name, container in containers.items():
        host = container["HostConfig"]
        assert container["Config"]["User"] == "10001:10001", name
        assert host["ReadonlyRootfs"], name
        assert not container["EffectiveCaps"], name
        assert not container["BoundingCaps"], name
        assert "no-new-privileges" in host["SecurityOpt"], name
        assert host["Memory"] > 0, name
        assert host["RestartPolicy"]["Name"] == ("no" if name == "certificates_1" else "on-failure"), name
    for worker in ("worker_1", "worker_2", "worker_3"):  # each has something to do, at an address of its own
        eventually(lambda name=worker: "kind=tcp" in job.log(name), worker, told=lambda name=worker: job.log(name))
    job.let_end()
    report = job.report()
    assert report["held_out"]["accuracy"] >= 0.95
    assert (report["shards"], report["steps_applied"]) == (2, [report["steps_total"]] * 2)
    eventually(lambda: not others(job), "every container ended well", told=lambda: others(job))


def others(job):
    """Return the state of every container that has not ended well."""
    states = {name: container["State"] for name, container in job.containers().items()}
    return {name: state for name, state in states.items() if {key: state[key] for key in ENDED} != ENDED}


def test_a_peer_without_a_certificate_or_of_another_role_is_refused(compose):
    job = compose("ledger.toml", workers=1)
    job.wait_for_steps(1)
    for name, container in job.containers().items():
        assert "--insecure" not in container["Config"]["Cmd"], name
    status = ("parashard", "status", "coordinator:7100", "--tls-dir", "/tls")
    operator = job.visit(*status, volume="tls-operator")
    assert operator.returncode == 0, operator.stderr
    worker = job.visit(*status, volume="tls-worker")
    assert (worker.returncode, "allowed: operator" in worker.stderr) == (2, True), worker.stderr
    unauthenticated = job.visit(*status[:3], volume="tls-worker")
    assert unauthenticated.returncode == 75, unauthenticated.stderr
    wrong_role = job.visit("worker", "--connect=coordinator:7100", "--tls-dir=/tls", volume="tls-operator")
    assert wrong_role.returncode == 2, wrong_role.stderr


def test_kills_of_a_worker_a_shard_the_coordinator_and_all_workers_change_nothing_in_the_ledger(compose):
    job = compose("ledger.toml", workers=3, quick_until=QUICK_STEPS)
    for steps, victim in zip(LEDGER_STEPS, ("worker_2", "shard-1_1", "coordinator_1"), strict=False):
        job.wait_for_steps(steps)
        job.crash(victim)
    job.wait_for_steps(LEDGER_STEPS[-1])
    job.kill("worker")
    ends = [job.container(f"worker_{number}")["State"] for number in (1, 2, 3)]
    assert [(end["Running"], end["ExitCode"]) for end in ends] == [(False, KILLED)] * 3, "in the middle of the job"
    job.let_end()
    job.up_again()
    report = job.report()
    assert report["coordinator_restarts"] == 1, job.log("coordinator_1")
    assert job.log("shard-1_1").count("event=restored") == 2  # one for each of its incarnations
    assert report["ledger_wrong"] == 0
    assert report["steps_applied"] == [report["steps_total"]] * 2


def test_health_checks_are_the_products_own_and_a_stopped_shard_has_saved(compose):
    job = compose("ledger.toml", workers=1, more="[checkpoint]\nevery_s = 0\n")
    job.wait_for_steps(1)
    for name, address in (("coordinator_1", "coordinator:9100"), ("shard-0_1", "auto:9100"), ("worker_1", "auto:9100")):
        asked = job.ask(name, "parashard", "health", address)
        assert (asked.returncode, asked.stdout) == (0, "ok\n"), asked.stderr
    unanswered = job.ask("worker_1", "parashard", "health", "shard-0:9")
    assert (unanswered.returncode, "no answer" in unanswered.stderr) == (75, True)
    job.stop("shard-0_1")
    stopped = job.container("shard-0_1")["State"]
    assert (stopped["Running"], stopped["ExitCode"]) == (False, 0)
    assert "event=checkpoint" in job.log("shard-0_1").partition("event=stopping")[2]
