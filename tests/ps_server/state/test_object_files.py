"""Object files are placed and linked here where that is simple, and by LLVM elsewhere, with the same result."""

from __future__ import annotations

import ctypes
import os
import platform

import llvmlite.binding as llvm
import numpy as np
import pytest

from parashard_server.state.kernels import loops, object_files
from parashard_server.state.kernels.machine_code import ENTRY
from support.kernel_cases import drawn

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="links x86-64 only; LLVM loads the rest")

ADDS_A_CONSTANT = f"""
define double @other(double %x) {{ ret double %x }}
define double @{ENTRY}(double %x) {{
    %sum = fadd double %x, 1.25
    ret double %sum
}}
"""
CALLS_THE_SYSTEM = f"""
declare i32 @getpid()
define i64 @{ENTRY}() {{
    %found = call i32 @getpid()
    %wide = sext i32 %found to i64
    ret i64 %wide
}}
"""
HAS_A_VARIABLE = f"""
@count = internal global i64 7
define i64 @{ENTRY}() {{
    %old = atomicrmw add ptr @count, i64 1 seq_cst
    ret i64 %old
}}
"""


def assembled(text: str) -> bytes:
    """Return the object file of a program in LLVM's language."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(reloc="pic", codemodel="small")
    return machine.emit_object(llvm.parse_assembly(text))


def sums(address: int) -> tuple[bytes, bytes]:
    """Return the bits of `sgd`'s weights, by its machine code, and what it answered."""
    weights, gradient = drawn(1, 1003), drawn(2, 1003)
    called = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.py_object, ctypes.py_object, ctypes.c_char_p)(address)
    answer = called(weights, gradient, np.array([0.05, 0.01, 1.5, 0.25], np.float32).tobytes())
    assert not np.array_equal(weights, drawn(1, 1003))
    return weights.tobytes(), bytes([answer])


def test_linked_here_or_by_llvm_code_has_the_same_bits() -> None:
    code = loops.object_file("sgd")
    assert sums(object_files.load(code, ENTRY)) == sums(object_files._load_by_llvm(code, ENTRY))


def test_code_finds_its_constants_and_its_entry() -> None:
    code = assembled(ADDS_A_CONSTANT)
    placed = object_files.linked(code, ENTRY)
    assert placed is not None
    assert placed[1] > 0
    called = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)(object_files.load(code, ENTRY))
    assert called(2.0) == 3.25


@pytest.mark.parametrize(("program", "answers"), [(CALLS_THE_SYSTEM, [os.getpid()] * 2), (HAS_A_VARIABLE, [7, 8])])
def test_code_that_needs_more_than_itself_is_loaded_by_llvm(program: str, answers: list[int]) -> None:
    code = assembled(program)
    assert object_files.linked(code, ENTRY) is None
    called = ctypes.CFUNCTYPE(ctypes.c_int64)(object_files.load(code, ENTRY))
    assert [called(), called()] == answers


def test_code_of_another_machine_is_not_linked() -> None:
    code = bytearray(assembled(ADDS_A_CONSTANT))
    assert code[18] == 62
    code[18] = 183  # AArch64
    assert object_files.linked(bytes(code), ENTRY) is None


def test_a_function_that_is_not_there_is_not_found() -> None:
    assert object_files.linked(assembled(ADDS_A_CONSTANT), ENTRY[:-1]) is None


def test_loaded_code_can_not_be_written() -> None:
    address = object_files.load(assembled(ADDS_A_CONSTANT), ENTRY)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            ends, rights = line.split()[:2]
            begin, end = (int(place, 16) for place in ends.split("-"))
            if begin <= address < end:
                assert rights == "r-xp"
                return
    raise AssertionError("the code is nowhere")
