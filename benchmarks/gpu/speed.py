"""One run of a model, alone or by parashard: prints a JSON object. A script as a user writes it.

`python -m benchmarks.gpu.speed resnet|mlp plain|one|cluster --device cpu|cuda:N ...` trains until it is warm, then for
some seconds; with `--epochs N` for so many epochs, and tells the accuracy on MNIST. Called by `benchmarks.gpu`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

import parashard as ps
from benchmarks.gpu import mlp
from benchmarks.gpu.steady import Steady
from parashard.process import cuda

EPOCHS_MAX = 10_000
MOMENTUM, RATES = 0.9, {"resnet": 0.01, "mlp": 1e-3}
ACCURACY_RATE = 0.05  # of the ResNet
STEPS = 100  # of an epoch of synthetic data
Data = tuple[np.ndarray, np.ndarray]


def plain_resnet(asked: argparse.Namespace, data: Data) -> dict[str, Any]:
    """Return the speed of PyTorch's own loop, or the accuracy after some epochs."""
    import torch

    from benchmarks.gpu import resnet

    loop = resnet.Plain(resnet.net(asked.width), data, asked.batch, asked.device)
    optimizer = torch.optim.SGD(loop.module.parameters(), lr=_rate(asked), momentum=MOMENTUM)
    if asked.epochs:
        for _ in range(asked.epochs):
            loop.epoch(optimizer)
        return {"accuracy": resnet.accuracy(loop.module, asked.data, asked.device)}
    last = loop.epoch(optimizer).item()  # waits for it
    began_s, epochs = time.perf_counter(), 0
    while (spent_s := time.perf_counter() - began_s) < asked.seconds or not epochs:
        last, epochs = loop.epoch(optimizer).item(), epochs + 1
    return {"examples_per_s": epochs * len(data[1]) / spent_s, "measured_s": spent_s, "loss": last}


def plain_mlp(asked: argparse.Namespace, data: Data) -> dict[str, Any]:
    """Return the speed of a loop of the same model with no server."""
    xp, kernels = _arrays(asked.device)
    loop = mlp.NoServer(mlp.model(asked.width), ps.Adam(_rate(asked)), xp, kernels)
    rng, (inputs, targets) = np.random.default_rng(0), data
    began_s, examples, last = math.inf, 0, math.nan
    for epoch in range(EPOCHS_MAX):
        if epoch == 1:
            began_s = time.perf_counter()
        for some in np.split(rng.permutation(len(targets)), range(asked.batch, len(targets), asked.batch)):
            last = loop.step(inputs[some], targets[some])
        examples += len(targets) if epoch else 0
        if epoch and (spent_s := time.perf_counter() - began_s) >= asked.seconds:
            break
    return {"examples_per_s": examples / spent_s, "measured_s": spent_s, "loss": last}


def ours(asked: argparse.Namespace, data: Data) -> dict[str, Any]:
    """Return the speed of `fit` once it is warm, or the accuracy after some epochs."""
    if asked.model == "resnet":
        from benchmarks.gpu import resnet

        model: Any = ps.torch.Model(resnet.net(asked.width), resnet.loss)
        optimizer: Any = ps.Momentum(_rate(asked), momentum=MOMENTUM)
    else:
        model, optimizer = mlp.model(asked.width), ps.Adam(_rate(asked))
    workers = 0 if asked.what == "one" else asked.workers
    trainer = ps.Trainer(model, optimizer, _strategy(asked), settings={"checkpoint.every_s": 0.0})
    if asked.epochs:
        trainer.fit(data, epochs=asked.epochs, batch_size=asked.batch, verbose=0)
        return {"accuracy": resnet.accuracy(trainer.model(), asked.data, asked.device)}
    steady = Steady(len(data[1]), workers, asked.seconds, asked.profile)
    history = trainer.fit(
        data, epochs=EPOCHS_MAX, batch_size=asked.batch, verbose=0, callbacks=[steady], wait_for_callbacks=False
    )
    report = history.report
    if set(report["steps_applied"]) != {report["steps_total"]}:
        raise RuntimeError(f"of {report['steps_total']} steps the shards have {report['steps_applied']}")
    return {**steady.figures(), "loss": history.history["loss"][-1]}


def _strategy(asked: argparse.Namespace) -> Any:
    if asked.what == "one":
        return ps.OneDeviceStrategy(asked.device)
    depth = {} if asked.depth is None else {"pipeline_depth": asked.depth}
    return ps.ParameterServerStrategy(
        1, asked.workers, asked.consistency, device=asked.device, shard_device=asked.shard_device, **depth
    )


def _rate(asked: argparse.Namespace) -> float:
    return ACCURACY_RATE if asked.epochs else RATES[asked.model]


def _arrays(device: str) -> tuple[Any, Any]:
    """Return the namespace of arrays on a device, and the update rules for them."""
    index = None if device == "cpu" else cuda.index_of(device, "")
    if index is None:
        from parashard_server.state.kernels import fused

        return np, fused
    cuda.device(index)
    from parashard_server.state.kernels import cuda as kernels

    return cuda.namespace(), kernels


def words_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["resnet", "mlp"])
    parser.add_argument("what", choices=["plain", "one", "cluster"], help="no server, OneDeviceStrategy, or shards")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of an epoch (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.5, help="shortest measurement (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--shard-device", default="cpu")
    parser.add_argument("--depth", type=int, help="cluster.pipeline_depth")
    parser.add_argument("--consistency", default="async")
    parser.add_argument("--data", type=Path, help="folder of MNIST")
    parser.add_argument(
        "--epochs", type=int, default=0, help="epochs of a ResNet whose accuracy is measured (default: no such run)"
    )
    parser.add_argument("--profile", default="", help="prefix of the file names of a profile (default: no profile)")
    return parser


def main() -> None:
    """Do what the command line says."""
    asked = words_parser().parse_args()
    examples = asked.steps * asked.batch
    if asked.model == "resnet":
        from benchmarks.gpu import resnet

        data, plain = resnet.data(examples, asked.data), plain_resnet
    else:
        data, plain = mlp.data(examples), plain_mlp
    found = (plain if asked.what == "plain" else ours)(asked, data)
    if not math.isfinite(found.get("loss", 0.0)):
        raise RuntimeError(f"the loss became {found['loss']}")
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
