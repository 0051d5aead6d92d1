"""Scheduled calls: functions by name, and their arguments and results as files in the run folder.

A worker runs the same script, so it finds a function by module and name; no code is sent. A value consists of arrays
and JSON values; each is one safetensors file, whose array `json` has the structure. Nothing is pickled. Files are
written atomically.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from parashard.api.script import CALLS
from parashard.errors import BadData, ConfigurationError
from parashard.store.arrays import from_bytes, to_bytes

VALUE_BYTES_MAX = 256 << 20
DEPTH_MAX = 64
_JSON = "json"
_CALL, _RESULT, _ERROR = "call", "result", "error"
_ALLOWED = "allowed are arrays, numbers, text, None, and lists, tuples and dicts (by text) of them"
_ITERATORS = itertools.count()
Keys = Callable[..., Mapping[str, Any]]


class Function:
    """A function that can be scheduled, with `pushes` and `keys` of `ps.function`; a direct call runs it locally."""

    def __init__(self, called: Callable[..., Any], pushes: int, keys: Keys | None = None) -> None:
        functools.update_wrapper(self, called)
        self.called = called
        self.pushes = pushes
        self.keys = keys

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.called(*args, **kwargs)


@overload
def function(called: Callable[..., Any]) -> Function: ...


@overload
def function(*, pushes: int = 1, keys: Keys | None = None) -> Callable[[Callable[..., Any]], Function]: ...


def function(
    called: Callable[..., Any] | None = None, *, pushes: int = 1, keys: Keys | None = None
) -> Function | Callable[[Callable[..., Any]], Function]:
    """Mark a function of the script, or of a module that it imports, for `coordinator.schedule`.

    Its first argument is the weights by name, pulled for this call: read-only NumPy arrays of float32, valid until it
    returns. The other arguments are those given to `schedule`.

    Parameters
    ----------
    pushes : int
        1: it returns (result, gradients); gradients, by name, are applied exactly once, and omitted ones are zero. 0:
        it returns a result, and no weights change.
    keys : callable (*args, **kwargs) -> mapping of str to array of whole numbers, optional
        Returns the ids of embedding rows that a call needs, by table, in any shape; its arguments are those after the
        weights. The weights then include, under the table's name, the row of each id, shape (*ids, dimension); a
        gradient of that name has the same shape.

    Examples
    --------
    >>> @function
    ... def train_step(weights, x, y):
    ...     error = x @ weights["w"] - y
    ...     return float((error**2).mean()), {"w": 2 * x.T @ error / len(x)}
    """
    if pushes not in (0, 1):
        raise ConfigurationError(f"@ps.function(pushes={pushes!r}): allowed is 1, which is the default, or 0")

    if keys is not None and not callable(keys):
        raise ConfigurationError(f"@ps.function(keys={keys!r}): keys is a function of the arguments")

    def marked(called: Callable[..., Any]) -> Function:
        return Function(called, pushes, keys)

    return marked if called is None else marked(called)


def names_now() -> frozenset[str]:
    """Return the names that the script has defined at its top level so far."""
    return frozenset(vars(sys.modules["__main__"]))


def name_of(called: Any, defined: frozenset[str], what: str) -> str:
    """Return the name by which a worker finds a function; refuse one not `defined` before the coordinator."""
    module, name = getattr(called, "__module__", None), getattr(called, "__qualname__", None)
    if module is None or name is None:
        raise ConfigurationError(f"{what} is a function with a name, found {type(called).__name__}")
    if "<" in name or getattr(_module(module), name.partition(".")[0], None) is None:
        raise ConfigurationError(
            f"{what}: {name} is not at the top level of {module}, and a worker finds a function by its name: define it "
            "there, and give it as arguments what it needs"
        )
    if found(f"{module}:{name}") is not called:
        raise ConfigurationError(f"{what}: {module} has something else by the name {name}")
    if module == "__main__" and name.partition(".")[0] not in defined:
        raise ConfigurationError(
            f"{what}: {name} is defined after ps.Coordinator(...), where a worker of this script begins its work: "
            "define it before"
        )
    return f"{module}:{name}"


def found(name: str) -> Any:
    """Return the object with a name such as "module:function", or None."""
    module, _, path = name.partition(":")
    here: Any = _module(module)
    for part in path.split("."):
        here = getattr(here, part, None)
    return here


def _module(name: str) -> Any:
    return sys.modules[name] if name in sys.modules else importlib.import_module(name)


# --- arguments and results ---


@dataclass(frozen=True)
class PerWorker:
    """An argument that stands for a dataset that each worker makes once, or for an iterator over it.

    Parameters
    ----------
    number : int
        Number of the dataset.
    function : str
        Name of the function without arguments that makes it.
    iterator : int, optional
        Number of an iterator over it; None: the dataset itself.
    """

    number: int
    function: str
    iterator: int | None = None

    def __iter__(self) -> PerWorker:
        """Return a new iterator, which starts from the beginning in each worker; an iterator returns itself."""
        return self if self.iterator is not None else replace(self, iterator=next(_ITERATORS))

    def __next__(self) -> Any:
        """Refuse: only workers have elements."""
        raise ConfigurationError(
            "a per-worker dataset has its elements in workers: pass it to coordinator.schedule as an argument"
        )


class FunctionCall(NamedTuple):
    """A scheduled function's name and arguments."""

    function: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Failure(NamedTuple):
    """The error of a call: a line for people, and the name of the error's class ("": not known)."""

    says: str
    kind: str = ""


