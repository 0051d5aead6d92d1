"""Loading of object files: places code in memory that may be executed, and resolves what it refers to.

What LLVM makes of a loop for x86-64 is code and constants that refer to each other by distance; that is done here. Any
other file is LLVM's to load, and importing LLVM costs a start 40 ms and 50 MiB. Knows nothing of what the code does.
Called by `parashard_server.state.kernels.machine_code`.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from typing import Any, NamedTuple

_ELF64 = b"\x7fELF\x02\x01\x01"
_X86_64 = 62
_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QIIq")
_PROGRAM, _SYMBOLS, _RELOCATIONS = 1, 2, 4  # types of sections
_WRITABLE, _ALLOCATED = 1, 2  # flags of sections
_BY_DISTANCE = {2, 4}  # types of relocations: R_X86_64_PC32 and R_X86_64_PLT32

_loaded: list[Any] = []  # code is never unloaded: nobody knows that no thread is in it


class _Section(NamedTuple):
    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_bytes: int


class _Symbol(NamedTuple):
    name: int
    info: int
    other: int
    section: int
    value: int
    size: int


def load(code: bytes, entry: str) -> int:
    """Load an object file for as long as the process lives; return the address of its function `entry`.

    Raises
    ------
    OSError
        If this process may have no executable memory.
    """
    placed = linked(code, entry)
    if placed is None:
        return _load_by_llvm(code, entry)
    image, start = placed
    return _executable(image) + start


def linked(code: bytes, entry: str) -> tuple[bytes, int] | None:
    """Return the code of an object file with its references resolved, and where in it `entry` is.

    Runs at any address that is a multiple of a page.

    Returns
    -------
    tuple of (bytes, int), or None
        None for a file that is not of x86-64, or refers to what it does not have, or otherwise than by distance.
    """
    machine, sections_at, sections_count = (_HEADER.unpack_from(code)[field] for field in (1, 5, 11))
    if not code.startswith(_ELF64) or machine != _X86_64:
        return None
    sections = [_Section(*_SECTION.unpack_from(code, sections_at + _SECTION.size * i)) for i in range(sections_count)]
    image, places = bytearray(), dict[int, int]()
    for index, section in enumerate(sections):
        if section.type == _PROGRAM and section.flags & _ALLOCATED and not section.flags & _WRITABLE:
            image += bytes(-len(image) % max(1, section.alignment))
            places[index] = len(image)
            image += _content(code, section)
    table = next(section for section in sections if section.type == _SYMBOLS)
    symbols = [_Symbol(*fields) for fields in _SYMBOL.iter_unpack(_content(code, table))]
    for section in sections:
        if section.type != _RELOCATIONS or section.info not in places:
            continue
        for offset, kind, number, addend in _RELOCATION.iter_unpack(_content(code, section)):
            symbol = symbols[number]
            if kind not in _BY_DISTANCE or symbol.section not in places:
                return None
            at = places[section.info] + offset
            struct.pack_into("<i", image, at, places[symbol.section] + symbol.value + addend - at)
    names = _content(code, sections[table.link])
    for symbol in symbols:
        if names.startswith(entry.encode() + b"\0", symbol.name) and symbol.section in places:
            return bytes(image), places[symbol.section] + symbol.value
    return None


def _content(code: bytes, section: _Section) -> bytes:
    return code[section.offset : section.offset + section.size]


def _executable(image: bytes) -> int:
    """Copy code into memory of its own, which then can be executed and no longer written; return its address."""
    memory = mmap.mmap(-1, len(image), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE)
    memory[:] = image
    first = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(first)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if protect(address, len(image), mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        raise OSError(ctypes.get_errno(), "the system refuses executable memory, which the kernels need")
    _loaded.append((memory, first))
    return address


def _load_by_llvm(code: bytes, entry: str) -> int:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _loaded.append(engine)
    return int(engine.get_function_address(entry))
