"""What Python warns of in a worker is told to the run, each text once."""

from __future__ import annotations

import re
import warnings

import pytest

from parashard_worker.worker import TEXT_MAX, TOLD_MAX, warnings_told


def test_a_warning_is_told_once_with_the_user_s_line(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: shown.append(str(message)))
    warnings.simplefilter("always")
    before, told = warnings.showwarning, list[str]()
    with warnings_told(told.append):
        for _ in range(2):
            warnings.warn("too\n  few", stacklevel=1)
        warnings.warn("old", FutureWarning, stacklevel=1)
    warnings.warn("later", stacklevel=1)
    assert warnings.showwarning is before
    assert [re.sub(r"\(.*test_user_warnings.py:\d+\)", "(here)", text) for text in told] == [
        "UserWarning: too few (here)",
        "FutureWarning: old (here)",
    ]
    assert shown == ["too\n  few", "too\n  few", "old", "later"], "the log has all"


def test_their_number_and_length_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "showwarning", lambda *_, **__: None)
    warnings.simplefilter("always")
    told: list[str] = []
    with warnings_told(told.append):
        for number in range(TOLD_MAX + 5):
            warnings.warn(f"{number}{'x' * 10 * TEXT_MAX}", stacklevel=1)
    assert len(told) == TOLD_MAX
    assert max(map(len, told)) < TEXT_MAX + 100
