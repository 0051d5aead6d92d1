"""Children of this process: how each ended and why, and that none is left, whatever ends their parent.

What they share with other starters is in `test_local_starter.py`.

The children are modules of a few lines, so that a case takes tens of milliseconds.
"""

import errno
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from parashard.launch.forks import Forks, ForkServerLost
from parashard.launch.local_cluster import (
    LOG_TAIL_BYTES,
    MODULES,
    WORKER_IS_SCRIPT,
    LocalCluster,
    ScriptCommand,
)
from parashard.launch.starting import Ended
from parashard.process.run_files import short_path
from parashard.process.shell import ExitCode

DEADLINE_S = 30.0
# A child that says through a named pipe that it is up, and then waits for its lifeline (its last argument) to close.
UP = "import os, sys\nopen(sys.argv[1], 'w').write('up')\n"
UNTIL_LIFELINE_CLOSES = "while os.read(int(sys.argv[-1]), 1): pass\n"

Write = Callable[[str], str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a module which children can run, and returns its name."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    (tmp_path / "modules").mkdir()

    def write(source: str) -> str:
        name = f"child_{len(list((tmp_path / 'modules').iterdir()))}"
        (tmp_path / "modules" / f"{name}.py").write_text(source)
        return name

    return write


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """Return a cluster, and end what is left of it."""
    cluster = LocalCluster(tmp_path)
    yield cluster
    if cluster.running:
        cluster.end(grace_s=0.0)


@pytest.fixture(autouse=True)
def _no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no fork server import the large libraries that this process has of other tests."""
    monkeypatch.setattr("parashard.launch.local_cluster.script_modules", lambda imported: {})


@pytest.fixture(scope="module")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Return a cluster whose fork server tests share."""
    cluster = LocalCluster(tmp_path_factory.mktemp("forking"))
    yield cluster
    cluster.end(grace_s=0.0)


def reaped(cluster: LocalCluster) -> list[Ended]:
    """Wait for the next ends, by the kernel's word: no polling."""
    for name in cluster.running:
        os.waitid(os.P_PID, cluster.pid(name), os.WEXITED | os.WNOWAIT)
    return cluster.reap()


def awaited(pipe: Path) -> None:
    """Wait until a child has said through a named pipe that it is up."""
    assert pipe.read_text() == "up"


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """Return a named pipe."""
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_why_it_ended_is_its_own_last_word(cluster, module):
    said = "print('x'); print('parashard shard-0: the file is torn', file=sys.stderr); print('more'); sys.exit(2)"
    cluster.start("shard-0", module(f"import sys\n{said}"), [])
    assert reaped(cluster) == [Ended("shard-0", 2, "the file is torn (exit code 2)", 1)]


def test_without_a_word_of_ours_the_last_line_of_a_traceback_must_do(cluster, module):
    cluster.start("shard-0", module("raise ZeroDivisionError('by the user')"), [])
    assert reaped(cluster)[0].reason == "ZeroDivisionError: by the user (exit code 1)"


def test_the_last_words_of_an_earlier_incarnation_are_not_those_of_this_one(cluster, module):
    cluster.start("shard-0", module("print('parashard shard-0: first incarnation'); raise SystemExit(1)"), [])
    assert reaped(cluster)[0].reason == "first incarnation (exit code 1)"
    cluster.start("shard-0", module("raise KeyError('second incarnation')"), [])
    assert reaped(cluster)[0].reason == "KeyError: 'second incarnation' (exit code 1)"
    cluster.start("shard-0", module("import os; os._exit(1)"), [])
    assert reaped(cluster)[0].reason == "exit code 1"


def script_end(cluster: LocalCluster, folder: Path, text: str, flags: tuple[str, ...] = ()) -> Ended:
    """Start a script as worker-0, and return how it ended."""
    (folder / "train.py").write_text(text)
    cluster.script = ScriptCommand((sys.executable, *flags, "train.py"), str(folder))
    cluster.start("worker-0", MODULES["worker"], ["--connect", "127.0.0.1:7", "--name", "worker-0"])
    (ended,) = reaped(cluster)
    return ended


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import os; os.mkdir('.')", "FileExistsError: [Errno 17] File exists: '.'"),
        ("input('name: ')", "EOFError: EOF when reading a line"),
        ("raise SystemExit(0)", ""),
        ("raise SystemExit(5)", ""),
    ],
)
def test_a_script_that_ends_before_it_is_a_worker_is_misconfigured(forking, tmp_path, text, said):
    missed = "train.py ended before its call 1, fit, which this worker is for"
    forked, fresh = (script_end(forking, tmp_path, text, flags) for flags in ((), ("-u",)))
    assert (forked.exit_code, fresh.exit_code) == (ExitCode.CONFIGURATION, ExitCode.CONFIGURATION)
    assert (said or missed) in forked.reason
    assert (said or "exit code") in fresh.reason
    assert fresh.reason.endswith(f"; {WORKER_IS_SCRIPT}")
    assert "ps.is_worker()" in WORKER_IS_SCRIPT


