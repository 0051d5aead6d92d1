"""A fork server and its children: they are as fresh processes are, none runs twice, and any of them may be killed.

The children are modules of a few lines, and most servers import nothing for them.
"""

import contextlib
import ctypes
import json
import os
import queue
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from parashard.launch import fork_server
from parashard.launch import forks as forks_module
from parashard.launch.fork_server import ForkServer
from parashard.launch.forks import (
    Fork,
    Forks,
    ForkServerLost,
    Request,
    Unsupported,
    read_message,
    script_modules,
    send_message,
)
from parashard.process.resources import thread_variables
from parashard.process.run_files import short_path
from parashard.process.shell import ExitCode
from support.tiers import by_tier

DEADLINE_S = 30.0
IS_LARGE = bool(os.environ.get("PARASHARD_LARGE"))  # make test-large
KILLS = 200 if IS_LARGE else by_tier(quick=8, full=40)
START_S, SERVER_START_S = 0.01, 0.3  # about what a start takes, and one that begins with a server's
STARTS = 2_000 if IS_LARGE else by_tier(quick=20, full=500)
LARGE_S = 600
WAITS = "import os, sys\nprint('up', flush=True)\nwhile os.read(int(sys.argv[-1]), 1): pass\n"


class Place:
    """A folder with modules, a lifeline and a log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lifeline, self._held = os.pipe()
        self.log, self.server_log = folder / "log", folder / "server_log"
        variables = thread_variables(1, {}, override=True)
        self.forks = Forks(self.lifeline, variables, open_log=lambda: self.server_log.open("ab"))

    def request(self, source: str, *arguments: str, preload: tuple[str, ...] = ()) -> Request:
        """Return a request for a module with this source."""
        name = f"child_{len(list(self.folder.glob('child_*')))}"
        (self.folder / f"{name}.py").write_text(source)
        command = [sys.executable, "-P", "-m", name, *arguments, str(self.lifeline)]
        return Request(command, str(self.folder), {**os.environ}, dict.fromkeys(preload, ""))

    def start(self, request: Request) -> Fork:
        """Fork it."""
        with self.log.open("ab") as log:
            return self.forks.start(request, log.fileno())

    def said(self, source: str, *arguments: str, preload: tuple[str, ...] = ()) -> str:
        """Run a module to its end, and return its output."""
        before = len(self.log.read_bytes()) if self.log.exists() else 0
        assert self.start(self.request(source, *arguments, preload=preload)).wait(DEADLINE_S) == 0, self.log.read_text()
        return self.log.read_bytes()[before:].decode()

    def until_up(self, times: int = 1) -> None:
        """Wait until so many children have said that they are up."""
        until_s = time.monotonic() + DEADLINE_S
        while not self.log.exists() or self.log.read_text().count("up\n") < times:
            assert time.monotonic() < until_s, "no child is up"
            time.sleep(0.001)

    def close(self) -> None:
        """End everything."""
        self.forks.close()
        os.close(self.lifeline)
        os.close(self._held)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Return a place, and end what is left of it."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    place = Place(tmp_path)
    yield place
    place.close()


def fresh(request: Request, environ: dict[str, str]) -> str:
    """Return what a fresh process says."""
    return subprocess.check_output(request.command, env=environ, cwd=request.folder, text=True)


# --- as a fresh process ---


def test_a_child_is_this_processs_own_in_a_session_of_its_own(place: Place) -> None:
    said = place.said("import os\nprint(os.getppid(), os.getsid(0) == os.getpid(), os.getcwd())")
    assert said.split() == [str(os.getpid()), "True", str(place.folder)]


def test_a_server_starts_where_the_script_s_folder_is_gone(place: Place) -> None:
    place.forks = Forks(place.lifeline, {}, str(place.folder / "gone"), lambda: place.server_log.open("ab"))
    assert place.said("import os\nprint(os.getcwd())").split() == [str(place.folder)]


def test_a_path_is_named_where_the_working_directory_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    assert short_path(tmp_path / "run") == str(tmp_path / "run")


@pytest.mark.parametrize(("source", "code"), [("raise SystemExit(5)", 5), ("1/0", 1), ("import os; os.abort()", -6)])
def test_how_a_child_ended_is_known(place: Place, source: str, code: int) -> None:
    assert place.start(place.request(source)).wait(DEADLINE_S) == code


def test_proc_shows_its_command_and_its_variables(place: Place) -> None:
    request = place.request(WAITS, "--name", "worker-0")
    environ = {**request.environ, "PARASHARD_MARK": "here"}
    environ.pop("PYTHONHASHSEED", None)
    child = place.start(request._replace(environ=environ))
    place.until_up()
    words = Path(f"/proc/{child.pid}/cmdline").read_text().rstrip("\0").split("\0")
    variables = Path(f"/proc/{child.pid}/environ").read_text().rstrip("\0").split("\0")
    child.kill()
    assert words == request.command
    assert sorted(variables) == sorted(f"{name}={value}" for name, value in environ.items())
    assert child.wait(DEADLINE_S) == -signal.SIGKILL


def test_more_words_than_there_is_room_for_are_cut_off(place: Place) -> None:
    long = "x" * (2 * forks_module.ROOM_BYTES)
    assert place.said("import sys\nprint(len(sys.argv[1]))", long) == f"{len(long)}\n"


ARGUMENTS = '["--connect", "127.0.0.1:7", "--name", "worker-0"]'


def test_its_modules_see_the_words_and_variables_of_a_fresh_process(place: Place, tmp_path: Path) -> None:
    (tmp_path / "within").mkdir()
    (tmp_path / "script.py").write_text(
        "import os, sys, parashard\nclass Noted:\n    size: int\nassert Noted.__annotations__ == {'size': int}\n"
        "from parashard.api.script import SCRIPT\n"
        "print(__name__, __file__, sys.argv, sys.path[0], 'PARASHARD_WORKER_ARGUMENTS' in os.environ)\n"
        "print(__package__, __spec__, __doc__, __cached__, type(__loader__), __loader__.path)\n"
        "print(sys._getframe().f_code.co_filename)\n"
        "print(SCRIPT.is_worker, SCRIPT.path, parashard._started.main_text == open(__file__, 'rb').read())\n"
        "os._exit(0 if sys.stdout.flush() is None else 1)\n"
    )
    for named, safe in (("script.py", ""), ("./script.py", ""), ("within/../script.py", ""), ("script.py", "1")):
        environ = {**os.environ, "PARASHARD_WORKER_ARGUMENTS": ARGUMENTS, "PYTHONSAFEPATH": safe}
        place.log.write_text("")
        request = Request([sys.executable, named, "a"], str(tmp_path), environ, {"parashard.api.trainer": ""})
        assert place.start(request).wait(DEADLINE_S) == 0, place.log.read_text()
        assert place.log.read_text() == fresh(request, environ)
        assert f"True {tmp_path}" in place.log.read_text()


def test_a_script_s_traceback_is_that_of_a_fresh_process(place: Place, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import parashard as ps\nps.is_worker()\ndef fail():\n    1 / 0\nfail()\n")
    environ = {**os.environ, "PARASHARD_WORKER_ARGUMENTS": ARGUMENTS}
    request = Request([sys.executable, str(script)], str(tmp_path), environ, {"parashard.api.trainer": ""})
    assert place.start(request).wait(DEADLINE_S) == ExitCode.CONFIGURATION
    done = subprocess.run(request.command, env=environ, cwd=request.folder, capture_output=True, text=True, check=False)
    assert place.log.read_text() == done.stderr
    assert done.stderr.count("  File ") == 2


def test_numbers_drawn_at_random_are_others_in_each_child(place: Place) -> None:
    source = "import random\nimport numpy as np\nprint(random.random(), np.random.random())"
    said = [place.said(source, preload=("numpy.random", "random")).split() for _ in range(3)]
    assert len({number for numbers in said for number in numbers}) == 6


@pytest.mark.parametrize("threads", ["1", "2"])
def test_libraries_have_the_threads_of_its_variables(place: Place, threads: str) -> None:
    source = "import numpy, threadpoolctl\nprint({pool['num_threads'] for pool in threadpoolctl.threadpool_info()})"
    request = place.request(source, preload=("numpy",))
    environ = {**request.environ, **thread_variables(int(threads), {}, override=True)}
    assert place.start(request._replace(environ=environ)).wait(DEADLINE_S) == 0, place.log.read_text()
    assert place.log.read_text() == fresh(request, environ) != ""


def test_it_computes_the_bits_of_a_fresh_process(place: Place) -> None:
    source = (
        "import hashlib\nimport numpy as np\nfrom parashard_worker.device import open_device\n"
        "a = np.random.default_rng(0).random((257, 129), np.float32)\n"
        "print(open_device('cpu', 'w').fingerprint(), hashlib.sha256((a.T @ a).tobytes()).hexdigest())\n"
    )
    request = place.request(source, preload=forks_module.SERVICES)
    environ = {**request.environ, **thread_variables(1, {}, override=True)}
    assert place.start(request._replace(environ=environ)).wait(DEADLINE_S) == 0
    assert place.log.read_text() == fresh(request, environ) != ""


# --- a server that cannot fork, or ends ---


def test_a_module_that_begins_a_thread_is_imported_in_the_child(place: Place, tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    source = (
        "import os, sys\nprint(len(os.listdir('/proc/self/task')), 'threaded' in sys.modules, 'wave' in sys.modules)"
    )
    assert place.said(source, preload=("threaded", "wave")) == "1 False True\n"


def test_a_module_that_opens_a_gpu_is_imported_in_the_child_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = tmp_path / "nvidia0"
    card.touch()
    monkeypatch.setattr(fork_server, "GPU_FILES", str(tmp_path / "nvidia"))
    monkeypatch.setattr(fork_server, "threads", lambda: 1)
    monkeypatch.setattr(fork_server.gc, "freeze", lambda: None)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("opening", "harmless"):
        (tmp_path / f"{name}.py").write_text(f"held = open({str(card)!r})\n" if name == "opening" else "")
    here, there = socket.socketpair()
    with here, there:
        server = ForkServer(there, -1)
        assert not fork_server.opens_gpu()
        server._prepare(Request([], "", {}, {"harmless": ""}))
        with pytest.raises(fork_server._Threaded, match="opening"):
            server._prepare(Request([], "", {}, {"opening": ""}))
        assert fork_server.opens_gpu()
        server._prepare(Request([], "", {}, {"wave": ""}))  # where each process has one open it is no module's
    sys.modules.pop("opening").held.close()
    assert not fork_server.opens_gpu()


def test_a_module_that_cannot_be_imported_is_left_to_the_child(place: Place, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('not here')")
    assert place.said("print('well')", preload=("broken", "missing_module")) == "well\n"


def test_a_server_that_was_killed_is_replaced_and_its_children_live(place: Place) -> None:
    child = place.start(place.request(WAITS))
    place.until_up()
    first = place.forks.server_pid
    os.kill(first, signal.SIGKILL)
    other = place.start(place.request("print('second')"))
    assert other.wait(DEADLINE_S) == 0
    assert (place.forks.server_pid == first, child.poll()) == (False, None)
    child.terminate()
    assert child.wait(DEADLINE_S) == -signal.SIGTERM


def test_a_server_that_does_not_answer_is_given_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place.said("print('first')") == "first\n"
    os.kill(place.forks.server_pid, signal.SIGSTOP)
    monkeypatch.setattr(forks_module, "FORK_S", 0.05)  # nothing is to be imported
    with pytest.raises(ForkServerLost, match="did not answer in 0 s"):
        place.start(place.request("print('never')"))
    assert place.forks.server_pid == 0


def test_servers_that_end_again_and_again_are_given_up(place: Place, tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import sys\nsys.exit('a library that ends the process')")
    with pytest.raises(ForkServerLost, match="3 fork servers ended, the last with exit code 1"):
        place.start(place.request("print('never')", preload=("deadly",)))
    assert place.forks.server_pid == 0
    assert place.server_log.read_text().count("a library that ends the process") == 3


def test_a_server_that_is_slow_to_end_has_its_own_exit_code(place: Place, tmp_path: Path) -> None:
    """It has closed its connection, and is not killed while the interpreter ends."""
    (tmp_path / "slow_to_end.py").write_text(
        "import atexit, os, select, sys\natexit.register(select.select, [], [], [], 0.1)\nsys.exit(7)"
    )
    with pytest.raises(ForkServerLost, match="the last with exit code 7"):
        place.start(place.request("print('never')", preload=("slow_to_end",)))


@pytest.mark.parametrize("optimize", ["", "1"])
def test_a_server_that_has_threads_before_it_imports_forks_nothing(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimize: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONOPTIMIZE", optimize)
    started: list[int] = []
    start = place.forks._start_server
    monkeypatch.setattr(place.forks, "_start_server", lambda: (started.append(1), start()))
    with pytest.raises(Unsupported, match="threads that no import of ours began"):
        place.start(place.request("print('never')", preload=("wave", "csv")))
    assert (len(started), place.log.read_text()) == (1, "")


def test_signals_and_settings_of_the_script_change_nothing(place: Place, tmp_path: Path) -> None:
    """A write to a server that was killed raises no SIGPIPE, and its socket waits whatever the default is."""
    (tmp_path / "launcher.py").write_text(
        "import os, signal, socket, sys\nfrom parashard.launch.forks import Forks, Request\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\nsocket.setdefaulttimeout(20.0)\n"
        "forks = Forks(os.pipe()[0], {})\n"
        "for number in range(2):\n"
        "    child = forks.start(Request([sys.executable, '-P', '-m', 'forked'], '', {**os.environ}, {}), 1)\n"
        "    assert child.wait(20.0) == 0\n"
        "    os.kill(forks.server_pid, signal.SIGKILL)\n"
        "    os.waitid(os.P_PID, forks.server_pid, os.WEXITED | os.WNOWAIT)\n"
        "forks.close()\n"
    )
    (tmp_path / "forked.py").write_text("print('forked')")
    done = subprocess.run([sys.executable, tmp_path / "launcher.py"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["forked", "forked"]), done.stderr


def test_a_program_that_ignores_its_children_forks_none(place: Place) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(Unsupported, match="ignores SIGCHLD"):
            place.start(place.request("print('never')"))
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert place.forks.server_pid == 0


def test_a_child_of_another_process_does_not_begin(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a system without subreapers."""
    monkeypatch.setattr(forks_module, "SUBREAPER", contextlib.nullcontext())
    with pytest.raises(ForkServerLost):
        place.start(place.request("print('never')"))
    assert place.log.read_text() == ""


