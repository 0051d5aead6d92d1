"""PyTorch RPC over TensorPipe: a push and a pull are one `rpc_sync` each, of a function that the server runs.

With `--tcp` it goes through TCP; by itself TensorPipe takes shared memory where worker and server share a host.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch.distributed import rpc

from benchmarks.peers import seam

SERVER, WORKER = "server", "worker"
TCP = {"_transports": ["uv"], "_channels": ["mpt_uv", "basic"]}  # TensorPipe's names
WEIGHTS: dict[str, torch.Tensor] = {}
"""The state of the server."""


class TorchPushPull(seam.PushPull):
    """The worker."""

    def open(self, gradient: seam.Floats) -> None:
        """Put zeros on the server."""
        self._gradient = torch.from_numpy(gradient)
        rpc.rpc_sync(SERVER, begin, args=(gradient.size,))

    def push(self) -> None:
        """Send the gradient, and wait for the answer."""
        rpc.rpc_sync(SERVER, apply, args=(self._gradient,))

    def pull(self) -> seam.Floats:
        """Ask for the weights."""
        return rpc.rpc_sync(SERVER, weights).numpy()


def begin(elements: int) -> None:
    """On the server: reset the weights to zeros, of this size."""
    WEIGHTS["w"] = torch.zeros(elements)


def apply(gradient: torch.Tensor) -> None:
    """On the server: apply a gradient."""
    WEIGHTS["w"].add_(gradient, alpha=-seam.LEARNING_RATE)


def weights() -> torch.Tensor:
    """On the server: return the weights."""
    return WEIGHTS["w"]


def join(name: str, rank: int, port: str, ways: dict[str, list[str]]) -> None:
    """Enter the group of two."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", **ways)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def main() -> None:
    """Start the server and answer rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tcp", action="store_true", help="use TCP even on one host")
    parser.add_argument("--serve", metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    ways = TCP if arguments.tcp else {}
    if arguments.serve:
        print("starting", flush=True)  # `join` returns once the worker is there too
        join(SERVER, 0, arguments.serve, ways)
        rpc.shutdown()  # waits for the worker
        return
    port = str(seam.free_port())
    process, _ = seam.start_server("benchmarks.peers.torch_push_pull", "--serve", port, *sys.argv[1:])
    join(WORKER, 1, port, ways)
    seam.serve(seam.push_pull_answers(TorchPushPull()), ["torch", "numpy"])
    process.kill()


if __name__ == "__main__":
    main()
