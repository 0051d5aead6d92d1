"""Sorting a profile's samples by what the code was doing."""

from __future__ import annotations

import signal

import pytest

from benchmarks.profile import OTHER, sampling, shares

REPORT = """
# Overhead  Command  Shared Object  Symbol
    40.00%  python   [kernel.kallsyms]     [k] _copy_from_iter
    20.00%  swapper  [kernel.kallsyms]     [k] pv_native_safe_halt
    10.00%  python   libc.so.6             [.] __memmove_avx512_unaligned_erms
     5.00%  python   [JIT] tid 4168        [.] 0x00007f6052acd1c7
     5.00%  python   [kernel.kallsyms]     [k] tcp_sendmsg_locked
""".splitlines()


def test_every_sample_is_counted_once_as_a_share_of_all() -> None:
    found = shares([*REPORT, "    20.00%  cat      cat                   [.] main"])
    assert sum(found.values()) == pytest.approx(1.0)
    assert found["copies into and out of sockets"] == pytest.approx(0.4)
    assert found["idle: nothing to run"] == pytest.approx(0.2)
    assert found["copies between memory of processes"] == pytest.approx(0.1)
    assert found["optimizer and check of values"] == found["TCP"] == pytest.approx(0.05)
    assert found[OTHER] == pytest.approx(0.2)


def test_shares_are_of_what_was_sampled() -> None:
    assert shares(REPORT)["copies into and out of sockets"] == pytest.approx(0.5)


def test_pythons_own_socket_module_is_python() -> None:
    [line] = ["   100.00%  python   _socket.cpython-311-x86_64-linux-gnu.so  [.] sock_recv_into"]
    assert shares([line])["Python"] == 1.0


def test_perf_ends_with_its_context_also_when_what_is_sampled_fails() -> None:
    with pytest.raises(RuntimeError, match="the shard is gone"), sampling(["sleep", "3600"]) as perf:
        raise RuntimeError("the shard is gone")
    assert perf.returncode == -signal.SIGTERM


def test_a_perf_that_may_not_sample_says_so() -> None:
    says = "echo 'no permission' >&2; exit 3"
    with pytest.raises(SystemExit, match="perf ended with 3: no permission"), sampling(["sh", "-c", says]) as perf:
        perf.wait(60)