@pytest.mark.parametrize("flags", [(), ("-u",)], ids=["forked", "fresh"])
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import os, sys; print('parashard worker-0: no answer', flush=True); os._exit(1)", 1),
        ("import os, sys; print('time=now level=info event=joined', flush=True); os._exit(1)", 1),
        (f"import os; os._exit({int(ExitCode.RETRY)})", ExitCode.RETRY),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ],
)
def test_the_end_of_a_worker_is_left_to_the_coordinator(forking, tmp_path, text, code, flags):
    ended = script_end(forking, tmp_path, text, flags)
    assert ended.exit_code == code
    assert WORKER_IS_SCRIPT not in ended.reason


@pytest.mark.parametrize("flags", [(), ("-u",)], ids=["forked", "fresh"])
def test_a_worker_whose_script_s_folder_is_gone_is_misconfigured_in_one_sentence(cluster, tmp_path, flags):
    gone = str(tmp_path / "gone")
    cluster.script = ScriptCommand((sys.executable, *flags, "train.py"), gone)
    cluster.start("worker-0", MODULES["worker"], [])
    (ended,) = reaped(cluster)
    says = f"the folder that the script was started in, {gone}, cannot be entered: no such file or directory"
    assert ended == Ended("worker-0", ExitCode.CONFIGURATION, f"it cannot be started: {says}", 1)


def test_folders_of_pythonpath_count_from_where_the_script_was_started(cluster, tmp_path, monkeypatch):
    for folder in ("started/src", "gone_to"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "started" / "src" / "own_module.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", "src")
    monkeypatch.chdir(tmp_path / "gone_to")
    text = "import os, own_module; os._exit(5 if own_module.__file__ == os.path.abspath('src/own_module.py') else 1)"
    ends = [script_end(cluster, tmp_path / "started", text, flags) for flags in ((), ("-u",))]
    assert [ended.reason.partition(";")[0] for ended in ends] == ["exit code 5", "exit code 5"]


def test_a_script_that_was_asked_to_end_is_no_failure(forking, tmp_path, pipe):
    forking.script = ScriptCommand((sys.executable, "train.py"), str(tmp_path))
    wait = "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
    (tmp_path / "train.py").write_text(f"{wait}open({str(pipe)!r}, 'w').write('up')\nsignal.pause()")
    forking.start("worker-0", MODULES["worker"], ["--connect", "127.0.0.1:7"])
    awaited(pipe)
    forking.ask_to_end("worker-0")
    (ended,) = reaped(forking)
    assert (ended.exit_code, ended.reason) == (0, "exit code 0")


