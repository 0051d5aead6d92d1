"""Update rules flush denormals: the bits of the reference in every form, and no thread's mode is changed by it."""

from __future__ import annotations

import platform
import re
import threading
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llvmlite import ir

from parashard.process import lanes
from parashard.process.cached_code import _type
from parashard_server.state.kernels import fused
from parashard_server.state.kernels.compiling import LOOPS, begin_flushing, end_flushing, flush_denormals, restore_mode
from parashard_server.state.kernels.rules import RULES
from parashard_server.state.kernels.scalars import BLOCK_ELEMENTS
from support import reference_rules as reference
from support.frozen_rules import RULES as VARIANTS
from support.hosted_cuda import Hosted
from support.kernel_cases import ADAM, assert_same_bits, update
from support.tiers import fewer
from support.waiting import DEADLINE_S

SMALLEST = np.finfo(np.float32).tiny
DENORMAL = np.float32(1e-40)
ROW, SIZE = 6, 30
ON_A_GPU = [rule for rule in VARIANTS if not rule.endswith("by row") and rule != "rowwise_adagrad"]
ARITHMETIC = re.compile(r"\tv?(u?comi|cmp|cvt[a-z]*2|f[a-z]+|add|sub|mul|div|sqrt|max|min)[a-z]*\d*[ps][sd]\t")
FLUSHING = [
    name for name in LOOPS if name.removesuffix("_by_row") in RULES or name in ("lamb_moments", "lamb_step", "decay")
]
ASSEMBLED = ("adam", "adamw_by_row", "lamb_step", "decay")
LATER = pytest.mark.full("a loop is compiled anew; what each one flushes is compared with the reference, here as well")

NEAR_ZERO = np.array(
    [0.0, -0.0, 1e-45, -1e-45, 3e-39, -1.1754942e-38, SMALLEST, -SMALLEST, 1.2e-38, -2.3e-38, 1e-30, 1e-23, -1e-20,
     2e-19, 1e-12, -1e-6, 0.125, -1.0, 3.0, 1e3],
    np.float32,
)  # fmt: skip
SCALARS: dict[str, list[float]] = {
    "learning_rate": [0.0, 1e-42, 1e-20, 0.05],
    "weight_decay": [0.0, 1e-41, 0.01],
    "clip": [np.inf, 1e-39, 1e-30, 1.5],
    "scale": [1.0, 0.25, 1e-10],
}
vectors = st.lists(st.sampled_from(NEAR_ZERO.tolist()), min_size=SIZE, max_size=SIZE).map(
    lambda values: np.array(values, np.float32)
)
settings = st.fixed_dictionaries({name: st.sampled_from(allowed) for name, allowed in SCALARS.items()})


def moved(kernels: Any, variant: str, of_variant: list[np.ndarray], scalars: dict[str, float]) -> list[np.ndarray]:
    """Return [weights, *slots] after two updates from given weights, two gradients, and slots of at least 0."""
    slots, own = VARIANTS[variant]
    weights, *gradients = (vector.copy() for vector in of_variant[:3])
    length = SIZE // ROW if variant == "rowwise_adagrad" else SIZE
    state = [np.abs(vector[:length]) for vector in of_variant[3 : 3 + slots]]
    rule = rule_of(variant)
    for t, gradient in enumerate(gradients, 1):
        counter = np.array([1, 2, 3, 5000, 70], np.uint32) if variant.endswith("by row") else t
        with np.errstate(all="ignore"):
            update(kernels, rule, weights, gradient, *state, t=counter, **scalars | own)
    return [weights, *state]


def rule_of(variant: str) -> str:
    """Return the rule that a variant is of."""
    return variant.partition(",")[0].removesuffix(" by row")


def denormals(arrays: list[np.ndarray]) -> int:
    """Return how many numbers are denormal."""
    return sum(int(((array != 0) & (np.abs(array) < SMALLEST)).sum()) for array in arrays)


@pytest.mark.parametrize("variant", VARIANTS)
@given(given_=st.lists(vectors, min_size=6, max_size=6), scalars=settings)
@fewer(4)
def test_compiled_loops_flush_as_the_reference_does(
    variant: str, given_: list[np.ndarray], scalars: dict[str, float]
) -> None:
    found = moved(fused, variant, given_, scalars)
    assert_same_bits(found, moved(reference, variant, given_, scalars))
    if scalars["learning_rate"] >= RULES[rule_of(variant)].least_rate:
        assert not denormals(found)


