"""A job as one batch script for Slurm, which submits, scales and cancels arrays of tasks: a task for each process."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from parashard.errors import ConfigurationError
from parashard.job.load import LoadedJob
from parashard.process.addresses import PortRange
from parashard.render.common import filled, leave_s, placeholders, template

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
    "--output": "-o",
    "--requeue": "",
    "--signal": "",
}
"""Options of sbatch, and their short forms, that a user's would replace: sbatch takes the last one."""


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
    words += [word for text in (*sets, "cluster.launcher=external") for word in ("--set", text)]
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


def _check(loaded: LoadedJob) -> None:
    """Refuse an address or a port that only one node, or one process of a node, could have."""
    cluster = loaded.job.cluster
    for key, found, fits, allowed in (
        ("cluster.host", cluster.host, cluster.host in (LOOPBACK, "auto"), "auto; cluster.interface names a network"),
        (
            "cluster.port",
            cluster.port,
            cluster.ports == 0 or isinstance(cluster.ports, PortRange),
            'unset, or a range as "7000-7099"',
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
        is_option = word.startswith("-") and " " not in name
        if not is_option and not takes_value:
            raise ConfigurationError(
                f"flag {flag}: found {word!r}, which belongs to no option; allowed: options of sbatch, such as "
                "'--partition=cpu --mem=4G'"
            )
        for option, short in SET_BY_THE_SCRIPT.items():
            is_long = len(name) > 2 and option.startswith(name)  # sbatch accepts abbreviated options
            if is_option and (is_long or (short and word.startswith(short))):
                raise ConfigurationError(
                    f"flag {flag}: found {word!r}; the script sets {option} itself; allowed: other options of sbatch, "
                    "such as '--partition=cpu --mem=4G'"
                )
        takes_value = is_option and not equals
    return shlex.join(words)


def _template_of_user(path: Path, known: Collection[str]) -> str:
    """Return the text of a template; refuse a placeholder that has no value."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise ConfigurationError(f"flag --template: {path} cannot be read: {why}") from None
    for number, name in placeholders(text):
        if name not in known:
            allowed = ", ".join(f"@{{{one}}}" for one in known)
            raise ConfigurationError(f"{path}:{number}: found @{{{name}}}; allowed: {allowed}")
    return text
