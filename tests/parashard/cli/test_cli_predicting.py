"""`parashard predict` and `plot`: what a finished run predicts, and its picture."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest

from parashard.errors import ConfigurationError
from parashard.job.load import as_toml, load_job
from parashard.launch.prediction import Predictions, print_predictions
from parashard.process.shell import ExitCode
from support.command_line import Command
from support.finished_run import HOUSES, finished_run, houses, written

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