def test_only_the_end_of_a_long_log_is_read(cluster, module):
    cluster.start("worker-0", module(f"import sys\nprint('x' * {3 * LOG_TAIL_BYTES})\nsys.exit('over')"), [])
    assert reaped(cluster)[0].reason == "over (exit code 1)"
    cluster.start("worker-1", module(f"import os\nos.write(1, b'\\xff' * {3 * LOG_TAIL_BYTES})\nos._exit(1)"), [])
    assert len(reaped(cluster)[0].reason) < 400


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_that_killed_it_is_named(cluster, module, number):
    cluster.start("worker-0", module(f"import os, signal\nsignal.raise_signal({int(number)})"), [])
    assert reaped(cluster) == [Ended("worker-0", -number, f"killed by {number.name}", 1)]


def test_a_child_gets_its_arguments_its_own_session_and_nothing_to_read(cluster, module):
    source = "import os, sys\nprint(sys.argv[1:-1], os.getsid(0) == os.getpid(), repr(sys.stdin.read()))"
    cluster.start("worker-0", module(source), ["--connect", "127.0.0.1:7"])
    reaped(cluster)
    assert cluster.log_path("worker-0").read_text() == "['--connect', '127.0.0.1:7', '--lifeline'] True ''\n"


def test_files_in_the_working_directory_do_not_shadow_a_service(cluster, tmp_path, monkeypatch):
    folder = tmp_path / "of the user"
    folder.mkdir()
    for name in ("coordinator", "numpy", "parashard", *MODULES.values(), "worker"):
        (folder / f"{name}.py").write_text("print('of the user')\n")
    monkeypatch.chdir(folder)
    for service in MODULES.values():
        cluster.start(f"{service}-0", service, ["--help"])
        (ended,) = reaped(cluster)
        said = cluster.log_path(f"{service}-0").read_text()
        assert "of the user" not in said
        assert (ended.exit_code, "--lifeline" in said) == (0, True), said


def test_a_child_has_the_variables_of_its_module(cluster, module, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    name, other = (module("import os\nprint(os.environ['OMP_NUM_THREADS'])") for _ in range(2))
    cluster.variables = {name: {"OMP_NUM_THREADS": "1"}}
    cluster.start("worker-0", name, [])
    cluster.start("worker-1", other, [])
    reaped(cluster)
    assert [cluster.log_path(child).read_text() for child in ("worker-0", "worker-1")] == ["1\n", "9\n"]


def test_incarnations_of_one_name_share_a_log(cluster, module):
    name = module("print('hello')")
    for _ in range(2):
        cluster.start("worker-0", name, [])
        reaped(cluster)
    assert cluster.log_path("worker-0").read_text() == "hello\n" * 2


def test_end_leaves_no_child_and_no_pipe(cluster, module, pipe):
    cluster.start("worker-0", module(UP + UNTIL_LIFELINE_CLOSES), [str(pipe)])
    awaited(pipe)
    pid = cluster.pid("worker-0")
    cluster.end(grace_s=DEADLINE_S)
    assert cluster.running == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    for descriptor in (cluster._lifeline_read, cluster._lifeline_write):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


PARENT = """
import sys, signal
from pathlib import Path
from parashard.launch.local_cluster import LocalCluster
cluster = LocalCluster(Path(sys.argv[1]))
cluster.start("worker-0", sys.argv[2], sys.argv[3:])
print(cluster.pid("worker-0"), flush=True)
signal.pause()
"""


def test_children_end_when_their_parent_is_killed(module, tmp_path, pipe):
    # The child holds a second pipe open for writing; the kernel closes it when the child is gone, before it is reaped.
    os.mkfifo(tmp_path / "held")
    child = module(UP + "held = open(sys.argv[2], 'w')\n" + UNTIL_LIFELINE_CLOSES)
    command = [sys.executable, "-c", PARENT, str(tmp_path), child, str(pipe), str(tmp_path / "held")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        awaited(pipe)
        with (tmp_path / "held").open("rb") as held:
            parent.send_signal(signal.SIGKILL)
            parent.communicate(timeout=DEADLINE_S)
            ready, _, _ = select.select([held], [], [], DEADLINE_S)
            assert ready, "the child outlived its parent"
            assert held.read() == b""
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        parent.kill()
        parent.communicate()


def test_a_child_holds_no_writing_end_of_the_lifeline(cluster, module, pipe):
    # If it did, a sibling's lifeline would stay open after the parent's death.
    cluster.start("worker-0", module(UP + UNTIL_LIFELINE_CLOSES), [str(pipe)])
    awaited(pipe)
    inode = os.fstat(cluster._lifeline_write).st_ino
    held = []
    for entry in Path(f"/proc/{cluster.pid('worker-0')}/fd").iterdir():
        if entry.exists() and entry.stat().st_ino == inode:
            flags = Path(f"/proc/{cluster.pid('worker-0')}/fdinfo/{entry.name}").read_text()
            held.append(int(flags.split("flags:")[1].split()[0], 8) & os.O_ACCMODE)
    assert held == [os.O_RDONLY]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (BlockingIOError(errno.EAGAIN, "no"), "resource temporarily unavailable"),
        (OSError(errno.EMFILE, "no"), "too many open files"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
    ],
)
def test_a_child_for_which_the_system_has_no_room_is_tried_again(cluster, module, monkeypatch, error, why):
    def refuse(*_: object, **__: object) -> NoReturn:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        cluster.start("worker-0", module(""), [])
    assert cluster.running == []
    assert cluster.reap() == [Ended("worker-0", ExitCode.IO_ERROR, f"it cannot be started: {why}", 1)]
    cluster.start("worker-0", module(""), [])
    assert reaped(cluster) == [Ended("worker-0", 0, "exit code 0", 2)]


def test_where_no_thread_can_be_started_no_process_is_tried(cluster, module, monkeypatch):
    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        patch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("gRPC aborts after a fork without threads"))
        cluster.start("worker-0", module(""), [])
    assert [ended.exit_code for ended in cluster.reap()] == [ExitCode.IO_ERROR]