class Calls:
    """The files of a run's calls, by their numbers."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / CALLS
        self._writes = itertools.count()

    def make(self) -> None:
        """Make the folder."""
        self._folder.mkdir(exist_ok=True)

    def write(self, number: int, call: FunctionCall) -> int:
        """Write a call, and return its length in bytes."""
        content = encoded({"function": call.function, "args": list(call.args), "kwargs": dict(call.kwargs)})
        self._replace(number, _CALL, content)
        return len(content)

    def read(self, number: int) -> FunctionCall:
        """Return a call; raise BadData if its file is missing or damaged."""
        value = self._read(number, _CALL)
        return FunctionCall(value["function"], tuple(value["args"]), value["kwargs"])

    def write_result(self, number: int, result: Any) -> None:
        """Write the result of a call, replacing an earlier attempt's result or error."""
        self._replace(number, _RESULT, encoded(result))
        self._path(number, _ERROR).unlink(missing_ok=True)

    def write_error(self, number: int, says: str, kind: str = "") -> None:
        """Write the error of a call: a line for people, and the name of the error's class."""
        self._replace(number, _ERROR, encoded([says, kind]))

    def error(self, number: int) -> Failure | None:
        """Return the error of a call, or None."""
        if not self._path(number, _ERROR).exists():
            return None
        return Failure(*self._read(number, _ERROR))

    def result(self, number: int) -> Any:
        """Return the result of a call."""
        return self._read(number, _RESULT)

    def drop_result(self, number: int) -> None:
        """Remove the result or the error of a call."""
        for kind in (_RESULT, _ERROR):
            self._path(number, kind).unlink(missing_ok=True)

    def drop_calls(self, unused: Callable[[int], bool]) -> int:
        """Remove unused calls; return the size of the others in bytes."""
        return self._drop(unused, _CALL)

    def drop_results(self, unused: Callable[[int], bool]) -> None:
        """Remove unused results and errors."""
        self._drop(unused, _RESULT, _ERROR)

    def _drop(self, unused: Callable[[int], bool], *kinds: str) -> int:
        kept_bytes = 0
        for entry in os.scandir(self._folder):
            number, _, kind = entry.name.partition(".")
            if kind in kinds and number.isdecimal():
                if unused(int(number)):
                    Path(entry.path).unlink(missing_ok=True)
                else:
                    kept_bytes += entry.stat().st_size
        return kept_bytes

    def _path(self, number: int, kind: str) -> Path:
        return self._folder / f"{number}.{kind}"

    def _replace(self, number: int, kind: str, content: bytes) -> None:
        path = self._path(number, kind)
        temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}-{next(self._writes)}")
        temporary.write_bytes(content)
        temporary.replace(path)

    def _read(self, number: int, kind: str) -> Any:
        path = self._path(number, kind)
        try:
            return decoded(path.read_bytes())
        except OSError as error:
            raise BadData(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise BadData(f"{path}: is damaged: {error}") from None


# --- values ---


def encoded(value: Any) -> bytes:
    """Encode a value as a file's content; raise ConfigurationError for other types, or if it is too large."""
    arrays: dict[str, NDArray[Any]] = {}
    tree = _tree(value, arrays, 0)
    size_bytes = sum(array.nbytes for array in arrays.values())
    if size_bytes > VALUE_BYTES_MAX:
        raise ConfigurationError(
            f"the arrays of one call have {size_bytes:,} bytes; allowed are {VALUE_BYTES_MAX:,}: have each worker read "
            "large data itself, by create_per_worker_dataset"
        )
    try:
        text = json.dumps(tree).encode()
    except ValueError as error:  # Python refuses integers with more than a few thousand digits
        raise ConfigurationError(f"a value cannot be written: {error}") from None
    return bytes(to_bytes({**arrays, _JSON: np.frombuffer(text, np.uint8)}))


def decoded(content: bytes) -> Any:
    """Decode a file's content to a value with new arrays."""
    arrays = from_bytes(content)
    return _value(json.loads(arrays[_JSON].tobytes()), arrays)


def numpy_of(value: Any) -> NDArray[Any]:
    """Convert an array of any framework to NumPy; bfloat16, which NumPy lacks, becomes float32."""
    if hasattr(value, "detach"):  # a PyTorch tensor on any device
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    if isinstance(value, np.ma.MaskedArray):
        raise ConfigurationError("found a masked array, and a mask would be lost: .filled(value) says what is there")
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _tree(value: Any, arrays: dict[str, NDArray[Any]], depth: int) -> Any:  # one for each kind
    if depth > DEPTH_MAX:
        raise ConfigurationError(f"a value is nested more than {DEPTH_MAX} times")
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, np.float64)):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, PerWorker):
        return {"per_worker": [value.number, value.function, value.iterator]}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_tree(item, arrays, depth + 1) for item in value]}
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise ConfigurationError(f"a dict has a key that is no text; {_ALLOWED}")
        return {"dict": {name: _tree(item, arrays, depth + 1) for name, item in value.items()}}
    array = numpy_of(value) if hasattr(value, "__array__") else None
    if array is None or array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        found = f"an array of {array.dtype}" if array is not None else type(value).__name__
        found += ", which is there once fetch() is called" if hasattr(value, "fetch") else ""
        raise ConfigurationError(f"found {found}; {_ALLOWED}")
    arrays[str(len(arrays))] = np.array(array, order="C")
    return {"scalar" if isinstance(value, np.generic) else "array": str(len(arrays) - 1)}


def _value(tree: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:  # noqa: PLR0911  # one for each kind
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    match kind:
        case "list":
            return [_value(item, arrays) for item in content]
        case "tuple":
            return tuple(_value(item, arrays) for item in content)
        case "dict":
            return {name: _value(item, arrays) for name, item in content.items()}
        case "array":
            return arrays[content]
        case "scalar":
            return arrays[content][()]
        case "per_worker":
            return PerWorker(*content)
    raise ValueError(f"{kind!r} is unknown")
