"""Functions that a coordinator schedules: how they are marked, and found again in a worker by their names.

A worker is the script run again, so a function is found there by module and name; nothing of it is sent. Knows no call.
Called by `parashard.api.coordinator` and `parashard.api.scheduled`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, overload

from parashard.errors import ConfigurationError

Keys = Callable[..., Mapping[str, Any]]


class Function:
    """A function that can be scheduled; calling it calls it here.

    Attributes
    ----------
    pushes : int
        1: it returns (result, gradients), and the gradients are pushed; 0: it returns a result, and nothing moves.
    keys : callable or None
        From the arguments to the ids of tables whose rows it gets.
    """

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

    Its first argument is the weights, by name, as they were pulled for this call: NumPy arrays of float32 that cannot
    be written to and are valid until it returns. The others are what `schedule` was given.

    Parameters
    ----------
    pushes : int
        1: it returns (result, gradients), and its gradients, by name, are in once; what is left out is zero. 0: it
        returns a result, and nothing moves.
    keys : callable (*args, **kwargs) -> mapping of str to array of whole numbers, optional
        The ids of embedding tables whose rows a call needs, by table, in any shape; it gets the arguments after the
        weights. The weights have under a table's name the row of each id then, shape (*ids, dimension), and a gradient
        by that name has the same shape.

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
    """Return the names that the script has at its top level by now."""
    return frozenset(vars(sys.modules["__main__"]))


def name_of(called: Any, defined: frozenset[str], what: str) -> str:
    """Return the name by which a worker finds a function.

    Raises ConfigurationError if a worker would not find it.

    Parameters
    ----------
    called : callable
    defined : frozenset of str
        What the script had at its top level when the coordinator was made.
    """
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
    """Return what has a name such as "module:function"; None: nothing does."""
    module, _, path = name.partition(":")
    here: Any = _module(module)
    for part in path.split("."):
        here = getattr(here, part, None)
    return here


def _module(name: str) -> Any:
    return sys.modules[name] if name in sys.modules else importlib.import_module(name)
