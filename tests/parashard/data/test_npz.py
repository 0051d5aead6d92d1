"""The .npz source: round trips, and every kind of damage is BadData that names the file."""

import io
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parashard.data.array_files import NpzOptions, open_npz
from parashard.errors import BadData

INPUTS = np.arange(40, dtype=np.float64).reshape(10, 2, 2)
TARGETS = np.arange(10) % 4


def write(path, compressed=False, **arrays):
    (np.savez_compressed if compressed else np.savez)(path, **arrays)
    return NpzOptions(path=path)


@pytest.mark.parametrize("compressed", [False, True])
def test_round_trip_with_an_own_split(tmp_path, compressed):
    own = {"held_out_inputs": INPUTS[:3] + 0.5, "held_out_targets": TARGETS[:3] + 3}
    source = open_npz(write(tmp_path / "a.npz", compressed, inputs=INPUTS, targets=TARGETS, **own))
    spec = source.spec
    assert (spec.examples, spec.held_out, spec.input_shape, spec.classes) == (10, 3, (2, 2), 6)
    inputs, targets = source.examples(np.array([9, 1]))
    assert inputs.dtype == np.float32
    assert np.array_equal(inputs, INPUTS[[9, 1]])
    assert targets.tolist() == [1, 1]
    assert targets.dtype == np.int64
    assert np.array_equal(source.held_out(0, 3)[0], INPUTS[:3] + 0.5)


def test_holds_out_a_fraction_and_reads_other_names(tmp_path):
    np.savez(tmp_path / "a.npz", x=INPUTS, y=TARGETS)
    source = open_npz(NpzOptions(path=tmp_path / "a.npz", inputs="x", targets="y", held_out=0.3))
    assert (source.spec.examples, source.spec.held_out) == (7, 3)
    rows = np.concatenate([source.examples(np.arange(7))[0], source.held_out(0, 3)[0]])
    assert sorted(rows[:, 0, 0].tolist()) == INPUTS[:, 0, 0].tolist()


@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<f2", "u1", "<i8", ">u2", "?"])
def test_numbers_of_every_type_become_float32(tmp_path, dtype):
    source = open_npz(write(tmp_path / "a.npz", inputs=INPUTS.astype(dtype), targets=TARGETS))
    inputs, _ = source.examples(np.arange(8))
    assert inputs.dtype == np.float32
    assert np.isin(inputs, INPUTS.astype(dtype).astype(np.float32)).all()


@pytest.mark.parametrize("dtype", ["<i8", "<f8"])
def test_ids_are_refused(tmp_path, dtype):
    inputs = np.full((10, 1), 2**24 + 1, dtype)
    with pytest.raises(BadData, match=r"array 'inputs': the whole number 16777217 would lose its .*data.key_columns"):
        open_npz(write(tmp_path / "a.npz", inputs=inputs, targets=TARGETS))


def test_fortran_order_is_no_matter(tmp_path):
    plain = open_npz(write(tmp_path / "a.npz", inputs=INPUTS, targets=TARGETS))
    fortran = open_npz(write(tmp_path / "b.npz", inputs=np.asfortranarray(INPUTS), targets=TARGETS))
    assert plain.spec == fortran.spec


