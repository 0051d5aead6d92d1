"""StatusPort: the coordinator's HTTP port over a status and a timeline that a test makes up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from parashard._proto import coordinator_pb2 as pb
from parashard.telemetry.http import HttpPort, Metrics
from parashard_coordinator.endpoints.history import Timeline, row
from parashard_coordinator.endpoints.page import history_json, status_pages
from support.status_cases import status_of


class StatusPort:
    """What a coordinator serves to browsers."""

    def __init__(self) -> None:
        self.status = status_of(run_id="run-1")
        self.timeline = Timeline()
        self.coordinator = 1
        pages = status_pages(
            lambda: self.status,
            lambda since: history_json(self.timeline, since, self.status.run_id, self.coordinator),
        )
        self.port = HttpPort("127.0.0.1", 0, Metrics("coordinator"), lambda: "", pages)
        self.url = f"http://{self.port.address}/"

    def show(self, status: pb.GetStatusReply) -> None:
        """Have this be the status from now on, and the timeline's next point."""
        self.status = status
        self.timeline.add(row(status))

    def begin_again(self) -> None:
        """Be another coordinator of the same run, without the history of the one before."""
        self.coordinator += 1
        self.timeline = Timeline()


@contextmanager
def status_port() -> Iterator[StatusPort]:
    """Serve until the block ends."""
    served = StatusPort()
    served.port.start()
    try:
        yield served
    finally:
        served.port.stop()
