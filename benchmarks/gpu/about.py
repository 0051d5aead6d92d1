"""Which GPU and which libraries figures are of: `python -m benchmarks.gpu.about --device cuda:N|cpu` prints a line."""

from __future__ import annotations

import argparse
import json
from importlib.metadata import PackageNotFoundError, version

from parashard.errors import ConfigurationError
from parashard.process import cuda

LIBRARIES = ("torch", "jax", "numpy")


def described(device: str) -> str:
    """Return a device's name, its driver, and the versions of the libraries that compute on it."""
    found = [device]
    if device != "cpu":
        index = cuda.index_of(device, "")
        if index is None:
            raise ConfigurationError(f"device {device!r} is unknown; allowed: cpu, cuda, cuda:N")
        cuda.device(index)
        cupy = cuda.namespace()
        runtime = cupy.cuda.runtime
        found = [cuda.device_name(index), f"driver for CUDA {runtime.driverGetVersion()}", f"cupy {cupy.__version__}"]
    for name in LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    print(json.dumps({"about": described(parser.parse_args().device)}))


if __name__ == "__main__":
    main()
