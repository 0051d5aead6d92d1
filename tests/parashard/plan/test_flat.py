"""Variables in one run of memory."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from parashard.plan.flat import ALIGNMENT_BYTES, FlatLayout, GradientRun
from parashard.plan.variables import Variable

shapes = st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple), max_size=8)


@given(shapes)
def test_every_variable_has_elements_of_its_own_and_they_are_aligned(found: list[tuple[int, ...]]) -> None:
    variables = {f"v{i}": Variable(f"v{i}", shape) for i, shape in enumerate(found)}
    layout = FlatLayout.of(variables)
    run = np.zeros(layout.elements, np.float32)
    arrays = layout.over(run)
    assert {name: array.shape for name, array in arrays.items()} == {n: v.shape for n, v in variables.items()}
    for number, array in enumerate(arrays.values(), 1):
        assert not array.any()
        array[...] = number
        assert (array.ctypes.data - run.ctypes.data) % ALIGNMENT_BYTES == 0
    assert np.count_nonzero(run) == sum(array.size for array in arrays.values())


def test_rows_lie_beside_the_run() -> None:
    layout = FlatLayout.of({"w": Variable("w", (3, 2))})
    run = np.arange(layout.elements, dtype=np.float32)
    rows = np.ones((2, 4), np.float32)
    both = layout.over(run).with_rows({"users": rows})
    assert both["users"] is rows
    assert both.run is run
    assert np.shares_memory(both["w"], run)


def test_gradients_in_a_run_are_seen_by_name() -> None:
    variables = {
        "w": Variable("w", (3, 2)),
        "unused": Variable("unused", (2,)),
        "fixed": Variable("fixed", (1,), frozen=True),
    }
    layout = FlatLayout.of(variables)
    run = np.arange(layout.elements, dtype=np.float32)
    gradients = GradientRun(layout, run, ["w"], ["w", "unused"])
    assert list(gradients) == ["w", "unused"]
    assert gradients["unused"] is None
    assert np.shares_memory(gradients["w"], run)
    assert gradients["w"].tolist() == layout.over(run)["w"].tolist()
    assert "fixed" not in gradients
    assert gradients.is_of(variables)  # a variable that is trained may have none in a step
    assert not GradientRun(layout, run, ["w"], ["w"]).is_of(variables)
    assert not gradients.is_of({**variables, "unused": Variable("unused", (2,), state="sum")})
    assert not gradients.is_of({"w": variables["w"]})
    assert not GradientRun(layout, run, ["w", "unused", "fixed"], variables).is_of(variables)
    rows = np.ones((2, 4), np.float32)
    assert gradients.with_rows({"users": rows})["users"] is rows
