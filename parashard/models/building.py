"""Builds the model that a job's options describe: a built-in one, a test oracle, or a user's own."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from parashard.data.base import DataSpec
from parashard.errors import ConfigurationError
from parashard.job.model_options import (
    CnnOptions,
    DeepFmOptions,
    DlrmOptions,
    FmOptions,
    LedgerOptions,
    MlpOptions,
    ModelOptions,
    RowLedgerOptions,
    ScriptModelOptions,
    SoftmaxOptions,
    TornOptions,
    UserOptions,
    WideDeepOptions,
)
from parashard.models.base import Model, Seeded
from parashard.models.clicks import Dlrm, WideModel
from parashard.models.networks import ConvolutionalNetwork, SoftmaxRegression, multilayer_perceptron
from parashard.models.oracles import Ledger, RowLedger, Torn
from parashard.models.user_errors import named_with_line
from parashard.plan.embedding import EmbeddingTable

METHODS = ("initial_variables", "loss_and_gradients", "evaluate")


def load_user_model(
    options: UserOptions, spec: DataSpec, folder: Path | None, tables: Sequence[EmbeddingTable] = ()
) -> Model:
    """Import the module, call its factory with the data's spec and the options, and check what it returns."""
    module_name, _, factory_name = options.kind.partition(":")
    module = _imported(options.kind, module_name, folder)
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        what = "has no" if factory is None else "has something that cannot be called as"
        raise ConfigurationError(f"model kind {options.kind!r}: {_place(module)} {what} {factory_name!r}")
    model = _called(options, factory, spec, _place(module), tables)
    lacking = [name for name in METHODS if not callable(getattr(model, name, None))]
    if lacking:
        raise ConfigurationError(
            f"model kind {options.kind!r}: the factory returned {type(model).__name__!r} without the methods "
            f"{', '.join(lacking)}; a model has {', '.join(METHODS)}"
        )
    return cast(Model, model)


def code_sha256(options: ModelOptions, folder: Path | None) -> str:
    """Return SHA-256 (hex) of the module with a user's factory, not of what it imports; "" for a built-in model."""
    if not isinstance(options, UserOptions):
        return ""
    module = _imported(options.kind, options.kind.partition(":")[0], folder)
    if module.__file__ is None:
        return ""
    try:
        return hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigurationError(f"model kind {options.kind!r}: {module.__file__}: {error.strerror}") from None


def _imported(kind: str, name: str, folder: Path | None) -> ModuleType:
    places = _search_last(folder)
    try:
        module = importlib.import_module(name)
    except BaseException as error:  # anything that the user's module raises on import, SystemExit too
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            where = "".join(f"in {place}, " for place in places)
            raise ConfigurationError(f"model kind {kind!r}: no module {error.name!r} {where}or installed") from None
        if isinstance(error, ImportError) and error.name:
            _check_unshadowed(kind, error.name.partition(".")[0], places)
        raise ConfigurationError(f"model kind {kind!r}: importing {name!r} failed: {named_with_line(error)}") from error
    _check_unshadowed(kind, name, places)
    return module


def _search_last(folder: Path | None) -> list[Path]:
    """Append the search folders to `sys.path`, behind installed packages; return them."""
    # At the end of `sys.path`, not at its beginning like a script's folder: a file named `numpy.py` must not shadow an
    # installed package that has not been imported yet.
    places = [place.resolve() for place in (folder, Path()) if place is not None]
    sys.path += [place for place in dict.fromkeys(map(str, places)) if place not in sys.path]
    importlib.invalidate_caches()
    return list(dict.fromkeys(places))


def _check_unshadowed(kind: str, name: str, places: list[Path]) -> None:
    """Refuse an imported module that shadows the user's module of the same name."""
    module = sys.modules.get(name)
    own = next((file for place in places if (file := _file_in(place, name))), None)
    if own is not None and module is not None and not _is_of(module, own):
        raise ConfigurationError(f"model kind {kind!r}: {name!r} is {_place(module)}, not {own}; rename yours")


def _called(
    options: UserOptions,
    factory: Callable[..., Any],
    spec: DataSpec,
    place: str,
    tables: Sequence[EmbeddingTable],
) -> Any:
    extra = dict(options.model_extra or {})
    with suppress(TypeError, ValueError):  # a factory without a signature
        if "tables" in inspect.signature(factory).parameters:
            extra["tables"] = {table.name: table for table in tables}
    try:
        return factory(spec, **extra)
    except ConfigurationError:
        raise
    except BaseException as error:  # anything that the user's factory raises is the user's to fix
        raise ConfigurationError(
            f"model kind {options.kind!r}: the factory in {place}, called with the data's spec and the options "
            f"{', '.join(extra) or '(none)'}, raised {named_with_line(error)}"
        ) from error


def _file_in(place: Path, name: str) -> Path | None:
    path = place.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _is_of(module: ModuleType, own: Path) -> bool:
    return module.__file__ is not None and Path(module.__file__).resolve().parent == own.resolve().parent


def _place(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or f"module {module.__name__!r} (built in)"


def build_model(
    options: ModelOptions,
    spec: DataSpec,
    seed: int,
    folder: Path | None,
    tables: Sequence[EmbeddingTable] = (),
) -> Model:
    """Build the model that the options describe."""
    model: Model
    match options:
        case SoftmaxOptions():
            model = SoftmaxRegression(spec)
        case MlpOptions():
            model = multilayer_perceptron(options, spec, seed)
        case CnnOptions():
            model = ConvolutionalNetwork(options, spec, seed)
        case WideDeepOptions() | FmOptions() | DeepFmOptions():
            model = WideModel(options, spec, seed, tables)
        case DlrmOptions():
            model = Dlrm(options, spec, seed, tables)
        case LedgerOptions():
            model = Ledger(spec)
        case RowLedgerOptions():
            model = RowLedger(spec, options)
        case TornOptions():
            model = Torn(options)
        case ScriptModelOptions():
            raise ConfigurationError('model.kind is "script": run the script, which has the model')
        case UserOptions():
            model = load_user_model(options, spec, folder, tables)
            if isinstance(model, Seeded):
                model.seed(seed)
    return model
