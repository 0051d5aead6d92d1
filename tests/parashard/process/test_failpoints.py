"""Failpoints: free when off, at the hit that was asked for, no oftener than that in a whole run, and all in place."""

import ast
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import ConfigurationError
from parashard.process import failpoints
from parashard.process.failpoints import FAILPOINTS, FailpointAction, InjectedFault, firings, hit, hit_of_process, parse
from parashard.process.shell import ExitCode

ROOT = Path(__file__).resolve().parents[3]
PULL, PUSH = "worker.pull.done", "worker.push.done"

Arm = Callable[..., None]


@pytest.fixture
def arm(tmp_path: Path) -> Iterator[Arm]:
    """Return a function that begins an incarnation of an armed process, with markers in `tmp_path`."""

    def begin_incarnation(spec: str, seed: str = "0") -> None:
        failpoints.arm({"PARASHARD_FAILPOINTS": spec, "PARASHARD_FAILPOINTS_DIR": str(tmp_path), **seeded(seed)})

    yield begin_incarnation
    failpoints.arm({})


def seeded(seed: str) -> dict[str, str]:
    return {"PARASHARD_FAILPOINTS_SEED": seed}


def hits_until_it_fires(name: str, hits_max: int = 100) -> int | None:
    for number in range(1, hits_max + 1):
        try:
            hit(name)
        except InjectedFault:
            return number
    return None


# --- when ---


def test_nothing_happens_where_nothing_is_armed(arm, tmp_path):
    hit(PULL)
    arm(f"{PUSH}=error")
    hit(PULL)
    failpoints.arm({})
    hit(PUSH)
    assert firings(tmp_path) == {}


def test_it_fires_at_the_hit_that_was_asked_for_and_once_in_an_incarnation(arm, tmp_path):
    arm(f"{PULL}=error@3*5")
    assert hits_until_it_fires(PULL) == 3
    assert hits_until_it_fires(PULL) is None
    arm(f"{PULL}=error@3*5")  # the next incarnation
    assert hits_until_it_fires(PULL) == 3
    assert firings(tmp_path) == {PULL: 2}


def test_a_run_has_no_more_firings_than_were_asked_for(arm, tmp_path):
    fired = []
    for _ in range(5):
        arm(f"{PULL}=error*3")
        fired.append(hits_until_it_fires(PULL))
    assert fired == [1, 1, 1, None, None]
    assert firings(tmp_path) == {PULL: 3}


def test_several_failpoints_may_be_armed(arm, tmp_path):
    arm(f"{PULL}=error@2; {PUSH}=error")
    assert (hits_until_it_fires(PUSH), hits_until_it_fires(PULL)) == (1, 2)
    assert firings(tmp_path) == {PULL: 1, PUSH: 1}


def test_incarnations_end_at_different_moments_that_the_seed_repeats(arm):
    def moments(seed: str) -> list[int | None]:
        return [
            hit_of_process(FailpointAction(PULL, "kill", 0.0, 1, 50, 20), seed, incarnation)
            for incarnation in range(1, 21)
        ]

    assert moments("7") == moments("7")
    assert moments("7") != moments("8")
    assert len(set(moments("7"))) > 10
    assert set(moments("7")) <= set(range(1, 51))
    arm(f"{PULL}=error@1..50*20", seed="7")
    assert hits_until_it_fires(PULL) == moments("7")[0]
    arm(f"{PULL}=error@1..50*20", seed="7")
    assert hits_until_it_fires(PULL) == moments("7")[1]


def test_of_many_threads_one_makes_the_hit(arm):
    arm(f"{PULL}=error@64*9")
    fired: list[str] = []
    begin = threading.Barrier(8)

    def run() -> None:
        begin.wait()
        fired.extend(PULL for _ in range(20) if hits_until_it_fires(PULL, 1))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fired == [PULL]


def test_of_many_processes_each_firing_is_one_ones_own(arm, tmp_path):
    # Another process has taken number 1 and number 2 between our look and our marker.
    arm(f"{PULL}=error*3")
    (tmp_path / PULL).mkdir()
    (tmp_path / PULL / "000002").touch()
    assert hits_until_it_fires(PULL) == 1
    assert sorted(os.listdir(tmp_path / PULL)) == ["000002", "000003"]
    arm(f"{PULL}=error*3")
    assert hits_until_it_fires(PULL) is None


# --- what ---

LIFE = f"""
import os
from parashard.process import failpoints
failpoints.arm(os.environ)
for number in (1, 2, 3):
    failpoints.hit("{PULL}")
    print(number, flush=True)
"""


@pytest.mark.parametrize(("action", "code"), [("kill", -signal.SIGKILL), ("exit", ExitCode.RETRY)])
def test_a_process_ends_in_the_middle_and_its_firing_is_counted(action, code, tmp_path):
    environ = {"PARASHARD_FAILPOINTS": f"{PULL}={action}@2", "PARASHARD_FAILPOINTS_DIR": str(tmp_path)}
    for said, ended in (("1\n", code), ("1\n2\n3\n", 0)):  # the second incarnation comes through: once was asked for
        incarnation = subprocess.run(
            [sys.executable, "-c", LIFE], env={**os.environ, **environ}, capture_output=True, text=True, check=False
        )
        assert (incarnation.stdout, incarnation.returncode) == (said, ended), incarnation.stderr
    assert firings(tmp_path) == {PULL: 1}


