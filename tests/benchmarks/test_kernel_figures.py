"""What the kernel benchmark measures and how it reads: one turn at the smallest size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import kernels
from parashard_server.state.kernels import fused


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = fused._lanes.threads
    yield
    fused.use_threads(before)


@pytest.mark.full("a turn of a benchmark, no promise of the product")
def test_every_kernel_is_measured_on_one_thread_and_on_all() -> None:
    rows = kernels.rows(1, 2, kernels.measure(1, 2, turns=1))
    measured = {(row["kernel"], row["threads"]) for row in rows}
    assert measured == {("np.copyto", 1), *((name, threads) for name in kernels.KERNELS for threads in (1, 2))}
    assert all(row["ours_ms"] > 0 and row["ratio"] == row["ours_ms"] / row["peer_ms"] for row in rows)


def test_every_rule_is_measured_after_zeros() -> None:
    rows = kernels.after_zeros(1600, 3, turns=1)
    assert [row["rule"] for row in rows] == [*kernels.UPDATES, "adam by row", "adamw by row", "rowwise_adagrad"]
    assert all(row["normal_ms"] > 0 and row["ratio"] == row["after_ms"] / row["normal_ms"] for row in rows)
    assert len(kernels.markdown_after_zeros(rows).splitlines()) == 2 + len(rows)


def test_a_kernel_with_other_bits_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.check(100, 2)
    update = fused.update

    def all_but_rmsprop(rule: str, *given: Any) -> None:
        if rule != "rmsprop":
            update(rule, *given)

    monkeypatch.setattr(fused, "update", all_but_rmsprop)
    with pytest.raises(AssertionError, match="rmsprop of 100 elements on 2 threads differs"):
        kernels.check(100, 2)


def test_the_table_names_the_targets_where_they_apply() -> None:
    row = {"kernel": "adam", "size_mib": 64, "threads": 2, "ours_ms": 8.0, "numpy_ms": 100.0, "ratio": 2.25}
    lines = kernels.markdown([row, row | {"threads": 1}, row | {"size_mib": 4}]).splitlines()
    assert lines[2] == "| adam | 2 | 8.000 | 2.25 (at most 2.4) | 12.5 x |"
    assert [line.count("at most") for line in lines[3:]] == [0, 0]
