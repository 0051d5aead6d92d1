"""The default trains a small GPT by AdamW as well as one machine: a part of `python -m benchmarks.statistics`."""

from __future__ import annotations

import pytest

from support.default_accuracy import check_default

pytest.importorskip("torch", reason="NO TEST OF the default's accuracy with AdamW; `make test-frameworks` has it")


@pytest.mark.full("six trainings; `test_accuracy_of_the_default` has a smaller task")
def test_a_gpt_becomes_as_good_by_the_default_and_did_not_by_the_former_one() -> None:
    check_default("gpt", epochs=1, seeds=2)
