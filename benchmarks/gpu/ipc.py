"""CUDA IPC beside the host's way: `python -m benchmarks.gpu.ipc [--device cuda:N]`.

Another process on the same GPU has a vector; this one wants it. By CUDA IPC it opens the other's memory and copies on
the device; by way of the host the other copies into page-locked memory that both have, and this one copies out of it.
Both include asking the other process, which answers once its own work is done. At the end the other process is killed
while its memory is read. Prints a JSON object for each row. A measurement, no feature: decision 0014 has the reasons.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from benchmarks.gpu.memory import timed
from benchmarks.gpu.rows import TIME, Row, missing, row
from parashard.process import cuda

IPC, DEATH = "A vector of another process on the GPU", "Its process is killed while the vector is read"
HOSTS_WAY = "by way of the host"
SIZES_MB = (5, 176)
FILLS = (7, 11)
KILLED_AFTER_S, READ_S = 0.3, 1.5
LOOKED_AT_EVERY = 50  # copies
REGISTER_PORTABLE = 1


class Vector:
    """The other process's vector, in its device memory, and the host's memory that both share.

    Parameters
    ----------
    runtime : module
        `cupy.cuda.runtime`: memory is named by addresses.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._address, self._bytes = 0, 0
        self._host: np.ndarray | None = None

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do what the reader asks for, and return once it is done."""
        runtime, found = self._runtime, {"done": True}
        match command["do"]:
            case "make":
                self._bytes = command["bytes"]
                self._address = runtime.malloc(self._bytes)
                self._host = locked(runtime, command["shared"], self._bytes)
                found["handle"] = runtime.ipcGetMemHandle(self._address).hex()
            case "fill":
                runtime.memset(self._address, command["value"], self._bytes)
            case "to host":
                assert self._host is not None
                runtime.memcpy(self._host.ctypes.data, self._address, self._bytes, runtime.memcpyDeviceToHost)
            case "free":
                assert self._host is not None
                runtime.hostUnregister(self._host.ctypes.data)
                runtime.free(self._address)
        runtime.deviceSynchronize()
        return found


class Other:
    """The other process."""

    def __init__(self, device: str) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu.ipc", "--other", "--device", device]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def ask(self, **command: Any) -> dict[str, Any]:
        """Have it do something; RuntimeError if it ends."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(command) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"the other process ended with {self._process.wait()} at {command}")
        found: dict[str, Any] = json.loads(line)
        return found

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        self._process.kill()
        self._process.wait()


def locked(runtime: Any, shared: str, size_bytes: int) -> np.ndarray:
    """Return a shared file as page-locked memory."""
    descriptor = os.open(shared, os.O_RDWR)
    try:
        host = np.frombuffer(mmap.mmap(descriptor, size_bytes), np.uint8)
    finally:
        os.close(descriptor)
    host[:] = 0
    runtime.hostRegister(host.ctypes.data, size_bytes, REGISTER_PORTABLE)
    return host


