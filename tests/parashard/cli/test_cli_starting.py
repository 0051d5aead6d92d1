"""`parashard init`: the job of a table, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parashard.data import open_source
from parashard.job.load import load_job
from parashard.process.shell import ExitCode
from support.command_line import Command
from support.finished_run import houses, written


def test_a_table_becomes_a_job_that_can_be_run(parashard: Command) -> None:
    houses()
    ran = parashard("init", "My Houses.csv")
    assert (ran.exit_code, ran.err) == (0, "")
    assert ran.out.splitlines()[-1] == "wrote My Houses.toml; train with: parashard run My Houses.toml"
    job = load_job(Path("My Houses.toml"), environ={}).job
    assert job.job.name == "my-houses"
    data = job.data.plain()
    assert {key: data[key] for key in ("label", "target", "ignore", "categorical")} == {
        "label": "price",
        "target": "value",
        "ignore": ["id"],
        "categorical": [],
    }
    assert open_source(job.data).spec.examples == 48
    assert job.job.batch_size == 4
    assert "# id has 60 distinct texts in 60 rows: it looks like an id" in Path("My Houses.toml").read_text()


@pytest.mark.parametrize(
    ("header", "row", "delimiter", "due"),
    [
        (["a", "kind"], lambda n: [n % 4, "xyz"[n % 3]], ";", {"separator": ";", "target": "class"}),
        (["a", "sum"], lambda n: [n % 4, n * 3], "\t", {"separator": "\t", "target": "value"}),
        (["a", "b", "c"], lambda n: [n % 4, 1, n % 2], "|", {"ignore": ["b"], "target": "class"}),
        (["a", "b", "c"], lambda n: [n % 9, [1, 2, 3, 4, "?"][n % 5], n % 2], ",", {"categorical": ["b"]}),
        (["a", "b"], lambda n: [n % 9, ["1", "2", "other"][n % 3]], ",", {"label": "b", "target": "class"}),
        (['q"\x7f\\', "b"], lambda n: [n % 9, n % 2], ",", {"label": "b"}),
    ],
)
def test_what_a_table_has_is_guessed(parashard: Command, header: Any, row: Any, delimiter: str, due: Any) -> None:
    written("t.csv", header, [row(n) for n in range(80)], delimiter)
    assert parashard("init", "t.csv", "--output", "o.toml").exit_code == 0
    options = load_job(Path("o.toml"), environ={}).job.data
    assert due.items() <= options.plain().items()
    open_source(options)


def test_an_index_is_no_input_of_a_new_job(parashard: Command) -> None:
    rng = np.random.default_rng(0)
    order = rng.permutation(2000)[:1800]
    rows = [[n, 5 * n, f"{rng.random():.6f}", 10**9 + rng.integers(10**9), n // 1000] for n in order.tolist()]
    written("t.csv", ["", "shifted", "x", "user", "y"], rows)
    assert parashard("init", "t.csv").exit_code == 0
    options: Any = load_job(Path("t.toml"), environ={}).job.data
    assert options.ignore == ("", "shifted")
    said = Path("t.toml").read_text()
    assert '# "" is an index of pandas without a name' in said
    assert any(
        "'user' has a different whole number in each row: if it" in text for text in open_source(options).spec.warnings
    )


def test_the_encoding_of_a_table_is_in_its_job(parashard: Command) -> None:
    Path("t.csv").write_bytes(b"a,y\n" + b"".join(f"{n % 3},caf\xe9{n % 2}\n".encode("latin-1") for n in range(60)))
    assert "is not text in UTF-8" in parashard("init", "t.csv").err
    assert parashard("init", "t.csv", "--encoding", "latin-1").exit_code == 0
    options: Any = load_job(Path("t.toml"), environ={}).job.data
    assert options.encoding == "latin-1"
    assert "unknown encoding 'x-1'" in parashard("init", "t.csv", "--encoding", "x-1").err


def order(n: int) -> list[Any]:
    """Return a row of orders: two dates, a note, a code with leading zeros, a town and a label."""
    day = f"2025-{1 + n % 12:02}-{1 + n % 28:02}"
    other = ["3 March 2024", "Mar 4, 2024", "Fri, 5 Mar 2024", "2024-03-06T10:00:00Z"][n % 4].replace(
        "20", f"{n % 90 + 10}"
    )
    return [n % 7, day, other, f"called {n % 150} times", f"{n % 30:05}", "abc"[n % 3], n % 2]


COLUMNS = ["price", "ordered", "sent", "note", "zip", "town", "bought"]


def test_dates_and_notes_are_no_inputs_of_a_new_job(parashard: Command) -> None:
    written("t.csv", COLUMNS, [order(n) for n in range(600)])
    ran = parashard("init", "t.csv")
    assert ran.exit_code == 0
    left_out = [
        line.removeprefix("left out: column ") for line in ran.out.splitlines() if line.startswith("left out: ")
    ]
    assert [line.split(" has ")[0] for line in left_out] == ["'ordered'", "'sent'", "'note'"]
    assert "distinct texts that look like numbers or dates, such as '2025-01-01'" in left_out[0]
    assert left_out[2] == "'note' has 150 distinct texts in 600 rows, few rows of each"
    assert "# ordered has 84 distinct texts that look like" in Path("t.toml").read_text()
    spec = open_source(load_job(Path("t.toml"), environ={}).job.data).spec
    assert spec.input_shape == (34,), "the price, 30 codes, 3 towns"
    data: Any = load_job(Path("t.toml"), environ={}).job.data
    told = open_source(data.replaced(ignore=())).spec.warnings
    assert "column 'note' has 150 distinct texts in 600 rows, few rows of each, and each becomes an input;" in told[2]


def test_a_parquet_table_becomes_a_job_too(parashard: Command) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [order(n) for n in range(600)]
    columns: dict[str, Any] = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
    columns["ordered"] = pa.array(np.arange(600), pa.timestamp("s"))
    columns["user"] = [1234567890123456789 + n % 2 for n in range(600)]
    columns["tags"] = [["a", "b"]] * 600
    parquet.write_table(pa.table(columns), "orders.parquet")
    ran = parashard("init", "orders.parquet", "--label", "bought")
    assert (ran.exit_code, ran.err) == (0, "")
    assert [line.split()[3].strip("'") for line in ran.out.splitlines() if line.startswith("left out")] == [
        "ordered",
        "sent",
        "note",
        "user",
        "tags",
    ]
    data: Any = load_job(Path("orders.toml"), environ={}).job.data
    assert (data.source, open_source(data).spec.examples) == ("parquet", 480)
    refused = parashard("init", "orders.parquet", "--label", "ordered", "--output", "o.toml")
    assert "column 'ordered' cannot be the label: it holds dates or times (timestamp[ms])" in refused.err


def test_another_column_can_be_the_label(parashard: Command) -> None:
    houses()
    assert parashard("init", "My Houses.csv", "--label", "district", "--output", "o.toml").exit_code == 0
    assert load_job(Path("o.toml"), environ={}).job.data.plain()["label"] == "district"
    refused = parashard("init", "My Houses.csv", "--label", "rooms", "--output", "p.toml")
    assert "My Houses.csv: has no column 'rooms'; its columns: id, area, district, year, price" in refused.err
    assert not Path("p.toml").exists()


def test_what_cannot_begin_is_one_sentence(parashard: Command) -> None:
    houses()
    parashard("init", "My Houses.csv")
    written("one.csv", ["a"], [[1], [2]])
    for words, says in (
        (["My Houses.csv"], "My Houses.toml exists; --output names another file"),
        (["none.csv"], "none.csv: cannot be read: No such file or directory"),
        (["job.toml"], "job.toml: this is a job file; due is a table"),
        (["one.csv"], "one.csv: has no column but the label 'a'"),
    ):
        ran = parashard("init", *words)
        assert ran.exit_code == ExitCode.CONFIGURATION
        assert says in ran.err
        assert ran.err.count("\n") == 1
