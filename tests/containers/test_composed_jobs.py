"""The compose file, brought up: it trains, it keeps the promise under kills, and each container is a restricted one."""

from __future__ import annotations

from composed_job import EXAMPLES

LEDGER_FIRST, LEDGER_SECOND, LEDGER_THIRD = 500, 3000, 5000  # of 12,288 steps, after which something is killed
DIGITS_EPOCHS = 150  # long enough that the slowest worker to start has something to do
ROLES = {"coordinator_1", "shard-0_1", "shard-1_1", "worker_1", "worker_2", "worker_3"}


def test_digits_train_in_six_containers_that_may_do_little(compose, tmp_path):
    text = (EXAMPLES / "digits.toml").read_text()
    assert text.count("epochs = 30\n") == 1
    tmp_path.chmod(0o755)  # the containers' user reads it
    (tmp_path / "digits.toml").write_text(text.replace("epochs = 30\n", f"epochs = {DIGITS_EPOCHS}\n"))
    job = compose("digits.toml", workers=3, folder=tmp_path)
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
        assert host["RestartPolicy"]["Name"] == "on-failure", name
    report = job.report()
    assert report["accuracy"] >= 0.95
    assert (report["shards"], report["steps_applied"]) == (2, [report["steps_total"]] * 2)
    for worker in ("worker_1", "worker_2", "worker_3"):
        assert "kind=tcp" in job.log(worker), job.log(worker)  # each was there, at an address of its own


def test_a_worker_a_shard_and_the_coordinator_that_are_killed_change_nothing_in_the_ledger(compose):
    job = compose("ledger.toml", workers=3)
    job.wait_for_steps(LEDGER_FIRST)
    job.crash("worker_2")
    job.wait_for_steps(LEDGER_SECOND)
    job.crash("shard-1_1")
    job.wait_for_steps(LEDGER_THIRD)
    job.crash("coordinator_1")
    report = job.report()
    assert report["coordinator_restarts"] == 1
    assert job.log("shard-1_1").count("event=restored") == 2  # one for each of its lives
    assert report["ledger_wrong"] == 0
    assert report["steps_applied"] == [report["steps_total"]] * 2


def test_health_checks_are_the_products_own_and_a_stopped_shard_has_saved(compose):
    job = compose("ledger.toml", workers=1)
    job.wait_for_steps(1)
    for name, address in (("coordinator_1", "coordinator:9100"), ("shard-0_1", "auto:9100"), ("worker_1", "auto:9100")):
        asked = job.ask(name, "parashard", "health", address)
        assert (asked.returncode, asked.stdout) == (0, "ok\n"), asked.stderr
    nobody = job.ask("worker_1", "parashard", "health", "shard-0:9")
    assert (nobody.returncode, "nobody answers" in nobody.stderr) == (75, True)
    job.stop("shard-0_1")
    stopped = job.container("shard-0_1")["State"]
    assert (stopped["Running"], stopped["ExitCode"]) == (False, 0)
    assert "event=checkpoint" in job.log("shard-0_1").partition("event=stopping")[2]
