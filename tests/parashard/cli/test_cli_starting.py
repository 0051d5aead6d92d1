"""`parashard init`, `predict` and `plot`: a table's job, what a finished run predicts, its picture; what is refused."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parashard.data import open_source
from parashard.data.preprocessing import as_json
from parashard.errors import ConfigurationError
from parashard.job.embeddings import tables_of
from parashard.job.load import as_toml, load_job
from parashard.launch.prediction import Predictions, print_predictions
from parashard.models import build_model
from parashard.process.shell import ExitCode
from parashard.store.arrays import write_arrays
from support.command_line import Command

HOUSES = [
    [f"h{n}", n % 7 + 0.5, ["north", "old, town"][n % 2], "" if n % 5 == 0 else 1990 + n % 17, 10.5 * n]
    for n in range(60)
]

DIGITS = """
[job]
name = "digits"
epochs = 1
batch_size = 8
[data]
source = "digits"
[model]
kind = "softmax"
[optimizer]
kind = "adam"
"""


def written(name: str, header: list[str], rows: list[Any], delimiter: str = ",") -> None:
    with Path(name).open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])


def houses() -> None:
    written("My Houses.csv", ["id", "area", "district", "year", "price"], HOUSES)


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
        "ignore": ("id",),
        "categorical": (),
    }
    assert open_source(job.data).spec.examples == 48
    assert job.job.batch_size == 4
    assert "# id has 60 distinct texts in 60 rows: it looks like an id" in Path("My Houses.toml").read_text()


@pytest.mark.parametrize(
    ("header", "row", "delimiter", "due"),
    [
        (["a", "kind"], lambda n: [n % 4, "xyz"[n % 3]], ";", {"separator": ";", "target": "class"}),
        (["a", "sum"], lambda n: [n % 4, n * 3], "\t", {"separator": "\t", "target": "value"}),
        (["a", "b", "c"], lambda n: [n % 4, 1, n % 2], "|", {"ignore": ("b",), "target": "class"}),
        (["a", "b", "c"], lambda n: [n % 9, [1, 2, 3, 4, "?"][n % 5], n % 2], ",", {"categorical": ("b",)}),
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
        "'user' has another whole number in each row: if it" in text for text in open_source(options).spec.warnings
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


def finished_run(job: Path, *, weights: bool = True) -> Any:
    """Make a run of a job by hand, and return its model, source and first weights."""
    loaded = load_job(job, environ={})
    source = open_source(loaded.job.data)
    run = Path("runs/done")
    run.mkdir(parents=True)
    (run / "job.toml").write_text(as_toml(loaded.job))
    if source.spec.preprocessing is not None:
        (run / "preprocessing.json").write_bytes(as_json(source.spec.preprocessing))
    model: Any = build_model(loaded.job.model, source.spec, 0, job.parent, tables_of(loaded.job))
    rng = np.random.default_rng(1)
    values = {
        name: rng.normal(size=variable.shape).astype(np.float32) for name, variable in model.initial_variables().items()
    }
    if weights:
        write_arrays(run / "weights.safetensors", values)
    return model, source, values


def test_a_run_predicts_classes_for_a_table(parashard: Command) -> None:
    rows = [[n / 7, "ab"[n % 2], "xyz"[n % 3]] for n in range(60)]
    written("t.csv", ["n", "text", "kind"], rows)
    parashard("init", "t.csv")
    model, source, values = finished_run(Path("t.toml"))
    written("new.csv", ["text", "n", "more"], [[text, n, "?"] for n, text, _ in rows[:3]])
    fitted = source.spec.preprocessing
    inputs = fitted.inputs([{"n": n, "text": text} for n, text, _ in rows[:3]])
    outputs = model.predict(values, inputs)
    ran = parashard("predict", "done", "new.csv")
    assert (ran.exit_code, ran.err) == (0, "")
    head, *told = ran.out.splitlines()
    assert head == "prediction,probability"
    assert [line.split(",")[0] for line in told] == [fitted.target.classes[at] for at in outputs.argmax(1)]
    shares = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    assert [float(line.split(",")[1]) for line in told] == pytest.approx(shares.max(axis=1), abs=1e-4)
    assert parashard("predict", "done", "new.csv", "--output", "o.npy").out == "wrote o.npy: 3 predictions\n"
    np.testing.assert_array_equal(np.load("o.npy"), outputs)


PREDICTED = Predictions(np.zeros((2, 2)), [["prediction", "probability"], ["Paris", "0.9"], ["東京", "0.8"]])


def test_predictions_are_on_standard_output_as_a_whole_or_not_at_all() -> None:
    for encoding in ("utf-8", "utf-16", "shift_jis"):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
        print_predictions(PREDICTED, stream)
        assert stream.buffer.getvalue().decode(encoding) == "prediction,probability\nParis,0.9\n東京,0.8\n"  # type: ignore[attr-defined]
    for encoding in ("latin-1", "ascii"):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
        with pytest.raises(
            ConfigurationError, match=rf"standard output is in {encoding}, which lacks '\\u6771'; --out"
        ):
            print_predictions(PREDICTED, stream)
        stream.flush()
        assert stream.buffer.getvalue() == b""  # type: ignore[attr-defined]


def test_a_full_or_closed_standard_output_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        with pytest.raises(ConfigurationError, match="standard output cannot be written: No space left on device"):
            print_predictions(PREDICTED, full)
        release = os.open(os.devnull, os.O_WRONLY)
        os.dup2(release, full.fileno())
        os.close(release)
    with pytest.raises(ConfigurationError, match="standard output is closed"):
        print_predictions(PREDICTED, None)


def test_unknown_and_missing_cells_are_told_of_beside_the_predictions(parashard: Command) -> None:
    written("t.csv", ["n", "town", "kind"], [[n / 7, "ab"[n % 2], "xyz"[n % 3]] for n in range(60)])
    parashard("init", "t.csv")
    finished_run(Path("t.toml"))
    written("new.csv", ["n", "town"], [["1", "a"], ["", "c"], ["2", " b "], ["", ""]])
    ran = parashard("predict", "done", "new.csv")
    assert ran.exit_code == 0
    assert ran.out.count("\n") == 5
    assert ran.err == (
        "parashard: new.csv: column 'n': 2 cells are missing\n"
        "parashard: new.csv: column 'town': 1 of 3 texts are unknown, such as 'c' and 1 cell is missing\n"
    )


def test_a_parquet_file_is_predicted_for_as_the_same_table_in_text(parashard: Command) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {
        "n": [n / 7 for n in range(60)],
        "m": [n % 2 == 0 for n in range(60)],
        "code": [n % 3 for n in range(60)],
        "day": pa.array(range(60), pa.timestamp("s")),
        "kind": ["xyz"[n % 3] for n in range(60)],
    }
    parquet.write_table(pa.table(columns), "t.parquet")
    parashard("init", "t.parquet")
    job = Path("t.toml")
    job.write_text(job.read_text().replace("categorical = []", 'categorical = ["code"]'))
    finished_run(job)
    written("new.csv", ["n", "m", "code"], [[0, "True", "0.0"], [1 / 7, "FALSE", 1], ["", "true", 2]])
    in_text = parashard("predict", "done", "new.csv")
    new = {"n": [0, 1 / 7, None], "m": [True, False, True], "code": [0.0, 1.0, 2.0], "day": [1, 2, 3]}
    parquet.write_table(pa.table(new), "new.parquet")
    in_parquet = parashard("predict", "done", "new.parquet")
    assert (in_text.exit_code, in_text.out.count("\n")) == (0, 4)
    assert (in_parquet.exit_code, in_parquet.out) == (0, in_text.out)
    assert in_text.err == "parashard: new.csv: column 'n': 1 cell is missing\n"


def test_numbers_are_predicted_in_the_unit_of_the_table(parashard: Command) -> None:
    houses()
    parashard("init", "My Houses.csv", "--output", "t.toml")
    model, source, values = finished_run(Path("t.toml"))
    rows = [dict(zip(["id", "area", "district", "year", "price"], row, strict=True)) for row in HOUSES[:4]]
    target = source.spec.preprocessing.target
    standardised, _ = model.forward(values, source.spec.preprocessing.inputs(rows), None, np)
    due = target.mean + target.deviation * standardised[:, 0]
    written("new.csv", list(rows[0]), [list(row.values()) for row in rows])
    assert parashard("predict", "done", "new.csv", "--output", "o.csv").exit_code == 0
    head, *told = Path("o.csv").read_text().splitlines()
    assert head == "prediction"
    np.testing.assert_allclose(list(map(float, told)), due, rtol=1e-6)


def test_a_run_on_arrays_predicts_for_arrays(parashard: Command) -> None:
    Path("digits.toml").write_text(DIGITS)
    model, source, values = finished_run(Path("digits.toml"))
    array = source.held_out(0, 5)[0] * 16  # as the data have them: whole numbers up to 16
    np.save("x.npy", array.astype(np.uint8))
    assert parashard("predict", "done", "x.npy", "--output", "o.npy").exit_code == 0
    np.testing.assert_allclose(np.load("o.npy"), model.predict(values, source.held_out(0, 5)[0]), rtol=1e-6)


def test_data_that_the_job_makes_are_taken_as_they_are(parashard: Command) -> None:
    model, source, values = finished_run(Path("job.toml"))
    array = source.examples(np.arange(5))[0]
    np.save("x.npy", array)
    assert parashard("predict", "done", "x.npy", "--output", "o.npy").exit_code == 0
    np.testing.assert_array_equal(np.load("o.npy"), model.predict(values, array))
    np.save("y.npy", array[:, None])
    written("z.csv", ["a"], [[1]])
    for file, says in (("y.npy", "an example has shape"), ("z.csv", "due is a .npy file"), ("w.npy", "cannot be read")):
        assert says in parashard("predict", "done", file).err


def test_what_cannot_predict_says_why(parashard: Command) -> None:
    finished_run(Path("job.toml"), weights=False)
    assert "has no weights.safetensors, which the end of a run writes" in parashard("predict", "done", "x.npy").err
    Path("runs/done/weights.safetensors").write_bytes(b"")
    job = Path("runs/done/job.toml")
    job.write_text(as_toml(load_job(job, [("model.kind", "ledger", "--set")], environ={}).job))
    assert "model kind 'ledger': it has no method predict" in parashard("predict", "done", "x.npy").err


KEYED = """
job = { name = "keyed", epochs = 1, batch_size = 8 }
data = { source = "csv", path = "t.csv", label = "kind", key_columns = ["*"], held_out = 0.0 }
model = { kind = "wide_deep" }
optimizer = { kind = "adam" }
tables = { wide = { dimension = 1 }, deep = { dimension = 4 } }
"""


def keyed_table(model: str = KEYED) -> None:
    written("t.csv", ["n", "text", "kind"], [[n, "ab"[n % 2], "xy"[n % 3 == 0]] for n in range(30)])
    Path("keyed.toml").write_text(model)


def test_without_a_checkpoint_there_are_no_rows_to_predict_with(parashard: Command) -> None:
    keyed_table()
    finished_run(Path("keyed.toml"))
    ran = parashard("predict", "done", "t.csv")
    assert ran.exit_code == ExitCode.CONFIGURATION
    assert ran.err.endswith("runs/done: has no drained checkpoint, which the end of a run writes\n")


OF_KEYS = """
from parashard.plan.variables import Variable

