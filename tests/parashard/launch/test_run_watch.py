"""What the launcher says of a run without workers and of refused peers, and when it kills a silent coordinator."""

from __future__ import annotations

from pathlib import Path

from parashard.launch.run_watch import READ_BYTES, REMIND_S, AwaitedWorkers, CoordinatorSilence, RefusedHandshakes

AT_ONCE = "no workers: the job waits until one joins"


def test_it_is_said_at_once_and_every_minute_until_a_worker_is_there() -> None:
    awaited = AwaitedWorkers("the job waits until one joins")
    said = {now_s: awaited.look(now_s, 0) for now_s in (5.0, 6.0, 5.0 + REMIND_S, 6.0 + REMIND_S)}
    again = "no workers for 60 s: the job waits until one joins"
    assert said == {5.0: AT_ONCE, 6.0: "", 5.0 + REMIND_S: again, 6.0 + REMIND_S: ""}
    assert awaited.look(500.0, 1) == ""
    assert awaited.look(600.0, 0) == AT_ONCE


def test_workers_that_are_expected_soon_have_some_time() -> None:
    awaited = AwaitedWorkers("each first runs train.py", 5.0)
    assert [awaited.look(now_s, 0) for now_s in (1.0, 5.0, 6.0, 7.0)] == [
        "",
        "",
        "no workers for 5 s: each first runs train.py",
        "",
    ]
    assert awaited.look(8.0, 2) == awaited.look(9.0, 0) == ""


def test_one_that_serves_is_killed_after_its_silence_and_not_again_at_once() -> None:
    silence = CoordinatorSilence(silence_s=5.0, start_s=100.0)
    silence.started(0.0)
    silence.heard(1.0)
    assert silence.look(6.0, serves=True) == ("", False)
    assert silence.look(6.1, serves=True) == ("the coordinator has not answered for 5 s; it is killed", True)
    assert silence.look(6.2, serves=True) == ("", False)


def test_its_silence_begins_when_it_is_seen_to_serve() -> None:
    silence = CoordinatorSilence(silence_s=5.0, start_s=100.0)
    silence.started(0.0)
    assert silence.look(50.0, serves=True) == ("", False)
    assert silence.look(55.1, serves=True)[1]


def test_a_slow_start_is_reported_once_and_killed_in_the_end() -> None:
    silence = CoordinatorSilence(silence_s=5.0, start_s=100.0)
    for _ in range(2):
        silence.started(0.0)
        assert silence.look(5.0, serves=False) == ("", False)
        assert silence.look(5.1, serves=False) == ("the coordinator has been starting for 5 s; it has 100 s", False)
        assert silence.look(100.0, serves=False) == ("", False)
        assert silence.look(100.1, serves=False) == ("the coordinator has not come up within 100 s; it is killed", True)


REFUSED = "I1124 02:19:18 25006 ssl_transport_security.cc:2563] Handshake failed with error SSL_ERROR_SSL: error:1:SSL "
NO_TLS = f"{REFUSED}routines:OPENSSL_internal:WRONG_VERSION_NUMBER: Invalid certificate verification context\n"
NO_CERTIFICATE = f"{REFUSED}routines:OPENSSL_internal:PEER_DID_NOT_RETURN_A_CERTIFICATE\n"
FOREIGN = f"{REFUSED}routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate\n"
AND_SO = "; a worker joins with --tls-dir and one of this run's authority"


def test_each_reason_is_said_once_and_none_of_an_earlier_start(tmp_path: Path) -> None:
    log = tmp_path / "coordinator.log"
    assert RefusedHandshakes(log).look() == "", "it is not there yet"
    log.write_text(FOREIGN)
    refused = RefusedHandshakes(log)
    assert refused.look() == ""
    with log.open("a") as file:
        file.write("level=info event=serving\n" + NO_TLS + NO_CERTIFICATE)
        file.flush()
        assert refused.look() == f"the coordinator refuses a process without a certificate{AND_SO}"
        file.write(NO_TLS + "x" * READ_BYTES + FOREIGN)
        file.flush()
        taken = "with a certificate that is not taken (CERTIFICATE_VERIFY_FAILED)"
        assert refused.look() == f"the coordinator refuses a process {taken}{AND_SO}"
        assert refused.look() == ""
