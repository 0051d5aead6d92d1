"""What the calls of users have in common: arguments that are refused, tracebacks without our lines, warnings at theirs.

Knows no call.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from parashard.errors import ConfigurationError, ParashardError
from parashard.models.user_errors import with_users_lines

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_EVALUATION = 'the Trainer has settings={"evaluation.every_epochs": ...}'
_ELSEWHERE = {
    "validation_freq": _EVALUATION,
    "check_val_every_n_epoch": _EVALUATION,
    "val_check_interval": f"{_EVALUATION}, a fraction of an epoch, too",
    "validation_batch_size": "an evaluation's figures do not depend on it",
    "workers": "ps.ParameterServerStrategy(workers=...) has it",
    "optimizer": "the Trainer has it",
    "max_epochs": "it is epochs= of fit",
    "max_steps": "steps_per_epoch= times epochs= of fit is as many",
    "limit_train_batches": "it is steps_per_epoch= of fit",
    "limit_val_batches": "it is validation_steps= of fit",
    "fast_dev_run": "fit has epochs=1, steps_per_epoch= and validation_steps=",
    "accumulate_grad_batches": "it is gradient_accumulation= of fit",
    "gradient_clip_val": "it is clip_norm= of the optimizer, such as ps.Adam(1e-3, clip_norm=1.0)",
    "gradient_clip_algorithm": "the optimizer has clip_norm= and clip_value=",
    "ckpt_path": "resume=True goes on with this script's newest run",
    "train_dataloaders": "it is the first argument",
    "val_dataloaders": "it is validation_data= of fit",
    "precision": "ps.torch.Model has autocast=",
    "accelerator": "a strategy has device= or devices=",
    "devices": "a strategy has workers= or devices=",
    "logger": "fit has callbacks=[ps.callbacks.CSVLogger(...)], or TensorBoard",
    "default_root_dir": "runs are in the folder runs of the working directory",
    "loss": "the model has it: ps.torch.Model(net, loss=...)",
    "metrics": "the model has it: ps.torch.Model(net, loss=..., metrics=[...])",
    "lr": "the optimizer has it: ps.Adam(1e-3)",
    "dataloaders": "it is the first argument",
    "steps": "all examples are judged; give fewer of them",
    "callbacks": "fit has them",
}
"""What is elsewhere that users of Keras and Lightning look for."""


def one_data(call: str, data: Any, y: Any, apart: Sequence[object], others: dict[str, Any]) -> Any:
    """Return the data of a call, which may have inputs and targets apart, as Keras has them: call(x, y).

    Raises
    ------
    ConfigurationError
        If there are none, or more of them.
    """
    if "x" in others:
        if data is not None:
            raise ConfigurationError(f"{call} was given its data twice: as the first argument and as x=")
        data = others.pop("x")
    if apart:
        raise ConfigurationError(f"{call} takes the data as {call}(x, y) or {call}((x, y)), and all else by name")
    if data is None:
        raise ConfigurationError(f"{call} needs data: {call}(x, y), {call}((x, y)) or a dataset")
    return data if y is None else (data, y)


def check_none(call: Callable[..., Any], others: Mapping[str, object], fit: Callable[..., Any] | None = None) -> None:
    """Refuse arguments that a call has not; `fit` has some of those that are missed."""
    for name in others:
        allowed = _parameters(call)
        hint = _ELSEWHERE.get(name, "fit has it" if fit is not None and name in _parameters(fit) else "")
        raise ConfigurationError(
            f"{call.__name__} has no {name}=; {f'{hint}; ' if hint else ''}allowed: {', '.join(allowed)}"
        )


def _parameters(call: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(call).parameters if name not in ("self", "apart", "others")]


def warn(text: str) -> None:
    """Warn the user, at the line that made the call."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "parashard":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)


def trim_traceback(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return a call whose expected errors are raised without internal frames; their causes keep the user's lines."""

    @functools.wraps(call)
    def called(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return call(*args, **kwargs)
        except ParashardError as error:
            failure = with_users_lines(error)
        raise failure

    return called