class OfKeys:
    def __init__(self, spec):
        shapes = {field.name: field.shape for field in spec.fields}
        self.numbers, self.keys = shapes["inputs/numbers"][0], shapes["inputs/keys"][0]

    def initial_variables(self):
        return {"of_keys.w": Variable("of_keys.w", (self.numbers + self.keys, 2))}

    def loss_and_gradients(self, variables, batch, xp): ...
    def evaluate(self, variables, batch, xp): ...

    def predict(self, variables, inputs):
        w = variables["of_keys.w"]
        return inputs["numbers"] @ w[: self.numbers] + (inputs["keys"] % 3).astype("float32") @ w[self.numbers :]
"""


def test_keys_reach_a_model_of_one_s_own_that_has_no_table(parashard: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parashard.launch.prediction.EXAMPLES_AT_ONCE", 7)
    Path("of_keys.py").write_text(OF_KEYS)
    keyed_table(KEYED.replace('"wide_deep"', '"of_keys:OfKeys"').replace("tables =", "# tables ="))
    model, source, values = finished_run(Path("keyed.toml"))
    ran = parashard("predict", "done", "t.csv", "--output", "o.npy")
    assert (ran.exit_code, ran.out) == (0, "wrote o.npy: 30 predictions\n")
    np.testing.assert_array_equal(np.load("o.npy"), model.predict(values, source.examples(np.arange(30))[0]))


def test_a_run_is_drawn(parashard: Command) -> None:
    run = Path("runs/one")
    run.mkdir(parents=True)
    (run / "job.toml").write_text(Path("job.toml").read_text())
    assert "history.jsonl: cannot be read" in parashard("plot", "one").err
    (run / "history.jsonl").write_text('{"steps_complete": 0}\n')
    assert "has no loss and no metric yet" in parashard("plot", "one").err
    lines = [{"steps_complete": 5, "training_loss": 0.5, "held_out": {"accuracy": 0.75}}]
    (run / "history.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"steps_comp')
    assert parashard("plot", "one").out == "wrote runs/one/plot.svg: loss, accuracy\n"
    assert "held out 0.7500" in (run / "plot.svg").read_text()
    assert parashard("plot", "one", "--output", "p.svg").out == "wrote p.svg: loss, accuracy\n"
    assert "cannot be written" in parashard("plot", "one", "--output", "none/p.svg").err
