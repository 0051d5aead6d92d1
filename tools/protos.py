"""Generate the code of protos/*.proto beside them, or with --check tell whether it is up to date."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def generate(out: Path) -> None:
    """Compile every contract from the root, so that `protos/x.proto` becomes the module `protos.x_pb2`."""
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").glob("*.proto"))
    well_known = str(Path(grpc_tools.__file__).parent / "_proto")
    arguments = ["protoc", f"-I{ROOT}", f"-I{well_known}"]
    arguments += [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    if protoc.main([*arguments, *(str(ROOT / source) for source in sources)]) != 0:
        sys.exit("protos: the compiler refused")


def differences(fresh: Path) -> list[str]:
    """Return the names of generated files that differ from the committed ones."""
    names = {
        path.name for pattern in GENERATED for folder in (fresh, ROOT) for path in (folder / "protos").glob(pattern)
    }
    return sorted(name for name in names if _text(fresh / "protos" / name) != _text(ROOT / "protos" / name))


def _text(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            generate(Path(folder))
            stale = differences(Path(folder))
        if stale:
            sys.exit(f"protos: not up to date, run `make protos`: {', '.join(stale)}")
    else:
        generate(ROOT)