class Reader:
    """This process: its own memory on the device, and its mappings of the other's."""

    def __init__(self, runtime: Any, other: Any, size_bytes: int) -> None:
        self._runtime, self._other, self._bytes = runtime, other, size_bytes
        descriptor = os.memfd_create("vector")
        os.ftruncate(descriptor, size_bytes)
        shared = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._host = locked(runtime, shared, size_bytes)
        self._own = runtime.malloc(size_bytes)
        self._handle = bytes.fromhex(other.ask(do="make", bytes=size_bytes, shared=shared)["handle"])
        os.close(descriptor)
        self._theirs = runtime.ipcOpenMemHandle(self._handle)
        self._seen = np.zeros(size_bytes, np.uint8)

    def by_ipc(self) -> None:
        """Get the vector on the device."""
        self._other.ask(do="wait")
        self.copy()

    def by_host(self) -> None:
        """Get the vector through the host."""
        self._other.ask(do="to host")
        self._runtime.memcpy(self._own, self._host.ctypes.data, self._bytes, self._runtime.memcpyHostToDevice)
        self._runtime.deviceSynchronize()

    def copy(self) -> None:
        """Copy the other's memory to this process's own, and wait."""
        self._runtime.memcpy(self._own, self._theirs, self._bytes, self._runtime.memcpyDeviceToDevice)
        self._runtime.deviceSynchronize()

    def has(self, value: int) -> bool:
        """Tell whether every byte of the copies has this value."""
        self._runtime.memcpy(self._seen.ctypes.data, self._own, self._bytes, self._runtime.memcpyDeviceToHost)
        return bool((self._seen == value).all())

    def checked(self) -> None:
        """Get the values that the other has just written, both ways; AssertionError if they are wrong."""
        for value, way in zip(FILLS, (self.by_ipc, self.by_host), strict=True):
            self._other.ask(do="fill", value=value)
            way()
            assert self.has(value), f"{way.__name__}: not what the other process wrote"

    def reopened(self) -> str:
        """Close the other's memory, open it again, and return the outcome."""
        try:
            self._runtime.ipcCloseMemHandle(self._theirs)
            self._theirs = self._runtime.ipcOpenMemHandle(self._handle)
        except RuntimeError as error:
            return str(error)
        return "it opens"

    def close(self) -> None:
        """Give back all memory."""
        self._runtime.ipcCloseMemHandle(self._theirs)
        self._other.ask(do="free")
        self._runtime.hostUnregister(self._host.ctypes.data)
        self._runtime.free(self._own)


def speed_rows(runtime: Any, other: Any, sizes_mb: Sequence[float], turns: int) -> Iterator[Row]:
    """Yield a row for each size: CUDA IPC against the host's way."""
    for size_mb in sizes_mb:
        reader = Reader(runtime, other, int(size_mb * 1e6))
        reader.checked()
        times = timed({"ipc": reader.by_ipc, "host": reader.by_host}, turns)
        reader.close()
        yield row(IPC, f"{size_mb:g} MB", HOSTS_WAY, TIME, (times["ipc"], times["host"]))


def death_row(runtime: Any, other: Any, size_mb: float, read_s: float) -> Row:
    """Return a row on what a reader sees of a vector whose process is killed during the read."""
    reader = Reader(runtime, other, int(size_mb * 1e6))
    other.ask(do="fill", value=FILLS[0])
    killed = threading.Event()

    def kill() -> None:
        other.kill()
        killed.set()

    timer = threading.Timer(KILLED_AFTER_S, kill)
    timer.start()
    copies, after, said, until_s = 0, 0, "", time.perf_counter() + read_s
    try:
        while time.perf_counter() < until_s or not after:
            reader.copy()
            copies += 1
            after += killed.is_set()
            if (copies % LOOKED_AT_EVERY == 0 or after == 1) and not reader.has(FILLS[0]):
                said = "other bytes, and no error; "
                break
    except RuntimeError as error:
        said = f"{error}; "
    timer.join()
    said = said or "its bytes, and no error; "
    said = f"after {copies - after:,} copies and {after:,} after its death: {said}opened again: {reader.reopened()}"
    return missing(DEATH, f"{size_mb:g} MB", said)


def main() -> None:
    """Measure, and print each row at once; or be the other process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--sizes-mb", type=float, nargs="+", default=SIZES_MB)
    parser.add_argument("--other", action="store_true", help="run as the process that owns the vector")
    asked = parser.parse_args()
    index = None if asked.device == "cpu" else cuda.index_of(asked.device, "")
    if index is None:
        parser.error(f"--device {asked.device}: CUDA IPC needs a GPU")
    cuda.device(index)
    runtime = cuda.namespace().cuda.runtime
    if asked.other:
        vector = Vector(runtime)
        for line in sys.stdin:
            print(json.dumps(vector.answer(json.loads(line))), flush=True)
        return
    other = Other(asked.device)
    try:
        for found in speed_rows(runtime, other, asked.sizes_mb, asked.turns):
            print(json.dumps(found), flush=True)
        print(json.dumps(death_row(runtime, other, max(asked.sizes_mb), READ_S)), flush=True)
    finally:
        with suppress(OSError):
            other.kill()


if __name__ == "__main__":
    main()
