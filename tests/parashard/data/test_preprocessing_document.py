"""The program of docs/preprocessing.md predicts what the model that was trained says."""

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from parashard.data.base import Batch
from parashard.data.preprocessing import as_json
from parashard.data.table_files import CsvOptions, open_csv
from parashard.job.model_options import MlpOptions
from parashard.models.building import build_model
from parashard.plan.variables import initial_rows

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "preprocessing.md"
TABLE = "age,workclass,label\n39,Private,{}\n,State-gov,{}\n20,Private,{}\n50,State-gov,{}\n"


@pytest.mark.parametrize("labels", [("no", "yes", "no", "no"), (5.5, -2.25, 8.0, 100.0)])
def test_the_program_predicts(tmp_path, monkeypatch, capsys, labels):
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text(TABLE.format(*labels))
    source = open_csv(CsvOptions(path=tmp_path / "a.csv", label="label", held_out=0.0))
    model = build_model(MlpOptions(hidden=(5,)), source.spec, 0, None)
    weights = {v.name: initial_rows(v, 3, 0, v.rows) for v in model.initial_variables().values()}
    Path("run").mkdir()
    save_file(weights, "run/weights.safetensors")
    Path("run/preprocessing.json").write_bytes(as_json(source.spec.preprocessing))

    exec(re.search(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[1], {})

    inputs = source.examples(np.arange(2))[0]
    outputs = model.forward(weights, inputs, None, np)[0]
    printed = capsys.readouterr().out.strip()
    if isinstance(labels[0], str):
        assert printed == str([("no", "yes")[i] for i in outputs.argmax(axis=1)])
        return
    predicted = np.array(printed.strip("[]").split(), np.float64)
    np.testing.assert_allclose(predicted, np.mean(labels) + np.std(labels) * outputs[:, 0], rtol=1e-4)
    told = model.evaluate(weights, Batch(-1, -1, np.arange(2), inputs, np.float32(labels[:2])), np)
    assert told["mean_absolute_error"] == pytest.approx(abs(predicted - labels[:2]).mean(), rel=1e-4)
