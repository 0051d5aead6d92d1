"""What counts as another code: what is computed, not how it is written, of the script and of the user's own modules."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from parashard.api.code import (
    RunCode,
    Sources,
    check_same_code,
    code_of,
    computed_sha256,
    resumed_code,
    write_code,
)
from parashard.errors import ConfigurationError

SCRIPT = '''
import parashard as ps
def loss(outputs, targets):
    """The loss."""
    return (outputs - targets) ** 2
trainer = ps.Trainer(model, ps.Adam(0.1), ps.ParameterServerStrategy(2, 4))
trainer.fit((x, y), epochs=3)
'''
NO_EDITS = {
    "a comment": ("import parashard as ps", "import parashard as ps  # all of it"),
    "layout": ("(outputs - targets) ** 2", "(\n        outputs - targets\n    ) ** 2"),
    "a docstring": ('"""The loss."""', '"""The squared error."""'),
    "no docstring": ('    """The loss."""\n', ""),
    "a text": ("import parashard as ps", 'import parashard as ps\n"""\nold lines\n"""'),
    "resume": ("epochs=3", "epochs=3, resume=True"),
    "verbose": ("epochs=3", "verbose=0, epochs=3"),
    "accept_code_change": ("epochs=3", "epochs=3, resume=True, accept_code_change=True"),
    "insecure": ("(2, 4)", '(2, 4, host="0.0.0.0", insecure=True)'),
    "shards": ("(2, 4)", "(shards=5, workers=1)"),
}
EDITS = {
    "the loss": ("** 2", "** 4"),
    "epochs": ("epochs=3", "epochs=4"),
    "the rate": ("Adam(0.1)", "Adam(0.2)"),
    "a number's type": ("** 2", "** 2.0"),
    "resume of another function": ("(outputs - targets)", "scaled(outputs - targets, resume=True)"),
    "one statement more": ("import parashard as ps", "import parashard as ps\nx = -x"),
}


@pytest.mark.parametrize("edit", NO_EDITS)
def test_what_computes_the_same_is_no_edit(edit: str) -> None:
    old, new = NO_EDITS[edit]
    assert old in SCRIPT
    assert computed_sha256(SCRIPT.replace(old, new).encode()) == computed_sha256(SCRIPT.encode())


@pytest.mark.parametrize("edit", EDITS)
def test_what_computes_something_else_is_one(edit: str) -> None:
    old, new = EDITS[edit]
    assert old in SCRIPT
    assert computed_sha256(SCRIPT.replace(old, new).encode()) != computed_sha256(SCRIPT.encode())


def test_the_digest_does_not_depend_on_the_version_of_python() -> None:
    text = 'def f(a, *, b=1.5):\n    return f"{a!r:>{b}} x" if a else [*a, None, b"1"]\n'
    due = "6641"
    assert computed_sha256(text.encode())[:4] == due


@pytest.mark.parametrize("text", [b"def :", b"\xff\xfe", b"x = 1" + b" + 1" * 20_000])
def test_what_cannot_be_parsed_counts_as_a_text(text: bytes) -> None:
    assert computed_sha256(text) != computed_sha256(text + b" ")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sources:
    """A script whose package, installed library and own module are imported."""
    for name, text in {
        "train.py": SCRIPT,
        "net.py": "SCALE = 1",
        "layers/deep.py": "DEPTH = 2",
        ".venv/lib/site-packages/other.py": "",
        "parashard/own.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        module = ModuleType(f"test_sources_{Path(name).stem}")
        module.__file__ = str(tmp_path / name)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return Sources(tmp_path / "train.py", None, tmp_path)


def test_the_user_s_own_modules_count_and_installed_ones_do_not(sources: Sources) -> None:
    assert sorted(sources.modules_sha256()) == ["layers/deep.py", "net.py"]
    assert sorted(sources.texts) == ["layers/deep.py", "net.py", "train.py"]


def test_of_an_installed_program_its_own_package_counts_and_none_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "lib" / "site-packages"
    for name in ("program/__main__.py", "program/net.py", "library/deep.py"):
        (installed / name).parent.mkdir(parents=True, exist_ok=True)
        (installed / name).write_text("")
        module = ModuleType(f"test_installed_{name}")
        module.__file__ = str(installed / name)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    sources = Sources(installed / "program" / "__main__.py", None, installed)
    assert list(sources.modules_sha256()) == ["program/net.py"]


def test_a_text_is_what_this_process_runs_whatever_it_becomes(sources: Sources, tmp_path: Path) -> None:
    before = sources.code()
    for name in ("train.py", "net.py"):
        (tmp_path / name).write_text("SCALE = 1000")
    assert sources.code() == before
    assert sources.texts["train.py"] == SCRIPT.encode()


@pytest.mark.parametrize(("name", "says"), [("net.py", "net.py was edited"), ("train.py", "train.py was edited")])
def test_an_edited_file_is_named_with_where_its_text_is_kept(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    begun = sources.code()
    run = tmp_path / "run"
    run.mkdir()
    write_code(run, RunCode(begun.sha256, begun, begun), sources.texts)
    assert (run / "code" / name).stat().st_mode & 0o077 == 0, "a script may have what others must not read"
    (tmp_path / name).write_text("SCALE = 1000")
    edited = Sources(tmp_path / "train.py", None, tmp_path).code()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=rf"{says} since run began \(it is kept in run/code/{name}\)"):
        resumed_code(run, edited, accept_change=False)
    with pytest.raises(ConfigurationError, match=rf"{says} .* put back the text .* \(it is kept in run/code/{name}\)"):
        check_same_code(run, edited)
    accepted = resumed_code(run, edited, accept_change=True)
    write_code(run, accepted, {})
    assert (code_of(run), accepted.is_changed, accepted.identity) == (accepted, True, begun.sha256)
    check_same_code(run, edited)
    assert not resumed_code(run, begun, accept_change=False).is_changed, "back to the first"


def test_a_module_that_one_process_alone_imports_does_not_count(sources: Sources, tmp_path: Path) -> None:
    parent = sources.code()
    worker = parent._replace(modules={"net.py": parent.modules["net.py"], "lazy.py": "1"})
    write_code(tmp_path, RunCode(parent.sha256, parent, parent), {})
    check_same_code(tmp_path, worker)
    again = resumed_code(tmp_path, worker, accept_change=False)
    assert sorted(again.present.modules) == ["layers/deep.py", "lazy.py", "net.py"]
    assert parent.sha256 != worker.sha256, "by the digest alone nobody knows which files both have"


def test_a_constant_of_the_model_counts(sources: Sources, tmp_path: Path) -> None:
    mine = sources.code()
    write_code(tmp_path, RunCode(mine.sha256, mine, mine), {})
    with pytest.raises(ConfigurationError, match="a buffer of the module is drawn without a seed"):
        check_same_code(tmp_path, mine._replace(constants="1"))
