"""What is said of a GPU's fault in a step or an evaluation: what has happened, and what to change. Pure."""

from __future__ import annotations

from parashard.errors import shortened
from parashard.figures import counted
from parashard.models.user_errors import described

FRAMEWORK_SAYS_MAX = 160  # characters of a framework's own message, behind ours
PROCESS_MUST_END = "no worker has a process of its own here: start the program again"
"""What follows where the context is that of a process which does more than work."""


def lost_context(error: BaseException) -> str:
    """Return what is said of an error after which this process cannot use its GPU again."""
    return (
        f"the GPU's context is lost: {described(error)}; a kernel's error is told late: with CUDA_LAUNCH_BLOCKING=1 "
        "the line is the one that caused it"
    )


def out_of_memory(
    error: BaseException, examples: int | None, batch_size: int, held: str = "", what: str = "the GPU"
) -> str:
    """Return what is said of an error for want of memory, and the batch size to try.

    `examples` are those of the step, None where an index of the data is a whole batch; `held` says who has the memory.
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
