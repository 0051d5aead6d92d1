"""The notebook for a start: its cells, run one after the other in a process that has no script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.cluster_run import DEADLINE_S
from support.command_run import DIES_WITH_US, ROOT

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
KERNEL = """
import json, sys
for text in json.load(sys.stdin):
    exec(compile(text, "cell", "exec"), globals())
last = [metrics["accuracy"], classes.tolist(), rounds.history["val_accuracy"][-1], history.history["val_accuracy"][-1]]
print("last", json.dumps([*last, history.report["workers"]]))
"""


@pytest.mark.full("a notebook; test_document_programs.py runs scripts of pages")
def test_its_cells_run_and_learn_in_the_kernel_and_on_a_cluster(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    ran = subprocess.run(
        [*DIES_WITH_US, sys.executable, "-c", KERNEL],
        input=json.dumps(code),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    accuracy, classes, of_rounds, of_cluster, workers = json.loads(ran.stdout.splitlines()[-1].removeprefix("last "))
    assert accuracy > 0.9
    assert of_rounds > 0.9
    assert of_cluster > 0.9
    assert workers == 2
    assert len(classes) == 5
    assert len(list(tmp_path.glob("runs/quickstart-*/logs/shard-1.log"))) == 1
    assert len(list(tmp_path.glob("runs/quickstart-*"))) == 3


def test_it_is_kept_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell["outputs"] for cell in cells if cell["cell_type"] == "code" and cell["outputs"]] == []
    assert {cell["execution_count"] for cell in cells if cell["cell_type"] == "code"} == {None}
