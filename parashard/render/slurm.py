"""A job as one batch script for Slurm, which submits, scales and cancels arrays of tasks: a task for each process."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from parashard.errors import ConfigurationError
from parashard.job.layers import parse_set
from parashard.job.load import LoadedJob, describe
from parashard.process.addresses import PortRange
from parashard.render.common import STORE_SCHEMES, filled, leave_s, placeholders, template

NOTICE_S_MIN = 60
"""Time between Slurm's signal and the time limit; Slurm may send it up to a minute early."""

LOOPBACK = "127.0.0.1"
"""The default of `cluster.host`, which no other node reaches."""


SET_BY_THE_SCRIPT = {
    "--array": "-a",
    "--chdir": "-D",
    "--dependency": "-d",
    "--job-name": "-J",
    "--no-requeue": "",
    "--open-mode": "",
    "--output": "-o",
    "--requeue": "",
    "--signal": "",
    "--wrap": "",
}
"""Options of sbatch, and their short forms, that a user's would replace: sbatch takes the last one."""

WITHOUT_VALUE = (
    *("-H", "-O", "-Q", "-V", "-W", "-h", "-k", "-s", "-v"),
    *("--contiguous", "--disable-stdout-job-summary", "--exclusive", "--get-user-env", "--help", "--hold"),
    *("--ignore-pbs", "--nice", "--no-kill", "--overcommit", "--oversubscribe", "--parsable", "--propagate", "--quiet"),
    *("--reboot", "--share", "--spread-job", "--stepmgr", "--test-only", "--usage", "--use-min-nodes", "--verbose"),
    *("--version", "--wait"),
)
"""Options of sbatch whose value, if they have one, is not the next word."""


def render_slurm(
    loaded: LoadedJob,
    file: str,
    run_dir: Path,
    *,
    python: str = sys.executable,
    server_options: str = "",
    worker_options: str = "",
    own_template: Path | None = None,
    sets: Sequence[str] = (),
) -> str:
    """Return the batch script of a job, for a file of this name; all nodes see the run's absolute folder."""
    # All nodes have the interpreter, too. `server_options` and `worker_options` are words for sbatch, as in a shell;
    # `own_template` is used instead of ours; `sets` are KEY=VALUE, over the job file.
    _check(loaded)
    job, cluster = loaded.job.job, loaded.job.cluster
    words = ["--job", str(loaded.path), "--model-folder", str(loaded.path.parent)]
    words += [word for text in (*_absolute(loaded, sets), "cluster.launcher=external") for word in ("--set", text)]
    run = str(run_dir)
    values = {
        "name": job.name,
        "file": file,
        "notice_s": str(max(NOTICE_S_MIN, leave_s(loaded.job))),
        "run": shlex.quote(run),
        "id": f"{job.name}-{hashlib.sha256(run.encode()).hexdigest()[:4]}",  # another run has other Slurm jobs
        "python": shlex.quote(python),
        "job": shlex.join(words),
        "shards": str(cluster.shards),
        "workers": str(cluster.workers),
        "server_options": _words("--server-options", server_options),
        "worker_options": _words("--worker-options", worker_options),
        "host": shlex.quote("auto" if cluster.host == LOOPBACK and not cluster.interface else cluster.listens_on),
        "ports": str(cluster.ports),
        "secure": "" if cluster.insecure else "yes",
    }
    if own_template is None:
        return filled(template("slurm.sh"), values)
    return filled(_template_of_user(own_template, values.keys()), values)


def _absolute(loaded: LoadedJob, sets: Sequence[str]) -> list[str]:
    """Return the same settings with absolute paths: tasks run in the run's folder."""
    paths = {
        key: value
        for key, value, origin in describe(loaded)
        if origin == "flag --set" and isinstance(value, str) and os.path.isabs(value)
    }
    others = [text for text in sets if parse_set(text)[0] not in paths]
    return [*others, *(f"{key}={value}" for key, value in paths.items())]  # what begins with / is text, and no TOML


def _check(loaded: LoadedJob) -> None:
    """Refuse an address, a port or a store that only one node, or one process of a node, could have."""
    cluster, url = loaded.job.cluster, loaded.job.checkpoint.url
    for key, found, fits, allowed in (
        ("cluster.host", cluster.host, cluster.host in (LOOPBACK, "auto"), "auto; cluster.interface names a network"),
        (
            "cluster.port",
            cluster.port,
            cluster.ports == 0 or isinstance(cluster.ports, PortRange),
            'unset, or a range as "7000-7099"',
        ),
        (
            "checkpoint.url",
            url,
            "://" not in url or url.partition("://")[0] in ("file", *STORE_SCHEMES),
            "unset, a folder that all nodes see, or " + " or ".join(f"{scheme}://" for scheme in STORE_SCHEMES),
        ),
    ):
        if not fits:
            raise ConfigurationError(f"{loaded.origins[key]}: {key}: found {found}; allowed on Slurm: {allowed}")


def _words(flag: str, text: str) -> str:
    """Return words of a shell, each quoted where it must be; refuse an option that the script sets itself."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(
            f"flag {flag}: found {text!r} ({error}); allowed: words as in a shell, such as '--partition=cpu --mem=4G'"
        ) from None
    takes_value = False  # the word before is an option whose value may be the next word
    for word in words:
        name, equals, _ = word.partition("=")
        is_option = word.startswith("-") and word not in ("-", "--") and not (takes_value and " " in name)
        if is_option:
            _check_option(flag, word)
        elif not takes_value:
            raise ConfigurationError(
                f"flag {flag}: found {word!r}, which belongs to no option; allowed: options of sbatch, such as "
                "'--partition=cpu --mem=4G'"
            )
        may_take = is_option and not equals and (word.startswith("--") or len(word) == 2)
        takes_value = may_take and not any(option.startswith(word) for option in WITHOUT_VALUE)
    if takes_value:
        raise ConfigurationError(f"flag {flag}: found {words[-1]!r} at the end; allowed: {words[-1]} VALUE")
    return shlex.join(words)


def _check_option(flag: str, word: str) -> None:
    """Refuse an option that the script sets itself, and several in one word, which could hide one."""
    name, short = word.partition("=")[0], word[:2]
    for option, own_short in SET_BY_THE_SCRIPT.items():
        # sbatch accepts abbreviated options
        if (len(name) > 2 and option.startswith(name)) or short == own_short:
            raise ConfigurationError(
                f"flag {flag}: found {word!r}; {option} is the script's own; allowed: other options of sbatch, such as "
                "'--partition=cpu --mem=4G'"
            )
    if short in WITHOUT_VALUE and word != short:
        raise ConfigurationError(f"flag {flag}: found {word!r}; allowed: {short} and each other option by itself")


def _template_of_user(path: Path, known: Collection[str]) -> str:
    """Return the text of a template; refuse a placeholder that has no value."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise ConfigurationError(f"flag --template: {path} cannot be read: {why}") from None
    if not text.strip():
        raise ConfigurationError(f"flag --template: {path} is empty; allowed: a script")
    allowed = [f"@{{{name}}}" for name in known]
    for number, found in placeholders(text):
        if found not in allowed:
            raise ConfigurationError(f"{path}:{number}: found {found}; allowed: {', '.join(allowed)}")
    return text
