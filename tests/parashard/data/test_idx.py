"""The IDX reader: round trips, and every kind of damage is BadData that names the file."""

import gzip
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parashard.data.array_files import IdxOptions, open_idx, read_idx
from parashard.errors import BadData

NAMES = [f"{prefix}-{rest}" for prefix in ("train", "t10k") for rest in ("images-idx3-ubyte", "labels-idx1-ubyte")]


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def digits(examples, rows=4, columns=3):
    images = np.arange(examples * rows * columns).reshape(examples, rows, columns) % 256
    return images, np.arange(examples) % 5


@pytest.fixture
def folder(tmp_path):
    for name, array in zip(NAMES, [*digits(12), *digits(7)], strict=True):
        (tmp_path / name).write_bytes(idx(array))
    return tmp_path


def zip_all(folder):
    for name in NAMES:
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
        (folder / name).unlink()


@pytest.mark.parametrize("zipped", [False, True])
def test_round_trip(folder, zipped):
    if zipped:
        zip_all(folder)
    source = open_idx(IdxOptions(path=folder))
    spec = source.spec
    assert (spec.examples, spec.held_out, spec.input_shape, spec.classes) == (12, 7, (4, 3), 5)
    images, labels = digits(12)
    inputs, targets = source.examples(np.array([11, 2]))
    assert inputs.dtype == np.float32
    assert np.array_equal(inputs, (images[[11, 2]] / 255).astype(np.float32))
    assert targets.tolist() == labels[[11, 2]].tolist()
    assert source.held_out(0, 7)[1].tolist() == digits(7)[1].tolist()


def test_compression_does_not_change_the_fingerprint(folder):
    plain = open_idx(IdxOptions(path=folder)).spec
    zip_all(folder)
    assert open_idx(IdxOptions(path=folder)).spec == plain


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(BadData, match=f"{name}: no such file, nor with .gz"):
        open_idx(IdxOptions(path=folder))


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda c: b"", "must begin with two zero bytes"),
        (lambda c: b"\x89PNG" + c[4:], "must begin with two zero bytes, found '89 50 4e 47'"),
        (lambda c: c[:2] + b"\x0d" + c[3:], "found type 13"),
        (lambda c: c[:3] + b"\x01" + c[4:], "must have 3 dimensions, found 1"),
        (lambda c: c[:10], "truncated in the header, after 10 of 16"),
        (lambda c: c[:4] + bytes(4) + c[8:], "which is none"),
        (lambda c: c[:4] + b"\xff" * 12 + c[16:], "does not fit the file's size"),
    ],
)
def test_a_damaged_header_is_reported(folder, damage, said, zipped):
    path = folder / NAMES[0]
    content = damage(path.read_bytes())
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(BadData, match=rf"{NAMES[0]}.*{said}"):
        open_idx(IdxOptions(path=folder))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda c: c[:-1], "declares 12 x 4 x 3 bytes after its header, which does not fit"),
        (lambda c: c + b"!", "declares 12 x 4 x 3 bytes after its header, which does not fit"),
        (lambda c: gzip.compress(c[:-1]), "ends after 143 of the 144 bytes"),
        (lambda c: gzip.compress(c + b"!"), "goes on after the 144 bytes"),
        (lambda c: gzip.compress(c)[:-9], "gzip stream is truncated"),
        (lambda c: gzip.compress(c)[:-6] + b"!" + gzip.compress(c)[-5:], "gzip stream is damaged.*CRC"),
        (lambda c: gzip.compress(c)[:12] + b"\xff" * 9 + gzip.compress(c)[21:], "gzip stream is damaged"),
    ],
)
def test_a_damaged_body_is_reported(folder, damage, said):
    path = folder / NAMES[0]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BadData, match=rf"{NAMES[0]}.*{said}"):
        open_idx(IdxOptions(path=folder))


def test_images_and_labels_must_agree_in_number(folder):
    (folder / NAMES[3]).write_bytes(idx(np.zeros(8)))
    with pytest.raises(BadData, match=rf"{NAMES[3]} has 8 labels for the 7 images of .*{NAMES[2]}"):
        open_idx(IdxOptions(path=folder))


def test_both_splits_must_agree_in_shape(folder):
    (folder / NAMES[2]).write_bytes(idx(digits(7, rows=5)[0]))
    with pytest.raises(BadData, match="train images are 4 x 3 pixels, the t10k images 5 x 3"):
        open_idx(IdxOptions(path=folder))


def test_a_folder_in_place_of_a_file_is_bad_data(tmp_path):
    with pytest.raises(BadData, match="cannot be read"):
        read_idx(tmp_path, 1)


def test_a_lie_about_the_size_allocates_nothing(tmp_path):
    path = tmp_path / "liar"
    lie = bytes([0, 0, 8, 1]) + struct.pack(">I", 1 << 30) + bytes(100)
    for content in (lie, gzip.compress(lie)):
        path.write_bytes(content)
        tracemalloc.start()
        with pytest.raises(BadData, match="does not fit"):
            read_idx(path, 1)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 << 20


VALID = idx(np.arange(60).reshape(5, 4, 3))


@st.composite
def damaged(draw):
    content = bytearray(draw(st.sampled_from([VALID, gzip.compress(VALID)])))
    for _ in range(draw(st.integers(0, 3))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content[: draw(st.integers(0, len(content)))]) + draw(st.binary(max_size=3))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(damaged(), st.binary(max_size=64), st.binary(max_size=64).map(lambda b: VALID[:4] + b)))
def test_any_bytes_are_read_or_refused(tmp_path, content):
    path = tmp_path / "fuzz"
    path.write_bytes(content)
    array, refusal = None, ""
    try:
        array = read_idx(path, 3)
    except BadData as error:
        refusal = str(error)
    if array is None:
        assert str(path) in refusal
    else:
        assert array.dtype == np.uint8
        assert array.size <= 1032 * len(content)
