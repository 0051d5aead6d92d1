"""Variables: initial values are a function of (seed, name, element) alone, with bits that never change."""

import hashlib
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.errors import ConfigurationError
from parashard.plan import variables as subject
from parashard.plan.variables import (
    Initializer,
    Variable,
    glorot_uniform,
    he_normal,
    in_name_order,
    initial_rows,
    values_sha256,
)

GOLDEN = {
    "zeros": [0] * 8,
    "constant": [0x3F000000] * 8,
    "uniform": [
        0x3ED92C43, 0xBDAA5AAB, 0x3E89CEAB, 0xBECBB453, 0x3CDCAB2A, 0xBEA78B9F, 0x3EB16CAE, 0x3E9BE2EC,
    ],
    "normal": [
        0xBC7C4000, 0xBE94B400, 0x3F2E0B80, 0xBD507800, 0x3E9CEC00, 0xBEAAA600, 0x3F481F00, 0x3DD52000,
    ],
}  # fmt: skip
KINDS = sorted(GOLDEN)


def drawn(kind: str, shape: tuple[int, ...], scale: float = 1.0, seed: int = 0, name: str = "w") -> np.ndarray:
    return initial_rows(Variable(name, shape, Initializer(kind, scale)), seed, 0, shape[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_the_first_release(kind):
    values = drawn(kind, (4, 2), 0.5, seed=7, name="dense_0.weight")
    assert values.view(np.uint32).ravel().tolist() == GOLDEN[kind]


@given(
    st.sampled_from(KINDS),
    st.integers(1, 30),
    st.lists(st.integers(1, 4), max_size=2),
    st.integers(0, 2**63),
    st.lists(st.integers(0, 30), max_size=4),
)
def test_any_partitioning_gives_the_same_bits(kind, rows, rest, seed, cuts):
    variable = Variable("w", (rows, *rest), Initializer(kind, 0.3))
    bounds = sorted({0, rows, *(cut for cut in cuts if cut < rows)})
    pieces = [initial_rows(variable, seed, a, b) for a, b in itertools.pairwise(bounds)]
    whole = initial_rows(variable, seed, 0, rows)
    assert np.concatenate(pieces).tobytes() == whole.tobytes()
    assert whole.shape == variable.shape
    assert whole.dtype == np.float32


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_the_scratch_memory_leave_no_seam(kind, monkeypatch):
    whole = drawn(kind, (50, 3))
    monkeypatch.setattr(subject, "_INITIAL_BLOCK_ELEMENTS", 7)
    assert drawn(kind, (50, 3)).tobytes() == whole.tobytes()


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_seed_and_name_change_every_value(kind):
    base = drawn(kind, (500,))
    for other in (drawn(kind, (500,), seed=1), drawn(kind, (500,), name="v")):
        assert np.mean(base == other) < 0.01
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.15


def test_uniform_has_its_moments_and_stays_in_its_range():
    values = drawn("uniform", (200_000,), 2.0).astype(np.float64)
    assert -2.0 <= values.min() < -1.999
    assert 1.999 < values.max() <= 2.0  # 2.0 itself only by rounding to float32
    assert abs(values.mean()) < 4 * (2.0 / math.sqrt(3)) / math.sqrt(len(values))
    assert values.var() == pytest.approx(4.0 / 3.0, rel=0.01)


def test_normal_has_its_moments_and_shape():
    values = drawn("normal", (200_000,), 0.5).astype(np.float64) / 0.5
    assert abs(values.mean()) < 4 / math.sqrt(len(values))
    assert values.var() == pytest.approx(1.0, rel=0.01)
    assert abs((values**3).mean()) < 0.03
    assert np.mean(np.abs(values) < 1) == pytest.approx(0.683, abs=0.01)
    assert np.abs(values).max() < 6.0
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01  # neighbours are independent


def test_the_named_initializers_are_those_of_the_papers():
    assert glorot_uniform(30, 20) == Initializer("uniform", math.sqrt(6 / 50))
    assert he_normal(50) == Initializer("normal", 0.2)


def test_a_variable_knows_its_sizes():
    kernel = Variable("conv.kernel", (8, 3, 3))
    assert (kernel.rows, kernel.row_elements, kernel.elements) == (8, 9, 72)
    assert (Variable("bias", (5,)).row_elements, Variable("bias", (5,)).elements) == (1, 5)


def test_name_order_is_the_order_of_digests():
    found = in_name_order({name: Variable(name, (1,)) for name in ("b", "a.10", "B", "a.9")})
    assert [variable.name for variable in found] == ["B", "a.10", "a.9", "b"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Variable("", (1,)), "1 to 200 characters"),
        (lambda: Variable("x" * 201, (1,)), "1 to 200 characters"),
        (lambda: Variable("x" * 5000, (1,)), r"1 to 200 characters, found 'x{39}\.\.\.$"),
        (lambda: Variable("w", ()), "there must be one"),
        (lambda: Variable("w", (3, 0)), "at least 1"),
        (lambda: Variable("w", ((3,), 1)), r"variable 'w': .* whole number.*, found \(\(3,\), 1\)"),
        (lambda: Variable("w", 3), r"variable 'w': .* found 3"),
        (lambda: Variable("w", "34"), r"variable 'w': .* found '34'"),
        (lambda: Variable("w", (2.5,)), r"found \(2.5,\)"),
        (lambda: Variable("w", (True,)), r"found \(True,\)"),
        (lambda: Variable("w", (None, 3)), r"found \(None, 3\)"),
        (lambda: Variable(3, (1,)), "name must be text of 1 to 200 characters, found 3"),
        (lambda: Variable("w", (1,), "zeros"), r"initializer must be an Initializer.*, found 'zeros'"),
        (lambda: Variable("w", (1,), frozen="no"), "frozen must be True or False, found 'no'"),
        (lambda: Variable("w", (1,), decay=1), "decay must be True or False, found 1"),
        (lambda: Variable("w", (1,), encoding=None), "encoding must be text, found None"),
        (lambda: Variable("w", (1,), learning_rate_factor="2"), "learning_rate_factor"),
        (lambda: Variable("w", (1,), state="mean"), "variable 'w': state must be average:M with 0 < M <= 1"),
        (lambda: Variable("w", (8,), state="counter"), "a counter's shape ends with 8, its bytes; found \\(8,\\)"),
        (lambda: Variable("w", (8, 1), state="counter"), "a counter's shape ends with 8, its bytes; found \\(8, 1\\)"),
        (lambda: Variable("w", (1,), state="sum", encoding="int8"), "travels as float32, found int8"),
        (lambda: Initializer("normal", "0.1"), "finite"),
        (lambda: Initializer(None), "allowed: zeros, constant, uniform, normal"),
        (lambda: Initializer([]), "allowed: zeros, constant, uniform, normal"),
        (lambda: Variable("w", (1,), learning_rate_factor=-1.0), "learning_rate_factor"),
        (lambda: Variable("w", (1,), learning_rate_factor=math.nan), "learning_rate_factor"),
        (lambda: Initializer("gaussian"), "allowed: zeros, constant, uniform, normal"),
        (lambda: Initializer("normal", math.inf), "finite"),
    ],
)
def test_what_cannot_be_is_refused(make, says):
    with pytest.raises(ConfigurationError, match=says):
        make()