def of_seed(seed: int) -> tuple[list[np.ndarray], dict[str, float]]:
    """Return six vectors with many denormals, and scalars."""
    rng = np.random.default_rng(seed)
    values = [rng.choice(NEAR_ZERO, SIZE) for _ in range(6)]
    return values, {name: float(rng.choice(allowed)) for name, allowed in SCALARS.items()}


@pytest.mark.parametrize("variant", ON_A_GPU)
def test_the_source_of_a_gpu_flushes_as_the_reference_does(on_this_cpu: Hosted, variant: str) -> None:
    for seed in range(30):
        assert_same_bits(moved(on_this_cpu, variant, *of_seed(seed)), moved(reference, variant, *of_seed(seed)))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ON_A_GPU)
def test_a_gpu_flushes_as_the_reference_does(on_a_device: Hosted, variant: str) -> None:
    for seed in range(30):
        assert_same_bits(moved(on_a_device, variant, *of_seed(seed)), moved(reference, variant, *of_seed(seed)))


def product(kernels: Any, a: float, b: float) -> float:
    """Return a times b by an update of a weight of 0."""
    weights = np.zeros(1, np.float32)
    plain = {"weight_decay": 0.0, "clip": np.inf, "scale": 1.0}
    update(kernels, "sgd", weights, np.array([-b], np.float32), learning_rate=a, **plain)
    return float(weights[0])


ON_THE_EDGE = {
    "half a unit below": (1 - 2.0**-24, SMALLEST, 0.0),  # a denormal of as many bits would be rounded up from here
    "less than that": (1 - 2.0**-23, SMALLEST * (1 + 2.0**-23), SMALLEST),  # Arm flushes it: it does not round before
}
"""Products that the smallest normal number is next to: factors, and what they give."""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Arm compares before it rounds")
@pytest.mark.parametrize("edge", ON_THE_EDGE)
def test_a_product_is_rounded_before_it_is_compared(on_this_cpu: Hosted, edge: str) -> None:
    a, b, expected = ON_THE_EDGE[edge]
    assert Fraction(a) * Fraction(float(b)) < Fraction(float(SMALLEST))
    assert [product(kernels, a, b) for kernels in (reference, fused, on_this_cpu)] == [expected] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("edge", ON_THE_EDGE)
def test_a_gpu_flushes_such_a_product_or_rounds_it_up(on_a_device: Hosted, edge: str) -> None:
    assert product(on_a_device, *ON_THE_EDGE[edge][:2]) in (0.0, SMALLEST)


@pytest.mark.parametrize("kernels", [fused, reference])
def test_a_slot_decays_to_zero(kernels: Any) -> None:
    weights, m, v = np.ones((3, 20), np.float32)
    plain = {"learning_rate": 1e-3, "weight_decay": 0.0, "clip": np.inf, "scale": 1.0}
    for t in range(1, 1000):
        update(kernels, "adam", weights, np.zeros(20, np.float32), m, v, t=t, **plain | ADAM)
    assert not m.any()
    assert (v > 0.3).all()


@pytest.mark.parametrize("kernels", [fused, reference])
def test_sums_of_gradients_keep_denormals(kernels: Any) -> None:
    total = np.full(9, DENORMAL)
    kernels.accumulate(total, total.copy())
    assert (total == DENORMAL + DENORMAL).all()
    assert denormals([total]) == 9


# --- the mode of a thread ---


@numba.njit
def _set_mode(mode):  # type: ignore[no-untyped-def]
    restore_mode(mode)


@numba.njit
def _mode():  # type: ignore[no-untyped-def]
    before = flush_denormals()
    restore_mode(before)
    return before


def mode() -> int:
    """Return this thread's mode, without the exceptions that were seen."""
    return int(_mode()) & ~0x3F


@pytest.fixture
def other_mode() -> Iterator[int]:
    """Give this thread another mode, which rounds up."""
    before = mode()
    rounding_up = before | (0x4000 if platform.machine() == "x86_64" else 1 << 22)
    _set_mode(np.uint64(rounding_up))
    yield rounding_up
    _set_mode(np.uint64(before))


