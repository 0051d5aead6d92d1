"""Proxy: TCP links with a stable front address and faults that are switched on and off.

All links run in one thread with one event loop. A connection to a link's front is forwarded to the present address of
the link's backend, which may change.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

CHUNK_BYTES_MAX = 64 * 1024
CHUNKS_UNDER_WAY_MAX = 64  # in each direction of a connection: 4 MiB delayed or held
CONNECTIONS_MAX = 512  # of one link; more are reset
CONNECT_S = 5.0
ANSWER_S = 10.0  # deadline of a call in the proxy's thread

Backend = Callable[[], tuple[str, int] | None]
"""Returns the present host and port of a link's backend; None: it has none."""

_Result = TypeVar("_Result")
_Chunk = tuple[float, bytes]  # earliest time to forward it, by the event loop's clock; empty: end of stream


@dataclass(frozen=True)
class LinkFaults:
    """Faults of a link; `|` combines two.

    Held bytes are forwarded after the fault, as TCP would retransmit them: a request may arrive long after its sender
    has given up or died. With `duplicate`, bytes of clients on connections opened during the fault are also sent to the
    backend on a second connection, whose answers are discarded.
    """

    delay_s: float = 0.0  # delay of bytes in each direction
    requests_held: bool = False
    answers_held: bool = False
    duplicate: bool = False

    def __or__(self, other: LinkFaults) -> LinkFaults:
        return LinkFaults(
            max(self.delay_s, other.delay_s),
            self.requests_held or other.requests_held,
            self.answers_held or other.answers_held,
            self.duplicate or other.duplicate,
        )


NO_LINK_FAULTS = LinkFaults()


class Proxy:
    """The thread of all links. A context manager: its exit closes every connection."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._links: list[ProxiedLink] = []

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for link in self._links:
            self._run(link.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def link(self, name: str, backend: Backend) -> ProxiedLink:
        """Open a link with a front on 127.0.0.1; `backend` is called at each connection."""
        link = ProxiedLink(name, backend, self._run)
        self._run(link.open())
        self._links.append(link)
        return link

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(ANSWER_S)


class ProxiedLink:
    """One front address and its connections. Created by `Proxy.link`."""

    def __init__(self, name: str, backend: Backend, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self.name = name
        self.address = ""
        self._backend = backend
        self._run = run
        self._faults = NO_LINK_FAULTS
        self._server: asyncio.Server | None = None
        self._carrying: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()

    # --- from any thread ---

    def set_faults(self, faults: LinkFaults) -> None:
        """Set the present faults."""
        self._run(self._set_faults(faults))

    def reset(self) -> None:
        """Reset every connection in both directions: bytes in flight are lost."""
        self._run(self._reset())

    # --- in the proxy's thread ---

    async def open(self) -> None:
        """Start to listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=CHUNK_BYTES_MAX)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    async def close(self) -> None:
        """Stop listening, and reset every connection."""
        assert self._server is not None, "the link was not opened"
        self._server.close()
        await self._reset()

    async def _set_faults(self, faults: LinkFaults) -> None:
        async with self._changed:
            self._faults = faults
            self._changed.notify_all()

    async def _reset(self) -> None:
        tasks = list(self._carrying)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._carrying) >= CONNECTIONS_MAX:
            _abort(writer)
            return
        task = asyncio.get_running_loop().create_task(self._carry(reader, writer))
        self._carrying.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._carrying.discard(task)
            if task.cancelled():  # possibly before it started: then its own clean-up has not run
                _abort(writer)

        task.add_done_callback(ended)

    async def _carry(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        """Forward one connection until both directions have ended, or one is broken."""
        writers = [client]
        finish: Callable[[asyncio.StreamWriter], None] = _abort
        try:
            answers, backend = await self._connect(writers)
            receivers = [backend]
            async with asyncio.TaskGroup() as tasks:
                if self._faults.duplicate:
                    ignored, second = await self._connect(writers)
                    receivers.append(second)
                    tasks.create_task(_ignore(ignored))
                tasks.create_task(self._stream(reader, receivers, lambda faults: faults.requests_held))
                tasks.create_task(self._stream(answers, [client], lambda faults: faults.answers_held))
            finish = asyncio.StreamWriter.close  # flushes unsent bytes
        except* OSError:
            pass  # one end is gone or was never connected
        finally:
            for writer in writers:
                finish(writer)

    async def _connect(self, opened: list[asyncio.StreamWriter]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        where = self._backend()
        if where is None:
            raise ConnectionRefusedError
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(*where, limit=CHUNK_BYTES_MAX)
        opened.append(writer)
        return reader, writer

    async def _stream(
        self,
        reader: asyncio.StreamReader,
        writers: list[asyncio.StreamWriter],
        held: Callable[[LinkFaults], bool],
    ) -> None:
        """Forward one direction until its end; the first writer is the real one, the second the duplicate."""
        under_way: asyncio.Queue[_Chunk] = asyncio.Queue(CHUNKS_UNDER_WAY_MAX)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take_in(reader, under_way))
            tasks.create_task(self._give_out(under_way, writers, held))

    async def _take_in(self, reader: asyncio.StreamReader, under_way: asyncio.Queue[_Chunk]) -> None:
        now_s = asyncio.get_running_loop().time
        content = b"-"
        while content:
            content = await reader.read(CHUNK_BYTES_MAX)
            await under_way.put((now_s() + self._faults.delay_s, content))

    async def _give_out(
        self, under_way: asyncio.Queue[_Chunk], writers: list[asyncio.StreamWriter], held: Callable[[LinkFaults], bool]
    ) -> None:
        now_s = asyncio.get_running_loop().time
        content = b"-"
        while content:
            due_s, content = await under_way.get()
            if (wait_s := due_s - now_s()) > 0:
                await asyncio.sleep(wait_s)
            async with self._changed:
                await self._changed.wait_for(lambda: not held(self._faults))
            if len(writers) > 1 and not self._faults.duplicate:
                _abort(writers.pop())
            await _send(writers[0], content)
            for duplicate in writers[1:]:
                with suppress(OSError):  # the backend may refuse the duplicate; the real one continues
                    await _send(duplicate, content)


async def _send(writer: asyncio.StreamWriter, content: bytes) -> None:
    """Send bytes, or the end of the stream if there are none."""
    if content:
        writer.write(content)
        await writer.drain()
    elif writer.can_write_eof():
        writer.write_eof()


async def _ignore(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await reader.read(CHUNK_BYTES_MAX):
            pass


def _abort(writer: asyncio.StreamWriter) -> None:
    """Reset a connection, discarding unsent bytes."""
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
