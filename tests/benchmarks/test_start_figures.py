"""The table of what imports cost: its ratios are to one row, and every aim is of a row that it has."""

from benchmarks.start_costs import AIMS, BASELINE, PROGRAMS, cpu_s_of, of_python, rows


def test_a_ratio_is_that_of_medians() -> None:
    times = {BASELINE: [0.1, 0.2, 0.4], "worker": [0.3, 9.0, 0.1], "parashard --help": [0.1]}
    assert [(name, ratio, aim) for name, _, ratio, aim in rows(times)] == [
        (BASELINE, "1.00", ""),
        ("worker", "1.50", "1.3"),
        ("parashard --help", "0.50", "0.5"),
    ]


def test_every_aim_has_its_row() -> None:
    assert set(AIMS) <= {*PROGRAMS, "parashard --help"}


def test_what_a_process_computes_is_counted() -> None:
    idle_s, busy_s = cpu_s_of(of_python("-c", "")), cpu_s_of(of_python("-c", "sum(range(10**7))"))
    assert 0 < idle_s < busy_s
