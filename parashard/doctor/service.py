"""Probes a running coordinator, shard or HTTP port from this machine: name, connections, TLS, version, clock."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import statistics
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from parashard._proto import coordinator_pb2 as pb
from parashard._proto import shard_pb2, shard_pb2_grpc
from parashard.doctor.facts import Certificate, Clock, Link, Service
from parashard.doctor.links import CALL_S, CONNECT_S, measure
from parashard.errors import NotAllowed, ParashardError, RetryLater, Unreachable, WrongRun
from parashard.process.addresses import join_address, split_address
from parashard.protocol.coordinator_client import CoordinatorClient
from parashard.protocol.messages import Target
from parashard.protocol.rpc import UNKNOWN_CALL, connect, our_errors
from parashard.security.credentials import Credentials
from parashard.transports.base import Greeting
from parashard.transports.stream import Stream, greet
from parashard.transports.tcp import addresses_of, dial

LOOKS = 5
AT_ONCE_MAX = 32
NO_RUN = "parashard-doctor"
METRICS_BYTES_MAX = 1 << 22
_BUILD = re.compile(rb'parashard_build_info\{role="([a-z]*)",version="([^"]*)"\}')
_HTTP_DATE_S = 1.0
"""Resolution of the clock in HTTP's Date header."""


class _Answered(NamedTuple):
    """A process's role, version and clock, from its HTTP port."""

    role: str
    version: str
    clock: Clock | None


def look_at_service(address: str, credentials: Credentials | None = None) -> Service:
    """Probe a service from this machine."""
    host, port = split_address(address)
    try:
        found = addresses_of(host, port, time.monotonic() + CONNECT_S)
    except OSError as error:
        return Service(address=address, looked_up=(), lookup_problem=error.strerror or str(error))
    places = tuple(dict.fromkeys(str(one[4][0]) for one in found))
    links = tuple(measure(join_address(place, port), None) for place in places)
    service = Service(address=address, looked_up=places, links=links, with_credentials=credentials is not None)
    if not any(link.kind == "open" for link in links):
        return service
    service = service.replaced(tls=speaks_tls(host, port))
    if service.tls is False:
        http_says = of_http(address)
        if http_says is not None:
            return service.replaced(role=http_says.role, version=http_says.version, clock=http_says.clock)
    if service.tls and credentials is not None:
        service = service.replaced(certificate=_certificate(host, port, credentials))
    untrusted = service.certificate is not None and service.certificate.problem
    if untrusted or (service.tls is not None and service.tls != service.with_credentials):
        return service  # a call would only repeat the same fault
    return _of_grpc(service, credentials)


def speaks_tls(host: str, port: int) -> bool | None:
    """Tell whether a server answers a TLS handshake; None: it does not answer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with dial(host, port, time.monotonic() + CONNECT_S) as plain:
            plain.settimeout(CALL_S)
            context.wrap_socket(plain, server_hostname=host).close()
    except ssl.SSLCertVerificationError:
        return True
    except ssl.SSLError as error:
        return False if error.reason in ("WRONG_VERSION_NUMBER", "UNEXPECTED_EOF_WHILE_READING") else None
    except TimeoutError:
        return None
    except (OSError, ValueError):  # closed without an answer: another protocol
        return False
    return True


def _certificate(host: str, port: int, credentials: Credentials) -> Certificate:
    """Make a TLS handshake as a client of the job would."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=credentials.current().ca.decode())
    try:
        with dial(host, port, time.monotonic() + CONNECT_S) as plain:
            plain.settimeout(CALL_S)
            with context.wrap_socket(plain, server_hostname=host) as inside:
                ends = ssl.cert_time_to_seconds(str((inside.getpeercert() or {})["notAfter"]))
    except ssl.SSLCertVerificationError as error:
        return Certificate(days_left=0.0, problem=error.verify_message)
    except OSError as error:
        return Certificate(days_left=0.0, problem=str(error))
    return Certificate(days_left=(ends - time.time()) / 86400)


