"""The shape of the tree, beyond what `make check` sees: seams, what the contracts must say, what the map shows."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "parashard",
    "coordinator/parashard_coordinator",
    "ps_server/parashard_server",
    "worker/parashard_worker",
)
OURS = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
CONTRACTS = sorted((ROOT / "protos").glob("*.proto"))
MAP = ROOT / "ARCHITECTURE.md"
MAY_IMPORT_TESTS = re.compile(r"^\s*(from|import)\s+test_|import_module\(|__import__\(", re.MULTILINE)
PICKLES = (
    "pickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "multiprocessing.connection",  # its Client and Listener pickle what they carry
    "shelve",
)


def _name_of(called: ast.expr) -> str:
    return str(getattr(called, "attr", getattr(called, "id", "")))


def _imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Call) and _name_of(node.func).endswith(("import_module", "__import__")):
            yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    """Return the dotted name of every module that a file imports, at its top or anywhere inside."""
    return frozenset(_imports_of(path))


def module_of(path: str) -> str:
    """Return the dotted name of a file of ours: what follows the folder that is installed from."""
    return path[path.index("parashard") :].removesuffix(".py").replace("/", ".")


def importers_of(*modules: str) -> set[str]:
    """Return the files that import one of these modules or something below it."""
    last = [module.rpartition(".")[2] for module in modules]
    may = [path for path in OURS if any(name in path.read_text() for name in last)]  # the others need no parser
    return {
        str(path.relative_to(ROOT))
        for path in may
        if any(name == module or name.startswith(f"{module}.") for name in imports_of(path) for module in modules)
    }


def _import_contracts() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    return found


# --- imports ---


def test_only_a_process_that_traces_loads_opentelemetry():
    loaded = {"parashard/telemetry/tracer.py", "parashard/telemetry/exporters.py"}
    assert importers_of("opentelemetry") == {"parashard/telemetry/trace_context.py", *loaded}
    for module in ("opentelemetry", *map(module_of, sorted(loaded))):
        for importer in importers_of(module) - loaded:  # on demand, or for the types alone
            lines = [line for line in (ROOT / importer).read_text().splitlines() if f"from {module}" in line]
            assert lines, importer
            assert all(line.startswith("    ") for line in lines), importer


def test_every_part_of_the_library_is_in_a_layer():
    layers = next(c for c in _import_contracts() if c["name"].startswith("Layers"))["layers"]
    named = {name for layer in layers for name in re.split(r" [|:] ", layer)}
    parts = {path.stem for path in (ROOT / "parashard").iterdir() if path.suffix == ".py" or any(path.rglob("*.py"))}
    assert {f"parashard.{part}" for part in parts - {"__init__", "__main__"}} == {
        name for name in named if name.startswith("parashard.")
    }


def test_contracts_ignore_the_public_names_imports_for_types_alone_and_one_more():
    ignored = {line for contract in _import_contracts() for line in contract.get("ignore_imports", ())}
    ours = {line for line in ignored if "-> parashard" in line} - {"parashard -> parashard.**"}
    assert len(ours) <= 8
    ours.remove("parashard.launch.fork_server -> parashard.api.script")  # a forked script begins as a fresh one does
    files = {module_of(str(path.relative_to(ROOT))): path for path in OURS}
    for importer, imported in (line.split(" -> ") for line in ours):
        text = files[importer].read_text()
        assert f"    from {imported} import" in text[text.index("if TYPE_CHECKING:") :], importer
        assert f"\nfrom {imported} import" not in text, importer


def test_no_array_is_unpickled():  # what the lint cannot see
    for path in OURS:
        assert "allow_pickle=True" not in path.read_text(), path


def test_the_lint_refuses_what_pickles():
    ways = [f"import {name}\n" for name in PICKLES]
    ways += ["from _pickle import loads\n", "from multiprocessing import connection\n"]
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select=TID251", "--output-format=concise"]
    found = subprocess.run(
        [*command, "--stdin-filename=parashard/some.py", "-"],
        input="".join(ways),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    refused = [int(line.split(":")[1]) for line in found.splitlines() if "is banned: Never pickle" in line]
    assert refused == list(range(1, len(ways) + 1)), found


def test_grpc_is_spoken_only_at_the_seams():
    written = {path for path in importers_of("grpc", "grpc_health") if "/_proto/" not in path}
    assert written <= {
        "parashard/protocol/rpc.py",
        "parashard/security/grpc_admission.py",
        "parashard/security/grpc_tls.py",
        "coordinator/parashard_coordinator/endpoints/service.py",
        "parashard/serving/service.py",
        "ps_server/parashard_server/serving/grpc_service.py",
    }


def test_the_services_say_what_they_are():
    for path in OURS:
        if path.parent.name != "_proto":
            assert path.read_text().startswith(('"""', 'r"""')), f"{path} has no docstring"


# --- the contracts ---


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda path: path.name)
def test_every_message_field_value_and_call_has_its_sentence(contract):
    lines = contract.read_text().splitlines()
    assert lines[0].startswith("// "), "the file itself"
    silent = []
    for number, line in enumerate(lines):
        code, _, comment = line.partition("//")
        above = lines[number - 1].strip().startswith("// ") if number else False
        declares = re.match(r"(message|enum|rpc|service) (\w+)", code.strip())
        if declares and declares[1] != "service" and not above:
            silent.append(declares[2])
        if re.search(r"= \d+( \[.*\])?;", code) and not re.fullmatch(r" \S.*\.", comment):
            silent.append(code.strip())
    assert silent == []


# --- the map ---


def test_every_path_on_the_map_exists():
    text = MAP.read_text()
    named = set(re.findall(r"`((?:[\w.-]+/)+[\w.*-]*)`", text)) | set(re.findall(r"\]\((?!https?:|#)([^)#]+)", text))
    assert named, "the map names no path"
    missing = sorted(path for path in named if not any(ROOT.glob(path.rstrip("/"))))
    assert missing == []


def test_the_map_shows_every_package():
    text = MAP.read_text()
    assert [package for package in PACKAGES if package not in text] == []


# --- the tests ---


def test_the_map_of_what_tests_share_shows_every_file():
    folder = ROOT / "tests" / "support"
    text = (folder / "README.md").read_text()
    assert [path.name for path in sorted(folder.glob("*.py")) if f"`{path.name}`" not in text] == []


def test_no_test_imports_from_a_test_file():
    tests = sorted((ROOT / "tests").rglob("*.py"))
    names = {path.stem for path in tests if path.stem.startswith("test_")}
    may = [path for path in tests if MAY_IMPORT_TESTS.search(path.read_text())]  # the others need no parser
    assert {
        str(path): found for path in may if (found := {m.partition(".")[0] for m in imports_of(path)} & names)
    } == {}


def test_names_of_test_files_are_unique():
    # pytest imports them by their bare names, since their folders are no packages.
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
    assert not list((ROOT / "tests").rglob("__init__.py"))
