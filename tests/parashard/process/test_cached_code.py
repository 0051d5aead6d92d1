"""Machine code where nothing can be written: loops are compiled all the same."""

from typing import Any

import numpy as np
import pytest

from parashard.process.cached_code import compiled


def _double(values: Any) -> None:
    for at in range(len(values)):
        values[at] *= 2


def test_a_loop_is_compiled_without_a_place_for_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    caching = pytest.importorskip("numba.core.caching")
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    values = np.arange(3.0)
    compiled(_double)(values)
    assert values.tolist() == [0, 2, 4]


def test_machine_code_is_cached_where_a_process_may_write() -> None:
    assert type(compiled(_double)._cache).__name__ == "FunctionCache"  # type: ignore[attr-defined]