def test_a_sleep_takes_as_long_as_was_asked_for(arm, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(failpoints.time, "sleep", slept.append)
    arm(f"{PULL}=sleep(0.25)@2")
    for _ in range(4):
        hit(PULL)
    assert slept == [0.25]


def test_an_injected_fault_is_none_of_the_errors_that_we_handle(arm):
    arm(f"{PULL}=error")
    with pytest.raises(InjectedFault, match=re.escape(PULL)) as raised:
        hit(PULL)
    assert isinstance(raised.value, RuntimeError)


# --- the specification ---


@given(
    st.lists(
        st.builds(
            lambda name, action, sleep_s, first, more, times: FailpointAction(
                name, action, sleep_s if action == "sleep" else 0.0, first, first + more, times
            ),
            st.sampled_from(sorted(FAILPOINTS)),
            st.sampled_from(["kill", "exit", "error", "sleep"]),
            st.integers(0, 100).map(lambda ticks: ticks / 4),
            st.integers(1, 100),
            st.integers(0, 100),
            st.integers(1, 100),
        ),
        unique_by=lambda fault: fault.name,
    )
)
def test_what_is_written_is_what_is_read(faults):
    def written(fault: FailpointAction) -> str:
        action = f"sleep({fault.sleep_s})" if fault.action == "sleep" else fault.action
        return f"{fault.name}={action}@{fault.first}..{fault.last}*{fault.times}"

    assert parse(";".join(written(fault) for fault in faults)) == faults


def test_a_hit_and_a_number_of_times_may_be_left_out():
    assert parse(f"{PULL}=kill") == [FailpointAction(PULL, "kill", 0.0, 1, 1, 1)]
    assert parse(f"{PULL}=kill@3") == [FailpointAction(PULL, "kill", 0.0, 3, 3, 1)]
    assert parse(f"{PULL}=kill*20") == [FailpointAction(PULL, "kill", 0.0, 1, 1, 20)]


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("worker.pull.begun=kill", "'worker.pull.begun' is no failpoint; there are shard.boot.claimed"),
        (f"{PULL}", "cannot be read"),
        (f"{PULL}=burn", "cannot be read.*kill, exit, error or sleep"),
        (f"{PULL}=sleep", "cannot be read"),
        (f"{PULL}=kill@0", "hits count from 1"),
        (f"{PULL}=kill@5..2", "A is at most B"),
        (f"{PULL}=kill*0", "N is 1 to"),
        (f"{PULL}=sleep(99999)", "a sleep is at most"),
        (f"{PULL}=kill;{PULL}=exit", "named twice"),
    ],
)
def test_what_cannot_be_meant_is_refused(spec, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        parse(spec)


def test_without_a_folder_for_its_markers_a_process_does_not_start(tmp_path):
    spec = {"PARASHARD_FAILPOINTS": f"{PULL}=kill"}
    with pytest.raises(ConfigurationError, match="PARASHARD_FAILPOINTS_DIR is not"):
        failpoints.arm(spec)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="file: Not a directory"):
        failpoints.arm({**spec, "PARASHARD_FAILPOINTS_DIR": str(tmp_path / "file")})
    hit(PULL)


def test_a_service_that_cannot_be_armed_says_so_and_is_not_started_again(tmp_path):
    incarnation = subprocess.run(
        [
            sys.executable,
            "-c",
            "from parashard.process.shell import run_service\n"
            "raise SystemExit(run_service('shard-0', None, lambda stop: 0))",
        ],
        env={**os.environ, "PARASHARD_FAILPOINTS": "x=kill"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert incarnation.returncode == ExitCode.CONFIGURATION
    assert incarnation.stderr.splitlines()[-1].startswith(
        "parashard shard-0: PARASHARD_FAILPOINTS: 'x' is no failpoint"
    )


# --- the list ---


def test_every_failpoint_is_hit_in_exactly_one_place_of_its_own_service():
    placed: Counter[str] = Counter()
    misplaced = []
    folders = {"shard": {"ps_server"}, "worker": {"worker", "parashard"}, "coordinator": {"coordinator"}}
    for package in ("parashard", "ps_server", "worker", "coordinator"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if "hit(" in text else ():
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("failpoints.hit", "hit"):
                    name = ast.literal_eval(node.args[0])
                    placed[name] += 1
                    if package not in folders.get(name.partition(".")[0], ()):
                        misplaced.append((name, str(path)))
    assert placed == Counter(dict.fromkeys(FAILPOINTS, 1))
    assert misplaced == []


def test_an_armed_process_passes_no_failpoint_that_is_not_on_the_list(arm):
    arm(f"{PULL}=error")
    with pytest.raises(AssertionError, match="no registered failpoint"):
        hit("worker.pull.dnoe")
