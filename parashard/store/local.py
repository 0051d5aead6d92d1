"""A store in a folder of this host's file system.

Owns the order of system calls that makes a file appear whole, once and durably, and the clean-up after a failure. Does
not know what is stored. Opened by `parashard.store.open_store`.

Content is written to a temporary file in its folder (so that both are on one file system), flushed with fsync, and
only then given its name: by `link`, which fails if the name exists, or by `rename`, which replaces. Then the folder is
flushed, and every folder above it up to the store's, because a folder that another process has just made may not be
durable yet. A temporary starts with '.', which no name does: one left by a killed writer is never listed or read. The
file system must have hard links (every common Linux one has).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from parashard.errors import AlreadyStored, NotStored, StoreFailed
from parashard.store.base import checked_folder, checked_name, is_segment

FOLDER_ATTEMPTS_MAX = 100
"""Attempts to create a file in a folder that concurrent deletions keep removing."""

_NO_SUCH_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class LocalStore:
    """Keep contents as files below `folder`, which the first write creates. Safe to use from many threads."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder).absolute()

    @property
    def url(self) -> str:
        """The folder's absolute path."""
        return str(self.folder)

    def create(self, name: str, content: bytes | memoryview) -> None:
        """Link a flushed temporary to the name; see `Store.create`."""
        path = self._path(name)
        with self._failing("create", name):
            if os.path.lexists(path):  # spares the writing; the link decides
                raise AlreadyStored(f"{self.url}: {name} is stored already")
            temporary = self._write_temporary(path.parent, content)
            try:
                os.link(temporary, path)
                try:
                    self._flush_folders(path.parent)
                except OSError:
                    with suppress(OSError):
                        os.unlink(path)  # not acknowledged, so it must not be found
                    raise
            except FileExistsError:
                raise AlreadyStored(f"{self.url}: {name} is stored already") from None
            finally:
                with suppress(OSError):
                    os.unlink(temporary)

    def replace(self, name: str, content: bytes | memoryview) -> None:
        """Rename a flushed temporary to the name; see `Store.replace`."""
        path = self._path(name)
        with self._failing("replace", name):
            temporary = self._write_temporary(path.parent, content)
            try:
                os.replace(temporary, path)
            except OSError:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
            self._flush_folders(path.parent)

    def read(self, name: str, size_max: int) -> bytes:
        """Read the file; see `Store.read`. A concurrent `replace` does not change what is read."""
        path = self._path(name)
        with self._failing("read", name), self._finding(name), open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > size_max:
                raise StoreFailed(f"{self.url}: {name} has {size} bytes, allowed are {size_max}")
            content = file.read(size)
            if len(content) != size:
                raise StoreFailed(f"{self.url}: {name} ended after {len(content)} of {size} bytes")
            return content

    def size(self, name: str) -> int:
        """Return the file's size; see `Store.size`."""
        path = self._path(name)
        with self._failing("look up", name), self._finding(name):
            found = os.stat(path)
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError
            return found.st_size

    def names(self, folder: str) -> list[str]:
        """List the files; see `Store.names`."""
        return self._entries(folder, os.DirEntry.is_file)

    def folders(self, folder: str) -> list[str]:
        """List the folders; see `Store.folders`."""
        return self._entries(folder, os.DirEntry.is_dir)

    def delete(self, name: str) -> None:
        """Unlink the file, and remove its folder if it is empty now; see `Store.delete`."""
        path = self._path(name)
        with self._failing("delete", name):
            with suppress(*_NO_SUCH_FILE):
                os.unlink(path)
            if path.parent != self.folder:
                with suppress(OSError):  # it holds other files, or is gone; an empty folder is harmless
                    os.rmdir(path.parent)
            self._flush_folders(path.parent)

    def local_path(self, name: str) -> Path:
        """Return the name's file, which may not exist; see `Store.local_path`."""
        return self._path(name)

    def _path(self, name: str) -> Path:
        return self.folder / checked_name(name)

    def _entries(self, folder: str, is_wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
        path = self.folder / checked_folder(folder)
        with self._failing("list", folder or "the store"):
            try:
                with os.scandir(path) as entries:
                    return sorted(entry.name for entry in entries if is_segment(entry.name) and is_wanted(entry))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def _write_temporary(self, folder: Path, content: bytes | memoryview) -> Path:
        """Write and flush the content to a new file in the folder; remove the file after an error."""
        temporary = folder / f".{os.urandom(16).hex()}"
        descriptor = self._open_in(folder, temporary)
        try:
            try:
                left = memoryview(content).cast("B")
                while left:
                    left = left[os.write(descriptor, left) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        return temporary

    def _open_in(self, folder: Path, temporary: Path) -> int:
        for _ in range(FOLDER_ATTEMPTS_MAX):
            # No such file: a concurrent deletion of the folder's last file removed the folder.
            with suppress(FileNotFoundError):
                os.makedirs(folder, exist_ok=True)
                return os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        raise StoreFailed(f"{folder}: no such folder, or it was removed {FOLDER_ATTEMPTS_MAX} times over")

    def _flush_folders(self, folder: Path) -> None:
        """Flush the folder and those above it, up to the one that holds the store."""
        for path in (folder, *folder.parents):
            if path == self.folder.parent.parent:
                break
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError, PermissionError):  # gone, or above the store and not ours
                continue
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    @contextmanager
    def _failing(self, doing: str, what: str) -> Iterator[None]:
        """Raise an OSError as `StoreFailed`, with the place and the cause."""
        try:
            yield
        except OSError as error:
            cause = os.strerror(error.errno) if error.errno else str(error)
            raise StoreFailed(f"{self.url}: cannot {doing} {what}: {cause.lower()}") from error

    @contextmanager
    def _finding(self, name: str) -> Iterator[None]:
        """Raise `NotStored` if there is no such file."""
        try:
            yield
        except _NO_SUCH_FILE:
            raise NotStored(f"{self.url}: {name} is not stored") from None
