"""Generate parashard/_proto/ from protos/*.proto, or with --check tell whether it is up to date."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "parashard" / "_proto"
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def generated() -> dict[str, str]:
    """Compile every contract; return the text of each generated file by its name.

    The compiler runs in the root and names the module of `protos/x.proto` `protos.x_pb2`: imports between the modules
    are rewritten to their package.
    """
    sources = sorted(str(path) for path in (ROOT / "protos").glob("*.proto"))
    well_known = str(Path(grpc_tools.__file__).parent / "_proto")
    with tempfile.TemporaryDirectory() as out:
        arguments = ["protoc", f"-I{ROOT}", f"-I{well_known}"]
        arguments += [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
        if protoc.main([*arguments, *sources]) != 0:
            sys.exit("protos: the compiler refused")
        return {
            path.name: path.read_text().replace("from protos import ", "from parashard._proto import ")
            for pattern in GENERATED
            for path in sorted((Path(out) / "protos").glob(pattern))
        }


def stale(fresh: dict[str, str]) -> list[str]:
    """Return the names of generated files that differ from the committed ones, are missing, or are superfluous."""
    present = {path.name: path.read_text() for pattern in GENERATED for path in OUT.glob(pattern)}
    return sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))


if __name__ == "__main__":
    fresh = generated()
    if "--check" in sys.argv[1:]:
        if names := stale(fresh):
            sys.exit(f"protos: not up to date, run `make protos`: {', '.join(names)}")
    else:
        for name in stale(fresh):
            (OUT / name).unlink(missing_ok=True)
            if name in fresh:
                (OUT / name).write_text(fresh[name])
