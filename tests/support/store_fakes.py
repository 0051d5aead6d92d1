"""A checkpoint store in memory that can be told to fail: what the tests of several folders share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from parashard.errors import AlreadyStored, NotStored, StoreFailed
from parashard.store.base import checked_folder, checked_name


@dataclass
class Fault:
    """A failure that was ordered; `fired` says how often it struck: a test asserts that it did."""

    operation: str
    within: str
    after: int
    times: int
    error: StoreFailed
    carried_out: bool = False  # what was asked for has happened, and only the reply was lost
    met: int = 0
    fired: int = 0


@dataclass
class MemoryStore:
    """Keeps the promises of `parashard.store.Store` in a dictionary; `contents` may be damaged by the test.

    `calls` lists (operation, name) of every call, those that failed too.
    """

    url: str = "memory://test"
    contents: dict[str, bytes] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    _faults: list[Fault] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def fail(
        self,
        operation: str,
        within: str = "",
        *,
        after: int = 0,
        times: int = 1,
        error: StoreFailed | None = None,
    ) -> Fault:
        """Let `operation` on names that contain `within` fail: the first `after` calls pass, the next `times` do not.

        A failed call changes nothing. Operations are named as the methods.
        """
        error = error or StoreFailed(f"{self.url}: no space left on device")
        fault = Fault(operation, within, after, times, error)
        self._faults.append(fault)
        return fault

    def lose_reply(self, operation: str, within: str = "", *, error: StoreFailed | None = None) -> Fault:
        """Let the next `create` of such a name happen and its reply be lost; by default it is sent again by a library.

        That finds the name taken, by itself (`parashard.store.remote`).
        """
        assert operation == "create", operation
        error = error or AlreadyStored(f"{self.url}: is there already")
        fault = Fault(operation, within, 0, 1, error, carried_out=True)
        self._faults.append(fault)
        return fault

    def create(self, name: str, content: bytes | memoryview) -> None:
        with self._lock:
            self._called("create", checked_name(name), lambda: self.contents.setdefault(name, bytes(content)))
            if name in self.contents:
                raise AlreadyStored(f"{self.url}/{name}: is there already")
            self.contents[name] = bytes(content)

    def replace(self, name: str, content: bytes | memoryview) -> None:
        with self._lock:
            self._called("replace", checked_name(name))
            self.contents[name] = bytes(content)

    def read(self, name: str, size_max: int) -> bytes:
        with self._lock:
            self._called("read", checked_name(name))
            content = self._content(name)
            if len(content) > size_max:
                raise StoreFailed(f"{self.url}/{name}: {len(content)} bytes; allowed: at most {size_max}")
            return content

    def size(self, name: str) -> int:
        with self._lock:
            self._called("size", checked_name(name))
            return len(self._content(name))

    def names(self, folder: str) -> list[str]:
        with self._lock:
            self._called("names", checked_folder(folder))
            return sorted(rest for rest in self._below(folder) if "/" not in rest)

    def folders(self, folder: str) -> list[str]:
        with self._lock:
            self._called("folders", checked_folder(folder))
            return sorted({rest.partition("/")[0] for rest in self._below(folder) if "/" in rest})

    def delete(self, name: str) -> None:
        with self._lock:
            self._called("delete", checked_name(name))
            self.contents.pop(name, None)

    def local_path(self, name: str) -> Path | None:
        checked_name(name)
        return None

    def _called(self, operation: str, name: str, carry_out: Callable[[], object] = lambda: None) -> None:
        self.calls.append((operation, name))
        for fault in self._faults:
            if fault.operation == operation and fault.within in name:
                fault.met += 1
                if fault.after < fault.met <= fault.after + fault.times:
                    fault.fired += 1
                    if fault.carried_out:
                        carry_out()
                    raise fault.error

    def _content(self, name: str) -> bytes:
        if name not in self.contents:
            raise NotStored(f"{self.url}/{name}: there is nothing")
        return self.contents[name]

    def _below(self, folder: str) -> list[str]:
        prefix = f"{folder}/" if folder else ""
        return [name.removeprefix(prefix) for name in self.contents if name.startswith(prefix)]
