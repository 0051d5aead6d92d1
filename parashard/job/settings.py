"""Settings of single variables: the `[variables."PATTERN"]` tables of a job file, applied to a model's variables.

Owns the table and the matching. Knows nothing of models or optimizers. Called where a job is resolved into variables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from parashard.encodings.encoding import Encoding
from parashard.errors import ConfigurationError
from parashard.frozen_model import FrozenModel
from parashard.job.keys import dotted
from parashard.plan.variables import Variable


def _checked_encoding(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return str(Encoding.parse(value))
        except ConfigurationError as error:
            raise ValueError(error.message.partition("allowed: ")[2]) from None
    return value


class VariableSettings(FrozenModel):
    """What a job changes about the variables that one pattern matches; an unset key changes nothing."""

    frozen: bool | None = Field(default=None, description="True: the variable is never pushed and never changes.")
    decay: bool | None = Field(default=None, description="False: weight decay leaves the variable alone.")
    learning_rate_factor: float | None = Field(
        default=None, ge=0, le=1e15, description="Multiplies the learning rate for the variable, from 0 to 1e15."
    )
    encoding: Annotated[str, BeforeValidator(_checked_encoding)] | None = Field(
        default=None, description="How gradients travel; int8 and topk keep what they leave out for a later push."
    )


def apply_settings(variables: Mapping[str, Variable], settings: Mapping[str, VariableSettings]) -> dict[str, Variable]:
    """Return the variables as the settings change them.

    Patterns are those of the shell (`*`, `?`, `[abc]`), case matters, and a pattern must match the whole name. Where
    several patterns match one variable, the later one in the job file wins, key by key. State without a gradient takes
    `frozen` only: the other keys are of gradients.

    Raises
    ------
    ConfigurationError
        A pattern matches no variable; the message lists the names that there are.
    """
    changed = dict(variables)
    for pattern, setting in settings.items():
        names = [name for name in changed if fnmatchcase(name, pattern)]
        if not names:
            raise ConfigurationError(
                f"{dotted('variables', pattern)}: the pattern matches no variable; the model has: "
                f"{', '.join(sorted(variables)) or 'none'}"
            )
        given = {key: value for key, value in setting.plain().items() if value is not None}
        for name in names:
            of_state = {key: value for key, value in given.items() if key == "frozen"}
            changed[name] = dataclasses.replace(changed[name], **(of_state if changed[name].state else given))
    return changed
