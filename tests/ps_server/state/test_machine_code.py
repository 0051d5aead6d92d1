"""Machine code is kept for later starts, run only if it is whole and this user's, and refuses what does not fit it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parashard_server.state.kernels import compiling, fused, loops, machine_code
from parashard_server.state.kernels.machine_code import REFUSED, function
from support.kernel_cases import drawn, update

LOOPS = tuple(name for name in compiling._ARGUMENTS if hasattr(loops, name))


@pytest.fixture(scope="module")
def code() -> bytes:
    """Return the object file of the loop that tests keep and damage."""
    return compiling.object_file("copy")


@pytest.fixture
def compiled(code: bytes, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the loops that are compiled from now on; each has the code of `copy`."""
    names: list[str] = []
    monkeypatch.setattr(compiling, "object_file", lambda name: names.append(name) or code)
    return names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of kept code, empty."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    return tmp_path / "parashard"


def copies() -> None:
    """Assert that `copy` is there and copies."""
    source, destination = drawn(1, 100), np.zeros(100, np.float32)
    assert function("copy", 2)(destination, source, b"") == 0
    assert destination.tobytes() == source.tobytes()


def test_a_start_loads_what_an_earlier_one_compiled(folder: Path, compiled: list[str]) -> None:
    copies()
    copies()
    assert compiled == ["copy"]
    (kept,) = folder.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut in its head": lambda content: content[:40],
    "cut": lambda content: content[:-1],
    "longer": lambda content: content + b"\0",
    "another format": lambda content: flipped(content, 0),
    "another key": lambda content: flipped(content, len(machine_code.MAGIC)),
    "another digest": lambda content: flipped(content, len(machine_code.MAGIC) + 70),
    "another first bit": lambda content: flipped(content, len(machine_code.MAGIC) + 130),
    "another last bit": lambda content: flipped(content, len(content) - 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_code_is_compiled_again_and_replaced(damage: str, folder: Path, compiled: list[str]) -> None:
    copies()
    (kept,) = folder.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(DAMAGES[damage](whole))
    copies()
    assert compiled == ["copy"] * 2
    assert kept.read_bytes() == whole
    copies()
    assert compiled == ["copy"] * 2


def test_code_under_the_name_of_another_loop_is_not_run(folder: Path, compiled: list[str]) -> None:
    copies()
    (kept,) = folder.iterdir()
    function("accumulate", 2)
    (other,) = set(folder.iterdir()) - {kept}
    os.replace(other, kept)
    copies()
    assert compiled == ["copy", "accumulate", "copy"]


def test_code_that_another_user_owns_is_not_run(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    copies()
    assert compiled == ["copy"] * 2


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_code_that_another_user_may_write_is_not_run(mode: int, folder: Path, compiled: list[str]) -> None:
    copies()
    (kept,) = folder.iterdir()
    kept.chmod(mode)
    copies()
    assert compiled == ["copy"] * 2
    assert kept.stat().st_mode & 0o777 == 0o600


def test_a_link_to_code_is_not_followed(folder: Path, compiled: list[str], tmp_path: Path) -> None:
    copies()
    (kept,) = folder.iterdir()
    kept.rename(tmp_path / "elsewhere")
    kept.symlink_to(tmp_path / "elsewhere")
    copies()
    assert compiled == ["copy"] * 2
    assert not kept.is_symlink()


def test_a_folder_in_the_place_of_code_hinders_no_start(folder: Path, compiled: list[str]) -> None:
    copies()
    (kept,) = folder.iterdir()
    kept.unlink()
    kept.mkdir()
    copies()
    assert compiled == ["copy"] * 2
    assert list(folder.iterdir()) == [kept]  # nothing unfinished is left


def test_without_a_folder_that_can_be_written_every_start_compiles(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    copies()
    copies()
    assert compiled == ["copy"] * 2


def test_code_is_kept_in_the_first_folder_that_can_be_written(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(machine_code, "folders", lambda: [tmp_path / "file" / "a", tmp_path / "b", tmp_path / "c"])
    copies()
    copies()
    assert compiled == ["copy"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["b"]


def test_without_a_choice_code_lies_beside_the_sources_or_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    sources = Path(machine_code.__file__).parent
    assert machine_code.folders() == [sources / "__pycache__", Path("/cache/parashard")]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/user")
    assert machine_code.folders()[1] == Path("/home/user/.cache/parashard")


def test_where_the_cpu_is_not_known_nothing_is_kept(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown() -> str:
        raise OSError("no such file")

    monkeypatch.setattr(machine_code, "_cpu", unknown)
    copies()
    copies()
    assert compiled == ["copy"] * 2
    assert not folder.exists()


CHANGES: dict[str, Callable[[pytest.MonkeyPatch, Path], Any]] = {
    "the CPU": lambda patch, _: patch.setattr(machine_code, "_cpu", lambda: "another"),
    "a compiler": lambda patch, path: patch.setattr(machine_code, "_version_file", lambda _: path),
    "the sources": lambda patch, _: patch.setattr(machine_code, "_SOURCES", ("loops.py",)),
    "a setting of Numba's": lambda patch, _: patch.setenv("NUMBA_CPU_NAME", "generic"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_code_is_compiled_again_when_what_it_depends_on_changes(
    change: str, folder: Path, compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies()
    (tmp_path / "version").write_text("another")
    CHANGES[change](monkeypatch, tmp_path / "version")
    copies()
    copies()
    assert compiled == ["copy"] * 2
    assert len(list(folder.iterdir())) == 2


def test_the_text_of_the_rules_is_among_what_code_depends_on() -> None:
    assert {"loops.py", "rules.py"} <= set(machine_code._SOURCES)


def test_code_moves_with_its_folder(
    folder: Path, compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies()
    (tmp_path / "mounted").mkdir()
    folder.rename(tmp_path / "mounted" / "parashard")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "mounted"))
    copies()
    assert compiled == ["copy"]


def arrays_of(**changed: np.ndarray) -> list[np.ndarray]:
    """Return the vectors of `adagrad`, some of them changed."""
    arrays = {name: np.ones(10, np.float32) for name in ("weights", "gradient", "accumulator")}
    return list((arrays | changed).values())


@pytest.mark.parametrize("name", ["weights", "gradient", "accumulator"])
@pytest.mark.parametrize(
    "array",
    [
        np.ones(9, np.float32),
        np.ones(11, np.float32),
        np.ones(20, np.float32)[::2],
        np.ones(10, np.float64),
        np.ones((10, 1), np.float32),
        np.array(1.0, np.float32),
    ],
    ids=["shorter", "longer", "with gaps", "float64", "two dimensions", "no dimension"],
)
def test_arrays_that_do_not_fit_are_refused_untouched(name: str, array: np.ndarray) -> None:
    arrays = arrays_of(**{name: array})
    before = [a.tobytes() for a in arrays]
    with pytest.raises(ValueError, match="contiguous and of one length"):
        update(fused, "adagrad", *arrays, learning_rate=0.1, epsilon=1e-8, weight_decay=0.0, clip=np.inf, scale=1.0)
    assert [a.tobytes() for a in arrays] == before


def test_lamb_refuses_them_too() -> None:
    vectors = [np.ones(10, np.float32) for _ in range(3)]
    settings: dict[str, Any] = dict.fromkeys(("learning_rate", "epsilon", "weight_decay", "clip", "scale"), 1.0)
    with pytest.raises(ValueError, match=r"lamb: .* \(9,\)"):
        update(fused, "lamb", *vectors, np.ones(9, np.float32), beta1=0.9, beta2=0.9, t=1, **settings)
    assert all((vector == 1.0).all() for vector in vectors)


def test_one_element_has_any_stride() -> None:
    weights, gradient = np.ones(8, np.float32)[::8], np.ones(8, np.float32)[::8]
    fused.accumulate(weights, gradient)
    assert weights.tolist() == [2.0]


def test_a_gradient_may_begin_at_any_byte() -> None:
    gradient = np.frombuffer(b"\0" + drawn(2, 100).tobytes(), np.float32, offset=1)
    total, expected = drawn(1, 100), drawn(1, 100)
    fused.accumulate(total, gradient)
    assert total.tobytes() == (expected + gradient).tobytes()


def test_scalars_are_rounded_as_numpy_does() -> None:
    values = (0.1, 1 / 3, -2.5e-42, 3.4028235e38, 1e39, -np.inf, np.nan, 0.0, -0.0)
    with np.errstate(over="ignore"):
        assert fused._packed(values) == np.array(values, np.float32).tobytes()
    assert fused._packed(values[:4]) == np.array(values[:4], np.float32).tobytes()


@pytest.mark.full("make test compares with the reference, to which Numba's own functions are equal")
@pytest.mark.parametrize("name", LOOPS)
def test_machine_code_has_the_bits_of_numbas_function(name: str) -> None:
    dtypes, count = compiling.arguments_of(name)
    scalars = np.linspace(0.25, 0.75, count).astype(np.float32)
    results = []
    for call in (function(name, len(dtypes)), None):
        arrays = [
            np.abs(drawn(seed, 100 if dtype == np.float32 else 2)).astype(dtype) for seed, dtype in enumerate(dtypes)
        ]
        answer = getattr(loops, name)(*arrays, *scalars) if call is None else call(*arrays, scalars.tobytes())
        results.append([*(array.tobytes() for array in arrays), int(answer or 0)])
    assert results[0] == results[1]
    assert results[0][-1] != REFUSED
