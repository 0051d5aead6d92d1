"""SlurmJob: an example rendered for Slurm and brought up on a real one, and a way to ask how it goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slurm_cluster import DEADLINE_S, SlurmCluster, eventually
from typer.testing import CliRunner

from parashard.cli.main import app
from parashard.store import open_store
from support.command_run import CommandRun
from support.long_job import EXAMPLES, LongJob
from support.report_oracle import unsaved


def fault_free_digest(run_dir: Path, example: str, *sets: str) -> str:
    """Run an example on this machine without Slurm, and return the digest of its weights."""
    words = [word for text in sets for word in ("--set", text)]
    run = CommandRun(run_dir, ["run", str(EXAMPLES / example), *words])
    try:
        assert run.process.wait(DEADLINE_S) == 0, run.complaint()
        return str(json.loads(run.output().splitlines()[-1])["weights_sha256"])
    finally:
        run.clean_up()


class SlurmJob:
    """A job whose workers are in the partition `spot`.

    Parameters
    ----------
    slurm : SlurmCluster
        Where it runs.
    folder : Path
        Of its job file; its run directory is below it.
    job : LongJob
        In that folder.
    sets : str
        KEY=VALUE, over the job file.
    options : str
        Of sbatch for all tasks, besides the partition.
    servers : str
        The partition of its coordinator and shards.
    """

    def __init__(
        self, slurm: SlurmCluster, folder: Path, job: LongJob, *sets: str, options: str = "", servers: str = "safe"
    ) -> None:
        self.slurm = slurm
        self.let_end = job.let_end
        self.run_dir = folder / "run"
        self._script = folder / "slurm-job.sh"
        words = ["render", "slurm", job.file, "--output", str(self._script), "--run-dir", str(self.run_dir)]
        words += [
            "--server-options",
            f"--partition={servers} {options}",
            "--worker-options",
            f"--partition=spot {options}",
        ]
        ran = CliRunner().invoke(app, [*words, *(word for text in sets for word in ("--set", text))])
        assert ran.exit_code == 0, ran.output

    def script(self, *words: str) -> str:
        """Run a command of the script."""
        return self.slurm.run(str(self._script), *words)

    def tasks(self, role: str) -> dict[int, tuple[str, str]]:
        """Return id and node of each running task of a role, by number."""
        said = self.slurm.run("squeue", "--noheader", "--array", "--states=RUNNING", "--format=%j %K %i %N")
        found = [line.split() for line in said.splitlines()]
        return {int(number): (id_, node) for name, number, id_, node in found if name == f"{self.name}-{role}"}

    @property
    def name(self) -> str:
        """What its jobs' names begin with."""
        (line,) = (line for line in self._script.read_text().splitlines() if line.startswith("NAME="))
        return line.split()[0].removeprefix("NAME=")

    def status(self) -> dict[str, Any]:
        """Ask the coordinator how the job goes, with the certificate that `up` has made for its user."""
        command = ["status", str(self.run_dir), "--tls-dir", str(self.run_dir / "tls" / "operator"), "--json"]
        ran = CliRunner().invoke(app, command)
        assert ran.exit_code == 0, ran.output
        return dict(json.loads(ran.output))

    def log(self, name: str) -> str:
        """Return what a process's task has written so far, such as that of worker-0."""
        path = self.run_dir / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def heard(self, text: str, name: str, times: int = 1) -> None:
        """Wait until a text is so many times in the log of a task."""
        eventually(
            lambda: self.log(name).count(text) >= times, f"{name}: {times} times {text!r}", told=lambda: self.told(name)
        )

    def under_way(self) -> None:
        """Wait until both workers and all shards have their places in the job."""
        self.heard("every shard is up", "coordinator-0")
        for name in ("worker-0", "worker-1"):
            self.heard("event=transport", name)

    def until_steps(self, steps: int) -> None:
        """Wait until so many steps are complete."""
        eventually(
            lambda: int(self.status()["steps_complete"]) >= steps, f"{steps} steps", told=lambda: self.told("worker-0")
        )

    def told(self, name: str) -> str:
        """Return what there is to say when something has not come."""
        return f"{self.slurm.queue()}\n{self.log(name)[-3000:]}\n{self.log('coordinator-0')[-2000:]}"

    def report(self) -> dict[str, Any]:
        """Let the job end, wait until nothing of it is left, and return its report, which its files agree with."""
        self.let_end()
        eventually(
            lambda: not [line for line in self.slurm.queue() if line.startswith(f"{self.name}-")],
            "the queue is empty",
            told=lambda: self.told("worker-0"),
        )
        eventually(lambda: not self.slurm.processes_in(self.run_dir), "no process of it is left", told=self.slurm.queue)
        report = json.loads((self.run_dir / "report.json").read_text())
        assert unsaved(open_store(str(self.run_dir / "checkpoints")), report) == []
        assert report["state"] == "done"
        return dict(report)
