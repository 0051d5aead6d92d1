"""A user's model is found beside the job file, and each mistake in it is told in one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from model_cases import spec_of

from parashard.errors import ConfigurationError
from parashard.models import UserOptions, build_model

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
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def load(folder: Path | None, kind: str, **extra: Any) -> Any:
    return build_model(UserOptions.model_validate({"kind": kind, **extra}), SPEC, 0, folder)


def written(folder: Path, path: str, text: str = WORKING) -> Path:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dedent(text))
    return file


def test_a_module_beside_the_job_file_is_loaded_with_its_options(tmp_path: Path) -> None:
    written(tmp_path, "mine.py")
    assert (load(tmp_path, "mine:build").spec, load(tmp_path, "mine:build").width) == (SPEC, 3)
    assert load(tmp_path, "mine:build", width=9).width == 9
    assert sys.path[0] == str(tmp_path.resolve())
    assert sys.path.count(str(tmp_path.resolve())) == 1


def test_a_module_in_a_package_may_import_its_neighbour(tmp_path: Path) -> None:
    written(tmp_path, "pack/neighbour.py")
    written(tmp_path, "pack/__init__.py", "")
    written(tmp_path, "pack/mine.py", "from pack.neighbour import build\n")
    assert load(tmp_path, "pack.mine:build").width == 3


def test_without_a_folder_only_installed_modules_are_found(tmp_path: Path) -> None:
    written(tmp_path, "mine.py")
    with pytest.raises(ConfigurationError, match="no module 'mine' among installed ones"):
        load(None, "mine:build")


@pytest.mark.parametrize(
    ("kind", "extra", "told"),
    [
        ("absent:build", {}, r"no module 'absent' in .* or among installed ones"),
        ("pack.absent:build", {}, r"no module 'pack.absent' in .* or among installed ones"),
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
def test_a_mistake_is_told(tmp_path: Path, kind: str, extra: Any, told: str) -> None:
    written(tmp_path, "mine.py")
    written(tmp_path, "pack/__init__.py", "")
    written(tmp_path, "broken.py", "def build(:\n")
    written(tmp_path, "needy.py", "import not_there\n")
    with pytest.raises(ConfigurationError, match=told) as caught:
        load(tmp_path, kind, **extra)
    assert repr(kind) in str(caught.value)


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
    with pytest.raises(ConfigurationError, match=r"has a module 'colorsys', but another .* imported before; rename"):
        load(tmp_path, "colorsys:build")
