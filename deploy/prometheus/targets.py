"""Tells Prometheus where the processes of a `parashard run` listen, in a file for `file_sd_configs`.

    python -m deploy.prometheus.targets RUN_DIR --write runs/targets.json [--tls-dir DIR]

Asks the run's coordinator once a second and replaces the file when an address has changed, until the run ends. Owns the
file and no more: what Prometheus does with it is in `local.yml`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from parashard._proto import coordinator_pb2 as pb
from parashard.errors import ConfigurationError, ParashardError, RetryLater
from parashard.process.starts import TLS_VARIABLE
from parashard.protocol.coordinator_client import CoordinatorClient, find_coordinator
from parashard.security.credentials import Credentials
from parashard.security.given_credentials import credentials_in

ASK_EVERY_S = 1.0
LOOK_EVERY_S = 0.2
START_DEADLINE_S = 60.0
GONE_AFTER_S = 30.0  # a coordinator that is started again is back within seconds
OVER = (pb.JOB_STATE_DONE, pb.JOB_STATE_FAILED)


def main() -> int:
    """Write targets until the run is over; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="directory of the run")
    parser.add_argument("--write", type=Path, required=True, help="the file for file_sd_configs")
    parser.add_argument(
        "--tls-dir",
        type=Path,
        default=os.environ.get(TLS_VARIABLE) or None,
        help=f"folder with an operator's certificate, if the run has --tls-dir (default: {TLS_VARIABLE})",
    )
    arguments = parser.parse_args()
    try:
        follow(arguments.run_dir, arguments.write, credentials_in(arguments.tls_dir))
    except ParashardError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def follow(run_dir: Path, path: Path, credentials: Credentials | None = None) -> None:
    """Keep the file up to date until the job is over or its coordinator has been gone for GONE_AFTER_S."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--write {path}: its folder cannot be made: {error.strerror}") from None
    address = find_started(run_dir, START_DEADLINE_S)
    client = CoordinatorClient(address, where=str(run_dir), credentials=credentials)
    answered_s, written, state = time.monotonic(), "", pb.JOB_STATE_UNSPECIFIED
    try:
        while state not in OVER and time.monotonic() - answered_s < GONE_AFTER_S:
            try:
                status = client.get_status()
            except RetryLater:
                pass  # between two incarnations; the file stays as it is
            else:
                answered_s, state = time.monotonic(), status.state
                if (content := targets(status)) != written:
                    replace(path, content)
                    written = content
            time.sleep(ASK_EVERY_S)
    finally:
        client.close()


def find_started(run_dir: Path, wait_s: float, sleep: Callable[[float], None] = time.sleep) -> str:
    """Return the coordinator's address; a run that was started a moment ago may be without its directory yet."""
    deadline_s = time.monotonic() + wait_s
    while True:
        there = run_dir.exists()  # before it is looked into: it may appear meanwhile
        try:
            return find_coordinator(str(run_dir), wait_s=max(0.0, deadline_s - time.monotonic()))
        except ConfigurationError:
            if there or time.monotonic() >= deadline_s:
                raise
        sleep(LOOK_EVERY_S)


def targets(status: pb.GetStatusReply) -> str:
    """Return the addresses of the processes that are there, as `file_sd_configs` reads them."""
    addresses = [status.http_address]
    addresses += [shard.http_address for shard in status.shards if shard.registered]
    addresses += [worker.http_address for worker in status.workers if worker.live]
    group = {"targets": [address for address in addresses if address], "labels": {"run": status.run_id}}
    return json.dumps([group], indent=2) + "\n"


def replace(path: Path, content: str) -> None:
    """Put a whole file in the place of the earlier one: Prometheus never reads half of it."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(content)
    os.replace(new, path)


if __name__ == "__main__":
    sys.exit(main())
