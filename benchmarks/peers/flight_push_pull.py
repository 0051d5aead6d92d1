"""Arrow Flight: a push is a `do_put`, a pull a `do_get`, both in record batches of at most 4 MiB.

The server applies each batch as it arrives and answers a push by metadata once all are in; the worker copies each batch
that it pulls into its own array. No copy is made on the sending sides.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from pyarrow import flight

from benchmarks.peers import seam

BATCH_ELEMENTS = 1 << 20  # 4 MiB
SCHEMA = pa.schema([("values", pa.float32())])
PUSH = flight.FlightDescriptor.for_path("push")


class Server(flight.FlightServerBase):
    """The weights, and the three calls."""

    def __init__(self) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._weights = self._step = np.empty(0, np.float32)

    def do_action(self, _: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
        """Reset the weights to zeros, of this size."""
        self._weights, self._step = np.zeros((2, int(action.body.to_pybytes())), np.float32)
        return []

    def do_put(
        self,
        _: flight.ServerCallContext,
        __: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        """Apply a gradient."""
        start = 0
        for chunk in reader:
            gradient = chunk.data.column(0).to_numpy()
            run = slice(start, start + gradient.size)
            np.multiply(gradient, np.float32(seam.LEARNING_RATE), out=self._step[run])
            np.subtract(self._weights[run], self._step[run], out=self._weights[run])
            start = run.stop
        writer.write(b"applied")

    def do_get(self, _: flight.ServerCallContext, __: flight.Ticket) -> flight.GeneratorStream:
        """Return the weights."""
        return flight.GeneratorStream(SCHEMA, batches(self._weights))


class FlightPushPull(seam.PushPull):
    """The worker."""

    def __init__(self, address: str) -> None:
        self._client = flight.FlightClient(address)

    def open(self, gradient: seam.Floats) -> None:
        """Put zeros on the server."""
        self._gradient = gradient
        self._pulled = np.empty_like(gradient)
        list(self._client.do_action(flight.Action("open", str(gradient.size).encode())))

    def push(self) -> None:
        """Send the gradient, and wait for the answer."""
        writer, answers = self._client.do_put(PUSH, SCHEMA)
        for batch in batches(self._gradient):
            writer.write_batch(batch)
        writer.done_writing()
        assert answers.read().to_pybytes() == b"applied"
        writer.close()

    def pull(self) -> seam.Floats:
        """Ask for the weights."""
        start = 0
        for chunk in self._client.do_get(flight.Ticket(b"")):
            values = chunk.data.column(0).to_numpy()
            self._pulled[start : start + values.size] = values
            start += values.size
        return self._pulled


def batches(values: seam.Floats) -> Iterator[pa.RecordBatch]:
    """Yield views of values as record batches."""
    for start in range(0, values.size, BATCH_ELEMENTS):
        yield pa.record_batch([pa.array(values[start : start + BATCH_ELEMENTS])], schema=SCHEMA)


def main() -> None:
    """Start the server and answer rounds."""
    if sys.argv[1:] == ["--serve"]:
        server = Server()
        print(f"grpc://127.0.0.1:{server.port}", flush=True)
        server.serve()
        return
    process, address = seam.start_server("benchmarks.peers.flight_push_pull", "--serve")
    seam.serve(seam.push_pull_answers(FlightPushPull(address)), ["pyarrow", "numpy"])
    process.kill()


if __name__ == "__main__":
    main()