def of_http(address: str) -> _Answered | None:
    """Query the HTTP port of a parashard process; None: the address is no such port."""
    since_s = time.time()
    try:
        connection = http.client.HTTPConnection(*split_address(address), timeout=CALL_S)
        connection.connect()
    except OSError:
        return None
    # The timeout is of each piece: a server that sends a byte now and then would keep us.
    end = threading.Timer(CALL_S, _cut_off, [connection.sock])
    end.start()
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        date, text = answer.headers.get("Date", ""), answer.read(METRICS_BYTES_MAX)
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        end.cancel()
        connection.close()
    build = _BUILD.search(text)
    if build is None:
        return None
    try:
        there = parsedate_to_datetime(date).astimezone(UTC)
    except ValueError:
        return _Answered(build[1].decode(), build[2].decode(), None)
    took_s = time.time() - since_s
    ahead_s = (there - datetime.fromtimestamp(since_s, UTC)).total_seconds() + _HTTP_DATE_S / 2 - took_s / 2
    return _Answered(build[1].decode(), build[2].decode(), Clock(ahead_s=ahead_s, sure_s=_HTTP_DATE_S / 2 + took_s / 2))


def _cut_off(connection: socket.socket) -> None:
    with suppress(OSError):  # the peer may have closed it
        connection.shutdown(socket.SHUT_RDWR)


def _of_grpc(service: Service, credentials: Credentials | None) -> Service:
    coordinator = CoordinatorClient(service.address, credentials=credentials)
    try:
        times_s = []
        for _ in range(LOOKS):
            since_s = time.monotonic()
            status = coordinator.get_status()
            times_s.append(time.monotonic() - since_s)
        told = _told(status) | _second_ports(coordinator, status.run_id)
    except WrongRun:  # possibly a shard
        return _of_shard(service, credentials)
    except NotAllowed:
        return service.replaced(role="coordinator", note="its certificate allows no more: take an operator's for all")
    except ParashardError as error:
        if _is_stream(service.address, credentials):
            return service.replaced(role="shard", note="this is its second port, of TCP; its first says more")
        return service.replaced(problem=error.message)
    finally:
        coordinator.close()
    service = service.replaced(role="coordinator", round_trip_s=statistics.median(times_s), others=_links(told))
    about = of_http(status.http_address) if status.http_address else None
    if about is None:
        return service
    return service.replaced(version=about.version, clock=about.clock)


def _told(status: pb.GetStatusReply) -> dict[str, str]:
    """Return the addresses in a coordinator's status, by name."""
    told = {f"shard-{shard.shard}": shard.address for shard in status.shards if shard.registered}
    return told | {"the status page": status.http_address}


def _second_ports(coordinator: CoordinatorClient, run_id: str) -> dict[str, str]:
    """Return the addresses of the shards' stream servers; none if the certificate does not permit the call."""
    try:
        view = coordinator.get_view(run_id)
    except (NotAllowed, RetryLater):
        return {}
    return {f"shard-{index} by TCP": shard.data_address for index, shard in enumerate(view.shards)}


def _links(told: Mapping[str, str]) -> dict[str, Link]:
    with ThreadPoolExecutor(AT_ONCE_MAX) as pool:
        there = {name: address for name, address in told.items() if address}
        return dict(zip(there, pool.map(lambda address: measure(address, None), there.values()), strict=True))


def _of_shard(service: Service, credentials: Credentials | None) -> Service:
    """Call as a member of another run: a shard refuses that with a known error."""
    channel = connect(service.address, credentials)
    stub = shard_pb2_grpc.ShardStub(channel)  # type: ignore[no-untyped-call]
    times_s = []
    try:
        for _ in range(LOOKS):
            since_s = time.monotonic()
            try:
                with our_errors(service.address):
                    stub.Inspect(shard_pb2.InspectRequest(run_id=NO_RUN), timeout=CALL_S)
            except (WrongRun, NotAllowed) as error:
                if error.message.startswith(UNKNOWN_CALL):
                    return service.replaced(problem="another service answers by gRPC")
            times_s.append(time.monotonic() - since_s)
    except ParashardError as error:
        return service.replaced(problem=error.message)
    finally:
        channel.close()
    return service.replaced(role="shard", round_trip_s=statistics.median(times_s))


def _is_stream(address: str, credentials: Credentials | None) -> bool:
    """Tell whether a shard's stream server answers: it refuses a greeting of another run with a known error."""
    host, port = split_address(address)
    until_s = time.monotonic() + CALL_S
    try:
        connection = dial(host, port, until_s)
    except OSError:
        return False
    with connection:
        try:
            tls = None if credentials is None else credentials.client_context()
            stream = Stream(connection, address, tls=tls, server_name=host)
            greet(stream, Greeting(Target(NO_RUN, "", 0, 0, 0), "doctor"), deadline_s=until_s)
        except (Unreachable, OSError):
            return False
        except ParashardError:
            return True
    return False
