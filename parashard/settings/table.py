"""Table: a table of settings as a frozen value, with the bounds and the description of each key beside it.

A table is declared once, by annotated attributes. Making one checks nothing but its keys' names, so a process that is
handed settings which were checked before needs no validator; `parashard.settings.validation` checks what a person
wrote. Knows no table of the job file. Called by whatever declares settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, dataclass_transform, get_type_hints

NEEDED: Any = type("Needed", (), {"__repr__": lambda self: "NEEDED"})()
"""The default of a key that has none."""

BOUNDS = ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern")


class Key:
    """What is said of a key besides its type. Made by `key`, as an attribute's value or within `Annotated`."""

    __slots__ = ("bounds", "default", "default_factory", "description", "in_file")

    def __init__(
        self,
        default: Any,
        default_factory: Callable[[], Any] | None,
        in_file: str,
        description: str,
        bounds: Mapping[str, Any],
    ) -> None:
        self.default = default
        self.default_factory = default_factory
        self.in_file = in_file
        self.description = description
        self.bounds = bounds

    @property
    def needed(self) -> bool:
        """Whether a table must be given a value for it."""
        return self.default is NEEDED and self.default_factory is None

    def value(self) -> Any:
        """Return the default."""
        return self.default if self.default_factory is None else self.default_factory()

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Add the bounds to pydantic's schema of the annotated type."""
        from parashard.settings.validation import bounded

        return bounded(handler(source), self.bounds)


def key(
    *,
    default: Any = NEEDED,
    default_factory: Callable[[], Any] | None = None,
    in_file: str = "",
    description: str = "",
    kw_only: bool = True,
    **bounds: Any,
) -> Any:
    """Declare a key of a table.

    Parameters
    ----------
    default, default_factory
        Its value where none is given; without one of the two the key is needed.
    in_file : str
        Its name in files, where that is not the attribute's.
    description : str
        Its line in the reference, and of the error when it is missing.
    kw_only : bool
        False: for type checkers, it may be given without its name; its table's `__init__` has it.
    **bounds
        ge, gt, le, lt, min_length, max_length; pattern, which the whole text matches.
    """
    assert set(bounds) <= set(BOUNDS), bounds
    return Key(default, default_factory, in_file, description, bounds)


class Before:
    """Within `Annotated`: a function that returns a value to be checked by its type, or raises ValueError.

    With `whole`, it is all of the check.
    """

    __slots__ = ("check", "whole")

    def __init__(self, check: Callable[[Any], Any], *, whole: bool = False) -> None:
        self.check = check
        self.whole = whole

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Put the function before pydantic's schema of the annotated type."""
        from parashard.settings.validation import checked_before, checked_whole

        return checked_whole(self.check) if self.whole else checked_before(self.check, handler(source))


class After:
    """Within `Annotated`: a function that returns a value of the right type, or raises ValueError."""

    __slots__ = ("check",)

    def __init__(self, check: Callable[[Any], Any]) -> None:
        self.check = check

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Put the function after pydantic's schema of the annotated type."""
        from parashard.settings.validation import checked_after

        return checked_after(self.check, handler(source))


class OneOf:
    """Within `Annotated`, of a union of tables: the key `by` tells which one a table is.

    Its values are those of the key's Literal; a table without a Literal there is any whose value has a colon.
    """

    __slots__ = ("by",)

    def __init__(self, by: str) -> None:
        self.by = by

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Return pydantic's schema of a tagged union."""
        from parashard.settings.validation import one_of

        return one_of(source, self.by, handler)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(key,))
class Table:
    """Settings as attributes: frozen, compared by value, made with keyword arguments.

    A subclass has the keys of its bases first. One with `takes_any` keeps further keys as they are, in `further`.
    """

    keys: ClassVar[Mapping[str, Key]] = {}
    takes_any: ClassVar[bool] = False
    further: ClassVar[Mapping[str, Any]] = {}
    _annotations: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        own = cls.__dict__
        cls.keys = dict(cls.keys)
        for name, annotation in own.get("__annotations__", {}).items():
            if not str(annotation).startswith("ClassVar"):
                found = own.get(name, NEEDED)
                cls.keys[name] = found if isinstance(found, Key) else Key(found, None, "", "", {})
                if name in own:
                    delattr(cls, name)

    def __init__(self, **values: Any) -> None:
        made = self.__dict__
        for name, declared in self.keys.items():
            made[name] = values.pop(name) if name in values else declared.value()
            if made[name] is NEEDED:
                raise TypeError(f"{type(self).__name__} needs {name}")
        if values and not self.takes_any:
            raise TypeError(f"{type(self).__name__} has no {', '.join(values)}")
        if values:
            made["further"] = values

    def check(self) -> None:
        """Raise ValueError if its values, each of them allowed, do not go together."""

    def replaced(self, **changes: Any) -> Self:
        """Return a copy with other values of some keys."""
        return type(self)(**{**self.__dict__.get("further", {}), **self._own(), **changes})

    def plain(self) -> dict[str, Any]:
        """Return the keys as files name them and their values, tables within as dicts."""
        own = {declared.in_file or name: _plain(getattr(self, name)) for name, declared in self.keys.items()}
        return {**own, **self.further}

    def _own(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self.keys}

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} stays")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} stays")

    def __eq__(self, other: object) -> bool:
        return self.__dict__ == other.__dict__ if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash((type(self), tuple(self._own().values())))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"

    @classmethod
    def annotations(cls) -> dict[str, Any]:
        """Return each key's type, with what is annotated."""
        if "_annotations" not in cls.__dict__:
            hints = get_type_hints(cls, include_extras=True)
            cls._annotations = {name: hints[name] for name in cls.keys}
        return cls._annotations

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Return pydantic's schema: of the keys as files name them, and then `check`."""
        from parashard.settings.validation import table_of

        return table_of(cls, handler)


def _plain(value: Any) -> Any:
    if isinstance(value, Table):
        return value.plain()
    if isinstance(value, dict):
        return {name: _plain(below) for name, below in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(below) for below in value)
    return value