def test_float_targets_are_values_not_classes(tmp_path):
    source = open_npz(write(tmp_path / "a.npz", inputs=INPUTS, targets=TARGETS / 2))
    assert source.spec.classes == 0
    assert source.examples(np.arange(2))[1].dtype == np.float32


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"targets": TARGETS}, "has no array 'inputs'; its arrays: targets"),
        ({"inputs": INPUTS}, "has no array 'targets'; its arrays: inputs"),
        ({"inputs": INPUTS[:, 0, 0], "targets": TARGETS}, r"'inputs': must have the shape .* found \(10,\)"),
        ({"inputs": INPUTS[:, :0], "targets": TARGETS}, r"'inputs': must have the shape .* found \(10, 0, 2\)"),
        ({"inputs": INPUTS, "targets": TARGETS[:9]}, r"'targets': must have the shape \(10,\), found \(9,\)"),
        ({"inputs": INPUTS, "targets": TARGETS[:, None]}, r"'targets': must have the shape \(10,\), found \(10, 1\)"),
        ({"inputs": INPUTS[:0], "targets": TARGETS[:0]}, "'inputs' has no examples"),
        ({"inputs": INPUTS, "targets": TARGETS - 2}, "'targets': class labels .* found -2"),
        ({"inputs": INPUTS, "targets": TARGETS * 2.0**200}, "'targets': index 1 has a value that is not finite"),
        ({"inputs": np.where(INPUTS == 21, np.nan, INPUTS), "targets": TARGETS}, "'inputs': index 5 .* not finite"),
        ({"inputs": INPUTS * 1j, "targets": TARGETS}, "'inputs': must hold numbers, found dtype complex128"),
        ({"inputs": INPUTS, "targets": TARGETS.astype(str)}, "'targets': must hold numbers, found dtype <U"),
        ({"inputs": INPUTS, "targets": TARGETS, "held_out_inputs": INPUTS}, "has no array 'held_out_targets'"),
        (
            {"inputs": INPUTS, "targets": TARGETS, "held_out_inputs": INPUTS[:, :1], "held_out_targets": TARGETS},
            r"shape \(2, 2\) with class labels in training, but inputs of shape \(1, 2\)",
        ),
        (
            {"inputs": INPUTS, "targets": TARGETS, "held_out_inputs": INPUTS, "held_out_targets": TARGETS / 2},
            "with class labels in training, but .* with float targets held out",
        ),
    ],
)
def test_wrong_arrays_are_named(tmp_path, arrays, said):
    with pytest.raises(BadData, match=rf"a\.npz.*{said}"):
        open_npz(write(tmp_path / "a.npz", **arrays))


def test_objects_are_never_unpickled(tmp_path):
    arrays = {"inputs": INPUTS, "targets": np.array([{}] * 10, dtype=object)}
    with pytest.raises(BadData, match=r"a\.npz: array 'targets': must hold numbers, found dtype object"):
        open_npz(write(tmp_path / "a.npz", **arrays))


def npy_lie(shape):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return file.getvalue()


@pytest.mark.parametrize("shape", [(1 << 40, 4), (2, 4), (-1, -8)])
def test_a_wrong_size_is_reported_before_anything_is_allocated(tmp_path, shape):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("inputs.npy", npy_lie(shape) + bytes(128))
        archive.writestr("targets.npy", npy_lie((8,)) + bytes(32))
    said = r"shape \(-1, -8\)" if shape[0] < 0 else "but the archive holds 128"
    with pytest.raises(BadData, match=rf"a\.npz: array 'inputs': .*{said}"):
        open_npz(NpzOptions(path=tmp_path / "a.npz"))


def test_damage_inside_is_found_by_the_checksum(tmp_path):
    options = write(tmp_path / "a.npz", inputs=INPUTS, targets=TARGETS)
    content = bytearray(options.path.read_bytes())
    content[content.index(INPUTS.tobytes()) + 8] ^= 1
    options.path.write_bytes(content)
    with pytest.raises(BadData, match=r"a\.npz: array 'inputs': damaged: Bad CRC-32"):
        open_npz(options)


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x93NUMPY\x01\x00"])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(BadData, match=r"a\.npz: cannot be read as an \.npz archive"):
        open_npz(NpzOptions(path=tmp_path / "a.npz"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BadData, match=r"a\.npz: cannot be read as an \.npz archive: .*No such file"):
        open_npz(NpzOptions(path=tmp_path / "a.npz"))


def archive_bytes(compressed):
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, inputs=INPUTS, targets=TARGETS)
    return file.getvalue()


ARCHIVES = [archive_bytes(False), archive_bytes(True)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(ARCHIVES), st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255))), st.data()
)
def test_any_damage_is_survived_or_refused(tmp_path, content, changes, data):
    damaged = bytearray(content)
    for place, value in changes:
        damaged[int(place * len(damaged))] = value
    (tmp_path / "fuzz.npz").write_bytes(damaged[: data.draw(st.sampled_from([len(damaged), len(damaged) // 2]))])
    source, refusal = None, ""
    try:
        source = open_npz(NpzOptions(path=tmp_path / "fuzz.npz"))
    except BadData as error:
        refusal = str(error)
    assert source is not None or "fuzz.npz" in refusal