def every_update() -> None:
    """Call every loop that flushes."""
    for variant in VARIANTS:
        moved(fused, variant, *of_seed(1))
    fused.decay(np.ones(3, np.float32), 0.1)


def test_the_callers_mode_is_as_it_was() -> None:
    before = mode()
    every_update()
    assert mode() == before
    assert np.float32(1e-45) * np.float32(1.0) == np.float32(1e-45) != 0


def test_so_is_one_of_its_own(other_mode: int) -> None:
    every_update()
    assert mode() == other_mode


def test_each_lane_flushes_and_has_its_mode_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "SHARED_MIN_BYTES", 8 * BLOCK_ELEMENTS)
    monkeypatch.setattr(lanes, "RUN_MIN_BYTES", 4 * BLOCK_ELEMENTS)
    three_lanes = lanes.Lanes(3)
    monkeypatch.setattr(fused, "_lanes", three_lanes)
    modes: dict[int, int] = {}
    weights, velocity = np.ones(9 * BLOCK_ELEMENTS, np.float32), np.full(9 * BLOCK_ELEMENTS, SMALLEST)
    code = LOOPS["momentum"].code
    three = threading.Barrier(3)

    def momentum(*given: Any) -> None:
        if threading.get_ident() not in modes:
            modes[threading.get_ident()] = 0
            three.wait(DEADLINE_S)  # so that each lane has a run
        code(*given)
        modes[threading.get_ident()] = mode()

    monkeypatch.setitem(vars(LOOPS["momentum"]), "code", momentum)
    update(
        fused, "momentum", weights, np.zeros_like(weights), velocity, momentum=0.9, rate_in_velocity=0.0,
        learning_rate=0.1, weight_decay=0.0, clip=np.inf, scale=1.0,
    )  # fmt: skip
    three_lanes.close()
    assert not velocity.any()
    assert list(modes.values()) == [mode()] * 3


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads the assembler of x86-64")
@pytest.mark.parametrize("name", [name if name in ASSEMBLED else pytest.param(name, marks=LATER) for name in FLUSHING])
def test_no_arithmetic_is_outside_of_the_mode(name: str) -> None:
    declared = LOOPS[name]
    code = numba.njit(nogil=True, error_model="numpy")(declared.function)
    code.compile(tuple(map(_type, declared.kinds)))
    (text,) = code.inspect_asm().values()
    lines = text[: text.index("retq")].splitlines()  # the loop; its wrapper for Python converts scalars
    saved, begin, end = (at for at, line in enumerate(lines) if "mxcsr" in line)
    assert ["stmxcsr" in lines[saved], "ldmxcsr" in lines[begin], "ldmxcsr" in lines[end]] == [True] * 3
    arithmetic = [at for at, line in enumerate(lines) if ARITHMETIC.search(line)]
    assert arithmetic
    assert begin < min(arithmetic)
    assert max(arithmetic) < end


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ("aarch64", ["mrs FPCR", "msr FPCR", "ldr", "fmul", "str", "msr FPCR"]),
        ("x86_64", ["stmxcsr", "ldmxcsr", "mulss", "movss", "ldmxcsr"]),
        ("riscv64", ["fmul.s"]),
    ],
)
def test_each_processor_has_its_own_mode_or_none(processor: str, expected: list[str]) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    number = ir.FloatType()
    module = ir.Module()
    module.triple = f"{processor}-unknown-linux-gnu"
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [number.as_pointer(), number]), "doubled")
    builder = ir.IRBuilder(function.append_basic_block())
    before = begin_flushing(builder)
    builder.store(builder.fmul(builder.load(function.args[0]), function.args[1]), function.args[0])
    end_flushing(builder, before)
    builder.ret_void()
    features = "+f" if processor == "riscv64" else ""
    machine = llvm.Target.from_triple(module.triple).create_target_machine(opt=3, features=features)
    text = machine.emit_assembly(llvm.parse_assembly(str(module)))
    words = re.findall(r"\t(m[rs][rs]|st?mxcsr|ldmxcsr|ldr|str|fmul\.s|fmul|mulss|movss)\t(.*)", text)
    found = [f"{word} FPCR" if "FPCR" in of else word for word, of in words]
    assert found == expected
