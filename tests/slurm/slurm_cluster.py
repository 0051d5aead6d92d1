"""SlurmCluster: a real Slurm of several nodes on this machine, all of it below one folder; it ends with the test.

Debian's slurmd may be started several times on a machine, so each node is a slurmd with a name and a port of its own.
All nodes share files, the host's name and its addresses. Nodes have two CPUs each, whatever the machine has. A task
that is queued again waits for REQUEUE_S, the least that Slurm takes, before it may start.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from support.command_run import DIES_WITH_US
from support.waiting import eventually

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "sinfo")
PACKAGES = "slurmctld slurmd slurm-client munge"
DEADLINE_S = 400.0
COMMAND_S = 240.0
REQUEUE_S = 5
GRACE_S = 10
eventually = partial(eventually, deadline_s=DEADLINE_S, poll_s=0.2)

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire={requeue_s}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
ReturnToService=2
KillWait=5
MessageTimeout=90
BatchStartTimeout=90
MinJobAge=300
SlurmdTimeout=10
{nodes}
PartitionName=spot Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s} MaxTime=60 State=UP
PartitionName=safe Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=60 State=UP
"""


def unavailable_reason() -> str | None:
    """Return why there can be no Slurm here; None: there can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} missing (apt-get install --no-install-recommends {PACKAGES})"
    return None if os.geteuid() == 0 else "its daemons are started as root"


def sweep(prefix: str) -> None:
    """End what is left of a Slurm whose test was killed: its folder is named by this prefix and the test's process."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*-*"):
        owner = folder.name.removeprefix(prefix).partition("-")[0]
        if not Path("/proc", owner).exists():
            SlurmCluster(folder).down()  # tasks outlive its daemons
            shutil.rmtree(folder, ignore_errors=True)


