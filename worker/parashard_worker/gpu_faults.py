"""Error messages for GPU faults in a step or an evaluation: the fault, and what to change. Pure."""

from __future__ import annotations

from parashard.errors import shortened
from parashard.figures import counted
from parashard.models.user_errors import described

FRAMEWORK_SAYS_MAX = 160  # characters of a framework's own message, appended to ours
PROCESS_MUST_END = "no worker has a process of its own here: start the program again"
"""Advice if the lost context belongs to a process that is not the worker's own."""


def lost_context(error: BaseException) -> str:
    """Return the message for an error after which this process cannot use its GPU again."""
    return (
        f"the GPU's context is lost: {described(error)}; a kernel's error is told late: with CUDA_LAUNCH_BLOCKING=1 "
        "the line is the one that caused it"
    )


def out_of_memory(
    error: BaseException, examples: int | None, batch_size: int, held: str = "", what: str = "the GPU"
) -> str:
    """Return the message for an out-of-memory error, with the batch size to try.

    `examples` is the step's number of examples, None if an index of the data is a whole batch; `held` describes the
    memory in use.
    """
    if examples is None:
        advice = "try smaller batches"
    elif batch_size > 1:
        advice = (
            f"{counted(examples, 'example')} at once are too many: try batch_size {batch_size // 2}, not {batch_size}"
        )
    else:
        advice = "one example at a time is too much: try a smaller model, or more memory"
    there = f" ({held})" if held else ""
    return f"{what} is out of memory{there}; {advice}; {shortened(described(error), FRAMEWORK_SAYS_MAX)}"
