"""A cache of examples: a folder with one .npy file for each array, written once and then memory-mapped.

Invariant: no file is read before all are complete, and none is overwritten.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from parashard.data.base import kind_of_failure
from parashard.data.tree import Tree, leaves, map_leaves, rows_of
from parashard.errors import BadData
from parashard.process.durable import write_durably

RECORD_FILE = "examples.json"
"""The manifest, written last, which makes a cache valid: number of examples, tree of arrays, and origin."""


def read_cache(folder: Path, origin: str) -> Tree | None:
    """Return the arrays of a cache, mapped from its files; None: there is none."""
    record = folder / RECORD_FILE
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        content = json.loads(record.read_text())
        if content["origin"] != origin:
            raise BadData(f"{folder}: has examples of other data: delete the folder, or name another")
        return _tree(content["form"], folder)
    except FileNotFoundError:
        raise BadData(f"{folder}: is no folder of cached examples (it lacks {RECORD_FILE}): name another") from None
    except OSError as error:
        raise kind_of_failure(error)(f"{folder}: cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BadData(f"{folder}: is damaged ({error}): delete it, and it is written again") from None


class CacheWriter:
    """Context manager that writes a cache into a temporary folder beside its own, and renames that when complete."""

    def __init__(self, folder: Path, origin: str) -> None:
        self._folder, self._origin = folder, origin
        self._beside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        self._files: list[BinaryIO] = []
        self._rows = 0
        self._first: Tree = None

    def __enter__(self) -> Self:
        self._beside.mkdir(parents=True)
        return self

    def write(self, examples: Tree) -> None:
        """Append examples: arrays of the same form as before, with any number of rows."""
        if self._first is None:
            self._first = map_leaves(lambda array: array[:0], examples)
            for number, (_, array) in enumerate(leaves(examples)):
                self._files.append((self._beside / _file(number)).open("wb"))
                _write_header(self._files[-1], array, 0)
        for file, (_, array) in zip(self._files, leaves(examples), strict=True):
            file.write(np.ascontiguousarray(array).data)
        self._rows += rows_of(examples)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            for file in self._files:
                file.close()
            shutil.rmtree(self._beside, ignore_errors=True)

    def _commit(self) -> None:
        if not self._rows:
            raise BadData(f"{self._folder}: nothing is written: there are no examples")
        for file, (_, array) in zip(self._files, leaves(self._first), strict=True):
            file.seek(0)
            _write_header(file, array, self._rows)
            file.flush()
            os.fsync(file.fileno())
        record = {"examples": self._rows, "origin": self._origin, "form": _form(self._first, itertools.count())}
        write_durably(self._beside / RECORD_FILE, json.dumps(record, indent=1).encode())
        try:
            self._beside.rename(self._folder)
        except OSError:
            if not (self._folder / RECORD_FILE).exists():  # if it exists, another process renamed its copy first
                raise


def _write_header(file: BinaryIO, array: Any, rows: int) -> None:
    """Write the header of a .npy file, whose length does not depend on the number of rows."""
    described = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False}
    np.lib.format.write_array_header_1_0(file, {**described, "shape": (rows, *array.shape[1:])})


def _form(tree: Tree, number: Iterator[int]) -> Any:
    """Return the form of a tree in JSON; a leaf is the name of its file."""
    if isinstance(tree, dict):
        return {"dict": {key: _form(below, number) for key, below in tree.items()}}
    if isinstance(tree, tuple | list):
        return {"list" if isinstance(tree, list) else "tuple": [_form(below, number) for below in tree]}
    return _file(next(number))


def _file(number: int) -> str:
    return f"{number}.npy"


def _tree(form: Any, folder: Path) -> Tree:
    if isinstance(form, str):
        return np.load(folder / Path(form).name, mmap_mode="r", allow_pickle=False)
    [(kind, below)] = form.items()
    if kind == "dict":
        return {key: _tree(one, folder) for key, one in below.items()}
    made = [_tree(one, folder) for one in below]
    return made if kind == "list" else tuple(made)
