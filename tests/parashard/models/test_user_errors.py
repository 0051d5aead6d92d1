"""Errors are told with the line of the user's code that they went through, whatever lies below it."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import parashard
import parashard_coordinator
import parashard_server
import parashard_worker
from parashard.errors import NotReady, WrongModel
from parashard.models.networks import SoftmaxRegression
from parashard.models.user_errors import _is_the_users, _not_the_users, described, place_of
from parashard.process.run_files import short_path


def raised(call: object, *arguments: object) -> BaseException:
    with pytest.raises(BaseException) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value


def in_numpy() -> None:
    np.linalg.inv(np.zeros((2, 3)))


def in_the_library() -> None:
    json.loads("{")


@pytest.mark.parametrize("fails", [in_numpy, in_the_library])
def test_the_last_line_of_the_user_s_own_is_named(fails: object) -> None:
    line = fails.__code__.co_firstlineno + 1  # type: ignore[attr-defined]
    assert described(raised(fails)).startswith(f"{short_path(__file__)}:{line}: ")


def test_libraries_are_not_the_user_s_wherever_they_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "library-1.0.dist-info").mkdir()
    (tmp_path / "of_a_library.py").write_text("def fail():\n    raise KeyError('w')\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    _not_the_users.cache_clear()
    try:
        said = described(raised(lambda: importlib.import_module("of_a_library").fail()))
    finally:
        _not_the_users.cache_clear()
    assert said.startswith(f"{short_path(__file__)}:")


def test_the_services_are_not_the_user_s() -> None:
    services = [parashard, parashard_coordinator, parashard_server, parashard_worker]
    assert not any(_is_the_users(str(service.__file__)) for service in services)


def test_an_error_without_any_such_line_is_reported_without_a_place() -> None:
    error = raised(json.loads, "{")
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # type: ignore[union-attr]  # as if we had called it
    assert described(error).startswith("JSONDecodeError: ")


def test_an_error_of_ours_says_what_it_is_about_by_itself() -> None:
    assert described(raised(_raise, NotReady("the shard is stopping"))) == "the shard is stopping"


def test_a_message_has_one_line_and_may_be_missing() -> None:
    assert described(ValueError("first\nsecond")) == "ValueError: first"
    assert described(ValueError()) == "ValueError"


def test_a_message_of_keras_says_what_the_matter_is() -> None:
    error = ValueError(
        "Exception encountered when calling Net.call().\n\n\x1b[1mInput 0 has shape (2, 5)\x1b[0m\n\nmore"
    )
    assert described(error) == "ValueError: Exception encountered when calling Net.call(). Input 0 has shape (2, 5)"


def test_what_we_say_of_a_model_needs_no_class_of_ours() -> None:
    assert described(WrongModel("the loss must be a scalar")) == "the loss must be a scalar"


def test_a_message_is_text_that_can_be_sent() -> None:
    assert described(ValueError("no file \udcff.csv")) == "ValueError: no file ?.csv"


def test_a_method_of_the_user_s_has_a_place_and_one_of_ours_has_none() -> None:
    assert place_of(in_numpy) == f"{short_path(__file__)}:{in_numpy.__code__.co_firstlineno}: "
    assert place_of(SoftmaxRegression.loss_and_gradients) == ""
    assert place_of(len) == ""


def _raise(error: Exception) -> None:
    raise error


def test_of_a_message_with_a_traceback_in_it_the_inner_error_is_told_with_its_line() -> None:
    """As JAX tells of a callback."""
    said = f"""INTERNAL: CpuCallback error calling callback: Traceback (most recent call last):
  File "{np.__file__}", line 9, in somewhere
  File "{__file__}", line 5, in host
  File "{json.__file__}", line 71, in __call__
ValueError: bad thing in my callback"""
    error = raised(lambda: (_ for _ in ()).throw(RuntimeError(said)))
    assert described(error) == f"{short_path(__file__)}:5: ValueError: bad thing in my callback"