def test_a_child_that_can_never_be_started_is_an_error(cluster, monkeypatch):
    def refuse(*_: object, **__: object) -> NoReturn:
        raise FileNotFoundError(errno.ENOENT, "no")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(FileNotFoundError):
        cluster.start("worker-0", "module", [])


def test_a_child_runs_without_a_log_where_none_can_be_written(cluster, module, tmp_path):  # P21
    told: list[str] = []
    cluster.tell = told.append
    (tmp_path / "logs").rmdir()
    (tmp_path / "logs").write_text("no folder")
    cluster.start("shard-0", module("import sys\nprint('lost')\nsys.exit(3)"), [])
    assert reaped(cluster)[0].reason == "exit code 3"
    (tmp_path / "logs").unlink()
    (tmp_path / "logs").mkdir()
    cluster.start("shard-0", module("print('kept')"), [])
    reaped(cluster)
    assert cluster.log_path("shard-0").read_text() == "kept\n"
    assert told == [
        "warning: log files cannot be written: not a directory",
        "log files are written again; 2 writes failed",
    ]


def test_without_a_fork_server_children_are_started_anew(cluster, module, monkeypatch):
    asked: list[object] = []

    def lost(*_: object) -> NoReturn:
        asked.append(_)
        raise ForkServerLost("the fork server did not answer in 10 s")

    told: list[str] = []
    cluster.tell = told.append
    monkeypatch.setattr(Forks, "start", lost)
    for number in range(2):
        cluster.start(f"worker-{number}", module("raise SystemExit(3)"), [])
        assert reaped(cluster)[0].exit_code == 3
    log = short_path(cluster.log_path("fork-server"))
    due = f"warning: the fork server did not answer in 10 s (log: {log}): processes are started anew for 60 s"
    assert (len(asked), told) == (1, [f"{due}, which takes longer"])
    monkeypatch.setattr(cluster, "_fork_from_s", 0.0)  # they are over
    cluster.start("worker-2", module("raise SystemExit(3)"), [])
    assert (reaped(cluster)[0].exit_code, len(asked)) == (3, 2)
