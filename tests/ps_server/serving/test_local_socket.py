"""Where a shard listens for its own host: for this user alone, and nothing is left of what has died."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from parashard_server.serving import listeners as module
from parashard_server.serving.listeners import PATH_BYTES_MAX, LocalSocket, local_socket, sweep


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a short name: a socket's path has little room."""
    return tmp_path_factory.mktemp("s")


@pytest.fixture
def listen(root: Path, request: pytest.FixtureRequest) -> Callable[..., LocalSocket]:
    """Return a function that makes a shard's socket, which the test closes at its end."""

    def made(run_id: str = "r1", shard: int = 0, incarnation: int = 1) -> LocalSocket:
        socket_ = LocalSocket(run_id, shard, incarnation, root=root)
        request.addfinalizer(socket_.close)
        request.addfinalizer(socket_.listening.close)
        return socket_

    return made


def home(root: Path) -> Path:
    return root / f"parashard-{os.getuid()}"


def names(root: Path) -> list[str]:
    """Return all that is there below a root."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def dead_socket(path: Path) -> Path:
    """Leave what a killed process leaves: a socket without a listener."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
    return path


class TestItsPlace:
    """One folder a user, one a run, one name a process; no other user may enter."""

    def test_it_listens_under_a_name_with_run_and_incarnation(self, root: Path, listen) -> None:
        mine = listen("r1", 3, 17)
        assert mine.path == str(home(root) / "r1" / "shard-3.17.sock")
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(mine.path)
            accepted, _ = mine.listening.accept()
            accepted.close()

    def test_only_its_user_gets_there(self, root: Path, listen) -> None:
        mine = listen()
        assert [mode(p) for p in (home(root), home(root) / "r1", mine.path)] == [0o700, 0o700, 0o600]

    def test_the_modes_do_not_depend_on_the_umask(self, root: Path, listen) -> None:
        before = os.umask(0)
        try:
            mine = listen()
        finally:
            os.umask(before)
        assert [mode(p) for p in (home(root), mine.path)] == [0o700, 0o600]

    def test_shards_of_a_run_share_its_folder_and_the_last_one_removes_it(self, root: Path, listen) -> None:
        first, second = listen(shard=0), listen(shard=1)
        first.close()
        assert not os.path.exists(first.path)
        assert os.path.exists(second.path)
        second.close()
        assert names(root) == []
        second.close()

    def test_what_another_user_has_connected_is_closed(self, listen, monkeypatch: pytest.MonkeyPatch) -> None:
        mine, own = listen(), iter([False, True])
        monkeypatch.setattr(module, "is_own_user", lambda connection: next(own))
        with socket.socket(socket.AF_UNIX) as foreign, socket.socket(socket.AF_UNIX) as friend:
            foreign.connect(mine.path)
            friend.connect(mine.path)
            accepted, _ = mine.listening.accept()
            with accepted:
                assert foreign.recv(1) == b"", "closed"
                friend.send(b"x")
                assert accepted.recv(1) == b"x"


class TestSweeping:
    """A shard's start removes what killed shards have left, of whatever run, and nothing else."""

    def test_dead_sockets_go_and_empty_folders_with_them(self, root: Path, listen) -> None:
        for run in ("r0", "r1", "r2"):
            (home(root) / run).mkdir(mode=0o700, parents=True)
        home(root).chmod(0o700)
        dead_socket(home(root) / "r0" / "shard-0.1.sock")
        dead_socket(home(root) / "r0" / "shard-1.2.sock")
        dead_socket(home(root) / "r1" / "shard-0.1.sock")
        listen("r1", 0, 2)
        assert names(home(root)) == ["r1", "r1/shard-0.2.sock"]

    def test_living_ones_stay_and_so_does_what_is_no_socket(self, root: Path, listen) -> None:
        listen("r0")
        (home(root) / "r0" / "notes.txt").write_text("not ours")
        listen("r1")
        assert names(home(root)) == ["r0", "r0/notes.txt", "r0/shard-0.1.sock", "r1", "r1/shard-0.1.sock"]

    def test_one_whose_line_is_full_is_alive(self, root: Path) -> None:
        path = home(root) / "r0" / "shard-0.1.sock"
        path.parent.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
            busy.bind(str(path))
            busy.listen(0)
            waiting.connect(str(path))
            sweep(home(root))
            assert path.exists()

    def test_there_may_be_nothing_to_sweep(self, root: Path) -> None:
        sweep(home(root))
        assert names(root) == []

    def test_a_sweep_may_come_between_any_two_steps_of_another_shards_start(self, root: Path, monkeypatch) -> None:
        rename, swept = os.rename, []

        def rename_after_a_sweep(first: str, second: str) -> None:
            if not swept:
                swept.append(names(home(root)))
                os.unlink(first)  # as a sweep would have, before the socket listened
                sweep(home(root))
            rename(first, second)

        monkeypatch.setattr(os, "rename", rename_after_a_sweep)
        mine = LocalSocket("r1", 0, 1, root=root)
        assert swept == [["r1", "r1/shard-0.1.new"]], "no name that a worker is told before it listens"
        assert names(home(root)) == ["r1", "r1/shard-0.1.sock"]
        mine.listening.close()


class TestWhereItCannotBe:
    """The shard serves without it; the log says why."""

    def test_a_path_that_is_too_long(self, root: Path) -> None:
        run_id = "r" * PATH_BYTES_MAX
        with pytest.raises(OSError, match="at most 107 bytes"):
            LocalSocket(run_id, 0, 1, root=root)
        assert local_socket(run_id, 0, 1, root=root) is None
        assert names(root) == []

    @pytest.mark.parametrize("run_id", ["", ".", "..", "a/b", "../x", "/x"])
    def test_a_run_id_that_is_no_name(self, root: Path, run_id: str) -> None:
        with pytest.raises(OSError, match="not the name of a folder"):
            LocalSocket(run_id, 0, 1, root=root)

    def test_a_root_that_is_missing_or_cannot_be_written(self, root: Path) -> None:
        (root / "file").write_text("")
        assert local_socket("r1", 0, 1, root=root / "file") is None
        assert local_socket("r1", 0, 1, root=root / "missing") is None

    def test_a_folder_that_others_may_enter(self, root: Path) -> None:
        home(root).mkdir()
        home(root).chmod(0o755)
        assert local_socket("r1", 0, 1, root=root) is None

    def test_a_folder_that_is_a_link_and_nothing_behind_it_is_swept(self, root: Path) -> None:
        dead_socket(root / "elsewhere" / "r0" / "shard-0.1.sock")
        home(root).symlink_to(root / "elsewhere")
        assert local_socket("r1", 0, 1, root=root) is None
        assert names(root / "elsewhere") == ["r0", "r0/shard-0.1.sock"]

    def test_a_folder_of_another_user(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        uid = os.getuid()
        (root / f"parashard-{uid + 1}").mkdir(mode=0o700)
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        assert local_socket("r1", 0, 1, root=root) is None
