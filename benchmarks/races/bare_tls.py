"""The cost of TLS alone: bytes sent to another process and back by Python's `ssl`, on loopback.

    python -m benchmarks.races.bare_tls TLS_DIR BYTES REPEATS

runs the other process: it prints its port, and sends back as many bytes as it gets. `there_and_back_ms` starts it.
"""

from __future__ import annotations

import socket
import ssl
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from parashard.transports.socket_io import tune

DEADLINE_S = 60.0


def there_and_back_ms(tls_dir: Path, size_bytes: int, repeats: int) -> float:
    """Send this many bytes to another process and back; return the median time in milliseconds."""
    words = [sys.executable, "-m", __spec__.name, str(tls_dir), str(size_bytes), str(repeats + 1)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            plain = socket.create_connection(("127.0.0.1", int(other.stdout.readline())), DEADLINE_S)
            context = ssl.create_default_context(cafile=tls_dir / "ca.pem")
            context.check_hostname = False
            context.load_cert_chain(tls_dir / "cert.pem", tls_dir / "key.pem")
            content = memoryview(bytearray(size_bytes))
            times = []
            with _tuned(plain, context, False) as connection:
                for _ in range(repeats + 1):
                    begin_s = time.perf_counter()
                    connection.write(content)
                    _fill(connection, content)
                    times.append(1000 * (time.perf_counter() - begin_s))
        finally:
            other.kill()
    return statistics.median(times[1:])  # the first one warms up


def main() -> None:
    """Run the other process."""
    tls_dir, size_bytes, repeats = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls_dir / "ca.pem")
    context.load_cert_chain(tls_dir / "cert.pem", tls_dir / "key.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    content = memoryview(bytearray(size_bytes))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(DEADLINE_S)
        print(listening.getsockname()[1], flush=True)
        with _tuned(listening.accept()[0], context, True) as connection:
            for _ in range(repeats):
                _fill(connection, content)
                connection.write(content)


def _tuned(plain: socket.socket, context: ssl.SSLContext, server: bool) -> ssl.SSLSocket:
    tune(plain)
    plain.settimeout(DEADLINE_S)
    return context.wrap_socket(plain, server_side=server)


def _fill(connection: ssl.SSLSocket, content: memoryview) -> None:
    position = 0
    while position < len(content):
        received: Any = connection.read(len(content) - position, content[position:])
        assert received > 0, "the other process has ended"
        position += received


if __name__ == "__main__":
    main()