class SlurmCluster:
    """One Slurm.

    Parameters
    ----------
    folder : Path
        For all of its files; its path is short, since sockets are in it.
    nodes : int
        How many.
    """

    def __init__(self, folder: Path, nodes: int = 4) -> None:
        self.folder = folder
        self.nodes = [f"node{number}" for number in range(1, nodes + 1)]
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def up(self) -> None:
        """Start the daemons, and wait until all nodes are idle."""
        port, *ports = _free_ports(1 + len(self.nodes))
        host = socket.gethostname().partition(".")[0]
        lines = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={at} CPUs=2 RealMemory=1000 State=UNKNOWN"
            for node, at in zip(self.nodes, ports, strict=True)
        ]
        conf = CONF.format(
            host=host, port=port, folder=self.folder, requeue_s=REQUEUE_S, grace_s=GRACE_S, nodes="\n".join(lines)
        )
        self.folder.chmod(0o755)  # else munged refuses its socket's folder
        (self.folder / "slurm.conf").write_text(conf)
        for node in self.nodes:
            (self.folder / "spool" / node).mkdir(parents=True)
        (self.folder / "state").mkdir()
        (self.folder / "munge").mkdir(mode=0o700)
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        munge = {"key-file": key, "socket": self.folder / "munge.sock", "pid-file": self.folder / "munged.pid"}
        munge |= {"log-file": self.folder / "munge" / "log", "seed-file": self.folder / "munge" / "seed"}
        self._start(
            "munged", "munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in munge.items())
        )
        eventually((self.folder / "munge.sock").exists, "munged listens", told=lambda: self.log("munged"))
        self._start("slurmctld", "slurmctld", "-D", "-c", "-f", self.environ["SLURM_CONF"])
        for node in self.nodes:
            self._start(node, "slurmd", "-D", "-N", node, "-f", self.environ["SLURM_CONF"])
        eventually(
            lambda: len(self.idle()) == len(self.nodes), "all nodes are idle", told=lambda: self.log("slurmctld")
        )

    def run(self, *words: str, check: bool = True) -> str:
        """Run a command of Slurm's, or another one that uses them, and return what it prints."""
        ran = subprocess.run(
            words, env=self.environ, capture_output=True, text=True, timeout=COMMAND_S, check=False, cwd=self.folder
        )
        assert not check or ran.returncode == 0, f"{words}: {ran.stderr}{ran.stdout}"
        return ran.stdout

    def idle(self) -> list[str]:
        """Return the nodes that nothing runs on."""
        said = self.run("sinfo", "--noheader", "--Node", "--partition=spot", "--states=idle", "-o", "%N", check=False)
        return said.split()

    def queue(self, *options: str) -> list[str]:
        """Return a line for each task in the queue: job's name, number, state and node."""
        said = self.run("squeue", "--noheader", "--array", "--format=%j %K %T %N", *options)
        return sorted(said.splitlines())

    def lose(self, node: str) -> None:
        """Kill what Slurm has on a node; the tasks' own processes live on."""
        self._daemons[node].kill()
        self._daemons.pop(node).wait()
        keepers = {_parent(pid) for pid, words, _ in self._processes() if f"/spool/{node}/" in " ".join(words)}
        for keeper in keepers:
            assert Path(f"/proc/{keeper}/comm").read_text().strip() == "slurmstepd"
            os.kill(keeper, signal.SIGKILL)

    def processes_of(self, node: str, name: str) -> list[int]:
        """Return the process ids of a parashard process that was started on a node, such as worker-0."""
        return [
            pid
            for pid, words, environ in self._processes()
            if f"SLURMD_NODENAME={node}\0" in environ and "python" in words[0] and f"tls/{name}" in words
        ]

    def processes_in(self, folder: Path) -> list[int]:
        """Return the process ids of all processes of tasks whose working directory this is."""
        found = []
        for pid, _, environ in self._processes():
            with suppress(OSError):
                if "SLURM_JOB_ID=" in environ and Path(f"/proc/{pid}/cwd").readlink() == folder:
                    found.append(pid)
        return found

    def clear(self) -> None:
        """End all jobs, and what lost nodes still run, and bring those nodes back."""
        eventually(self._cancelled, "the queue is empty", told=self.queue)
        eventually(lambda: self._killed("SLURM_JOB_ID="), "no task's process is left")
        for node in self.nodes:
            if node not in self._daemons:
                self._start(node, "slurmd", "-D", "-N", node, "-f", self.environ["SLURM_CONF"])
                self.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        eventually(
            lambda: len(self.idle()) == len(self.nodes), "all nodes are idle", told=lambda: self.log("slurmctld")
        )

    def _cancelled(self) -> bool:
        """Cancel what is queued, without its time to save; return whether there was nothing."""
        self.run("scancel", "--state=PENDING", "--user=root", check=False)
        self.run("scancel", "--state=RUNNING", "--user=root", "--full", "--signal=KILL", check=False)
        return not self.queue()

    def log(self, daemon: str) -> str:
        """Return the end of what a daemon has said."""
        return (self.folder / f"{daemon}.log").read_text()[-4000:]

    def down(self) -> None:
        """End everything that came of this Slurm."""
        for daemon in self._daemons.values():
            daemon.kill()
        for daemon in self._daemons.values():
            daemon.wait()
        eventually(self._killed, "nothing of it is left")

    def _start(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as said:
            command = [*DIES_WITH_US, *words]
            self._daemons[name] = subprocess.Popen(command, env=self.environ, stdout=said, stderr=said)

    def _killed(self, mark: str = "") -> bool:
        """Kill the processes with this Slurm, and a mark, in their environment; return whether there was none."""
        found = [pid for pid, _, environ in self._processes() if str(self.folder) in environ and mark in environ]
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    def _processes(self) -> Iterator[tuple[int, list[str], str]]:
        """Yield id, command line and environment of each process."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with suppress(OSError):
                    words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    environ = (entry / "environ").read_bytes().decode(errors="replace")
                    yield int(entry.name), words, environ


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _free_ports(count: int) -> list[int]:
    """Return ports that are free at the moment: Slurm takes no 0."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
