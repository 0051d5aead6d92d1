"""A user's model is found beside the job file, and each mistake in it is told in one line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from parashard.errors import ConfigurationError
from parashard.frozen_model import validated
from parashard.job.model_options import UserOptions
from parashard.models.building import build_model
from support.model_cases import spec_of

SPEC = spec_of((4,))
WORKING = """
    class Mine:
        def __init__(self, spec, width):
            self.spec, self.width = spec, width
        def initial_variables(self): return {}
        def loss_and_gradients(self, variables, batch, xp): return 0.0, {}
        def evaluate(self, variables, batch, xp): return {}

    def build(spec, width=3):
        return Mine(spec, width)

    def build_old(spec): raise ValueError("no longer offered")
    def build_half(spec):
        class Half:
            evaluate = 3
            def initial_variables(self): return {}
        return Half()
    number = 3
"""


@pytest.fixture(autouse=True)
def _imports_undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        del sys.modules[name]
    sys.modules.update(before)


def load(folder: Path | None, kind: str, **extra: Any) -> Any:
    return build_model(validated(UserOptions, {"kind": kind, **extra}), SPEC, 0, folder)


def written(folder: Path, path: str, text: str = WORKING) -> Path:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dedent(text))
    return file


def test_a_module_beside_the_job_file_is_loaded_with_its_options(tmp_path: Path) -> None:
    written(tmp_path, "mine.py")
    assert (load(tmp_path, "mine:build").spec, load(tmp_path, "mine:build").width) == (SPEC, 3)
    assert load(tmp_path, "mine:build", width=9).width == 9
    assert sys.path[-1] == str(tmp_path.resolve()), "at the end: nothing there may shadow what is installed"
    assert sys.path.count(str(tmp_path.resolve())) == 1


def test_a_module_in_the_working_directory_is_found_after_one_beside_the_job_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, here = tmp_path / "beside", tmp_path / "here"
    written(beside, "first.py")
    written(here, "first.py", "raise RuntimeError('of the working directory')")
    written(here, "second.py")
    monkeypatch.chdir(here)
    assert load(beside, "first:build").width == 3
    assert load(beside, "second:build").width == 3
    assert load(None, "second:build").width == 3


@pytest.mark.parametrize("name", ["colorsys", "safetensors"])
def test_files_beside_the_model_do_not_shadow_what_is_installed(tmp_path: Path, name: str) -> None:
    for package in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[package]  # as in a process that has not imported it yet
    written(tmp_path, f"{name}.py", "raise RuntimeError('of the user')")
    written(tmp_path, "mine.py")
    load(tmp_path, "mine:build")
    assert importlib.import_module(name).__file__ != str(tmp_path / f"{name}.py")


@pytest.mark.parametrize("name", ["coordinator", "protos", "ps_server", "worker"])
def test_no_name_but_parashard_is_taken_from_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / f"{name}.py").write_text("from parashard.models.networks import SoftmaxRegression\n")
    written(tmp_path, "mine.py", f"from {name} import SoftmaxRegression as build")
    load(tmp_path, "mine:build")
    assert sys.modules.pop(name).__file__ == str(tmp_path / f"{name}.py")


def test_a_neighbour_that_an_installed_module_shadows_is_named(tmp_path: Path) -> None:
    written(tmp_path, "tenacity.py")
    written(tmp_path, "mine.py", "from tenacity import Mine\n")
    with pytest.raises(ConfigurationError, match=r"'tenacity' is .*/__init__\.py, not .*tenacity\.py; rename yours"):
        load(tmp_path, "mine:build")


def test_a_module_in_a_package_may_import_its_neighbour(tmp_path: Path) -> None:
    written(tmp_path, "pack/neighbour.py")
    written(tmp_path, "pack/__init__.py", "")
    written(tmp_path, "pack/mine.py", "from pack.neighbour import build\n")
    assert load(tmp_path, "pack.mine:build").width == 3


def test_without_a_folder_only_the_working_directory_and_installed_modules_are_looked_into(tmp_path: Path) -> None:
    written(tmp_path, "mine.py")
    with pytest.raises(ConfigurationError, match=f"no module 'mine' in {Path.cwd()}, or installed"):
        load(None, "mine:build")


@pytest.mark.parametrize(
    ("kind", "extra", "told"),
    [
        ("absent:build", {}, r"no module 'absent' in .*, in .*, or installed"),
        ("pack.absent:build", {}, r"no module 'pack.absent' in .*, in .*, or installed"),
        ("mine:absent", {}, r"mine\.py has no 'absent'"),
        ("mine:number", {}, r"mine\.py has something that cannot be called as 'number'"),
        ("mine:build", {"depth": 3}, r"options depth, raised TypeError: .*unexpected keyword argument 'depth'"),
        ("mine:build", {"spec": 3}, r"options spec, raised TypeError: .*multiple values"),
        ("mine:build_old", {}, r"options \(none\), raised ValueError: no longer offered"),
        ("mine:build_half", {}, r"'Half' without the methods loss_and_gradients, evaluate; a model has"),
        ("broken:build", {}, r"importing 'broken' failed: SyntaxError: .*broken\.py, line 1"),
        ("needy:build", {}, r"importing 'needy' failed: ModuleNotFoundError: No module named 'not_there'"),
    ],
)
def test_a_mistake_is_reported(tmp_path: Path, kind: str, extra: Any, told: str) -> None:
    written(tmp_path, "mine.py")
    written(tmp_path, "pack/__init__.py", "")
    written(tmp_path, "broken.py", "def build(:\n")
    written(tmp_path, "needy.py", "import not_there\n")
    with pytest.raises(ConfigurationError, match=told) as caught:
        load(tmp_path, kind, **extra)
    assert repr(kind) in str(caught.value)


@pytest.mark.parametrize(
    ("raising", "named"),
    [
        ("sys.exit()", "SystemExit"),
        ("sys.exit('no data')", "SystemExit: no data"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise BaseException('mine')", "BaseException: mine"),
        ("raise ValueError('mine\\nand more')", "ValueError: mine"),
    ],
)
def test_whatever_is_raised_is_the_user_s_mistake_and_has_a_line(tmp_path: Path, raising: str, named: str) -> None:
    written(tmp_path, "read.py", f"import sys\n{raising}\n")
    written(tmp_path, "built.py", f"import sys\ndef build(spec):\n    {raising}\n")
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, "read:build")
    assert str(caught.value) == f"model kind 'read:build': importing 'read' failed: {named} ({tmp_path}/read.py:2)"
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, "built:build")
    assert str(caught.value).endswith(f"the options (none), raised {named} ({tmp_path}/built.py:3)")


def test_the_factory_s_own_configuration_error_is_passed_on(tmp_path: Path) -> None:
    text = (
        "from parashard.errors import ConfigurationError\ndef build(spec): raise ConfigurationError('width is odd')\n"
    )
    written(tmp_path, "mine.py", text)
    with pytest.raises(ConfigurationError, match=r"^width is odd$"):
        load(tmp_path, "mine:build")


def test_another_module_of_the_name_is_not_taken_for_the_user_s(tmp_path: Path) -> None:
    written(tmp_path, "colorsys.py")
    __import__("colorsys")
    with pytest.raises(ConfigurationError, match=r"'colorsys' is .*colorsys\.py, not .*colorsys\.py; rename yours"):
        load(tmp_path, "colorsys:build")
