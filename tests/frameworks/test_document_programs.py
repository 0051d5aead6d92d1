"""Each page for those who come with a framework begins with a whole script; each is taken from its page and run."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.command_run import ROOT
from support.mnist_files import written_as_mnist
from support.script_run import ScriptRun

pytestmark = [pytest.mark.xdist_group("frameworks"), pytest.mark.timeout(300)]

ANOTHER = pytest.mark.full(
    "PyTorch's page and an example run in `make test-frameworks`; scripts like it in this folder"
)
PROGRAM = re.compile(r"```python\n(# train\.py\n.*?)```", re.DOTALL)


@pytest.mark.parametrize(
    ("page", "needs"),
    [
        ("pytorch", ["torch"]),
        pytest.param("jax", ["jax"], marks=ANOTHER),
        pytest.param("keras", ["keras", "jax"], marks=ANOTHER),
        pytest.param("from-tensorflow", [], marks=ANOTHER),
    ],
)
def test_the_program_of_a_page_learns(page: str, needs: list[str], tmp_path: Path) -> None:
    for name in needs:
        if find_spec(name) is None:
            pytest.skip(f"NO TEST OF docs/{page}.md: no {name}; `make test-frameworks` has it")
    text = (ROOT / "docs" / f"{page}.md").read_text()
    (program,) = PROGRAM.findall(text)
    assert text.index("```") == text.index(program) - len("```python\n"), "a page begins with its program"
    run = ScriptRun(tmp_path, program)
    try:
        assert run.wait() == 0, run.complaint()
    finally:
        run.clean_up()
    (folder,) = run.runs()
    report = json.loads((folder / "report.json").read_text())
    assert report["state"] == "done"
    assert report["held_out"]["accuracy"] > 0.9  # of 1,600 examples a straight line between two classes is learned
    assert run.output().splitlines()[-1].strip(), "the script went on after fit"


@pytest.mark.parametrize(
    ("example", "words", "says"),
    [
        pytest.param("characters_torch.py", ["--epochs", "1", "--characters", "8000"], "loss", marks=ANOTHER),
        pytest.param("clicks_torch.py", ["--epochs", "1", "--examples", "4000"], "auc", marks=ANOTHER),
        ("mnist_layers.py", ["--epochs", "1"], "own"),
    ],
)
def test_an_example_runs_to_its_last_line(example: str, words: list[str], says: str, tmp_path: Path) -> None:
    if "torch" in example and find_spec("torch") is None:
        pytest.skip(f"NO TEST OF examples/{example}: no torch; `make test-frameworks` has it")
    if "mnist" in example:
        words = [*words, "--data", str(written_as_mnist(tmp_path, side=28))]
    run = ScriptRun(tmp_path, (ROOT / "examples" / example).read_text(), *words)
    try:
        assert run.wait() == 0, run.complaint()
    finally:
        run.clean_up()
    assert json.loads(run.output().splitlines()[-1])[says] > 0