def test_a_refused_fork_is_an_error_with_its_number(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's own fork is refused, and the launcher raises what it says."""

    def refused() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    ours, theirs = socket.socketpair()
    with ours, theirs, monkeypatch.context() as patch:
        patch.setattr(os, "fork", refused)
        assert not ForkServer(theirs, -1)._fork()
        assert read_message(ours, ours.recv(4)) == {"errno": 11}
    ours, theirs = socket.socketpair()
    place.forks._socket, place.forks._server = ours, subprocess.Popen(["true"])
    with theirs:
        send_message(theirs, {"errno": 11})
        with pytest.raises(OSError, match="Resource temporarily unavailable"):
            place.start(place.request(""))


def test_a_child_that_the_launcher_does_not_know_does_nothing(place: Place) -> None:
    """As of a launcher that was killed, or asked another server, before it had the answer."""
    ours, theirs = socket.socketpair()
    request = place.request("print('ran')")
    read, write = os.pipe()
    words = [sys.executable, "-P", "-m", forks_module.SERVER, str(theirs.fileno()), str(place.lifeline), "-" * 1000]
    with forks_module.SUBREAPER, subprocess.Popen(words, pass_fds=(theirs.fileno(), place.lifeline)) as server:
        theirs.close()
        with ours:
            with place.log.open("ab") as log:
                send_message(ours, request._asdict(), [log.fileno(), read])
            os.close(read)
            pid = read_message(ours, ours.recv(4))["pid"]
            os.close(write)
            assert Fork(pid).wait(DEADLINE_S) == ExitCode.RETRY
        assert place.log.read_text() == ""
        assert server.wait(DEADLINE_S) == 0


def test_a_length_that_is_not_allowed_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(OSError, match="allowed are 16,777,216"):
        read_message(ours, b"\xff\xff\xff\xff")


def test_a_script_has_the_frameworks_that_its_program_has_imported() -> None:
    assert script_modules({"torch": json, "keras": json, "parashard.torch": 1, "json": json}) == {
        "torch": json.__file__,
        "parashard.torch": "",
    }


def test_a_module_of_the_script_s_own_folder_is_left_to_the_child(place: Place, tmp_path: Path) -> None:
    for folder in ("here", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "vendored.py").write_text("")
    request = place.request("import sys\nprint('vendored' in sys.modules)")
    for file, imported in (("other/vendored.py", False), ("vendored.py", True)):
        child = place.start(request._replace(preload={"vendored": str(tmp_path / file)}))
        assert child.wait(DEADLINE_S) == 0
        assert place.log.read_text().split()[-1] == str(imported)
        place.forks.close()  # the next server has imported nothing


def test_a_server_forks_where_the_program_has_many_open_files(place: Place) -> None:
    """Its socket has a number that select() does not take."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while opened[-1] < 1100:
            opened.append(os.dup(opened[0]))
        assert place.said("print('forked')") == "forked\n"
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_several_threads_that_start_children_leave_the_process_as_it_was() -> None:
    libc, found = ctypes.CDLL(None), ctypes.c_int(-1)
    with forks_module.SUBREAPER:
        with forks_module.SUBREAPER:
            pass
        libc.prctl(forks_module.PR_GET_CHILD_SUBREAPER, ctypes.byref(found))
        assert found.value == 1  # for the other thread
    libc.prctl(forks_module.PR_GET_CHILD_SUBREAPER, ctypes.byref(found))
    assert found.value == 0


# --- for long ---


@pytest.mark.timeout(LARGE_S)
def test_starts_leave_no_descriptor_open(place: Place) -> None:
    request = place.request("")
    assert place.start(request).wait(DEADLINE_S) == 0
    server = place.forks.server_pid

    def open_files() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{server}/fd"))

    before = open_files()
    for _ in range(STARTS):
        assert place.start(request).wait(DEADLINE_S) == 0
    assert open_files() == before
    assert (place.forks.server_pid, len(os.listdir(f"/proc/{server}/task"))) == (server, 1)


def zombies() -> set[int]:
    """Return the children of this process that have ended and were not waited for."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state == "Z" and int(parent) == os.getpid():
                found.add(int(path.parent.name))
    return found


@pytest.mark.timeout(LARGE_S)
def test_whatever_is_killed_at_any_moment_each_child_runs_at_most_once(place: Place) -> None:
    """The server, a child, or both are killed at a moment of a start, at its end at the latest."""
    chance, ran = random.Random(0), place.folder / "ran"
    ran.touch()
    source = f"import sys\nwith open({str(ran)!r}, 'a') as file: file.write(sys.argv[1] + ' ')\n"
    request = place.request(source)
    stopping = threading.Event()
    begun: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()  # for each start what tells that it is over
    children: list[Fork] = []

    def kill() -> None:
        for _ in range(KILLS):
            begun.get(timeout=DEADLINE_S).wait(chance.uniform(0.0, chance.choice([START_S, SERVER_START_S])))
            victims = chance.choice(["server", "child", "both"])
            for pid in [place.forks.server_pid] * (victims != "child"):
                if pid:
                    os.kill(pid, signal.SIGKILL)
            if children and victims != "server":
                children[-1].kill()
        stopping.set()

    killer = threading.Thread(target=kill)
    killer.start()
    given_up = 0
    number = 0
    try:
        while not stopping.is_set():
            number += 1
            command = [*request.command[:-1], f"n{number}", request.command[-1]]
            begun.put(over := threading.Event())
            try:
                children.append(place.start(request._replace(command=command)))
            except ForkServerLost:
                given_up += 1
            over.set()
    finally:
        killer.join()
    ends = Counter(child.wait(DEADLINE_S) for child in children)
    runs = Counter(ran.read_text().split())
    assert set(ends) <= {0, -signal.SIGKILL}
    place.forks.close()  # the last kill may have been its server's
    assert zombies() == set()
    assert max(runs.values(), default=1) == 1
    assert ends[0] <= len(runs) <= len(children)
    assert given_up < len(children)
