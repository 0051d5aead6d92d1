"""What all platforms that run containers have in common: references of images, the time that a process has to leave.

Called by what renders a job for one of them.
"""

from __future__ import annotations

import math
import re

from parashard.errors import ConfigurationError
from parashard.job.schema import Job

FAREWELL_S = 5
"""Time that a process has beyond `cluster.grace_s` to close what it has open."""

REFERENCE = re.compile(
    r"(?P<name>[a-z0-9]+([._:/-]+[a-z0-9]+)*?)(:(?P<tag>[\w][\w.-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?"
)


def parsed_image(flag: str, reference: str) -> re.Match[str]:
    """Return a reference's parts: `name`, and `tag` and `digest` where it has them.

    Raises
    ------
    ConfigurationError
        If it is none; the message names the flag.
    """
    found = REFERENCE.fullmatch(reference)
    if found is None:
        raise ConfigurationError(f"flag {flag}: found {reference!r}; allowed: NAME, NAME:TAG or NAME@sha256:DIGEST")
    return found


def checked_image(flag: str, reference: str) -> str:
    """Return the reference of an image if it is one; see `parsed_image`."""
    return parsed_image(flag, reference)[0]


def leave_s(job: Job) -> int:
    """Return how long the platform should wait between asking a process of a job to end and killing it, in seconds."""
    return math.ceil(job.cluster.grace_s) + FAREWELL_S