def test_a_shape_may_be_a_list_and_of_numpys_integers():
    variable = Variable("w", [np.int64(3), 2])
    assert variable.shape == (3, 2)
    assert [type(n) for n in variable.shape] == [int, int]
    assert variable == Variable("w", (3, 2))


def test_the_digest_is_of_the_values_in_name_order() -> None:
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([7.0, 8.0], np.float32)
    expected = hashlib.sha256(b"".join(np.float32(v).astype("<f4").tobytes() for v in [*range(6), 7, 8])).hexdigest()
    assert values_sha256({"a": a, "b": b}) == expected
    assert values_sha256({"b": b, "a": a}) == expected, "whatever the order"
    assert values_sha256({"a": np.asfortranarray(a), "b": b}) == expected, "however they lie in memory"
    assert values_sha256({"a": a.astype(">f4"), "b": b}) == expected, "on any machine"
    assert values_sha256({"a": b, "b": a}) != expected


def test_one_bit_changes_the_digest() -> None:
    assert values_sha256({"a": np.array([0.0], np.float32)}) != values_sha256({"a": np.array([-0.0], np.float32)})


def test_a_learning_rate_factor_of_minus_zero_is_zero() -> None:
    assert math.copysign(1.0, Variable("w", (1,), learning_rate_factor=-0.0).learning_rate_factor) == 1.0
