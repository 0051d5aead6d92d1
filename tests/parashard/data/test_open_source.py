"""DataOptions and open_source: the discriminated union, and what importing it loads."""

import errno
import os
import subprocess
import sys

import numpy as np
import pytest
from pydantic import ValidationError

from parashard.data import open_source
from parashard.data.options import DataOptions
from parashard.errors import BadData, Unavailable
from parashard.frozen_model import validated


def write_npz(folder):
    np.savez(folder / "a.npz", inputs=np.ones((10, 2)), targets=np.arange(10) % 3)
    return {"source": "npz", "path": str(folder / "a.npz")}


def write_csv(folder):
    (folder / "a.csv").write_text("a,b\n" + "".join(f"{i},{i % 3}\n" for i in range(10)))
    return {"source": "csv", "path": str(folder / "a.csv"), "label": "b"}


def write_parquet(folder):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"a": range(10), "b": [i % 3 for i in range(10)]}), folder / "a.parquet")
    return {"source": "parquet", "path": str(folder / "a.parquet"), "label": "b"}


def write_idx(folder):
    for name, examples in (("train", 8), ("t10k", 2)):
        shape = examples.to_bytes(4, "big")
        images = b"\0\0\x08\x03" + shape + (1).to_bytes(4, "big") * 2 + bytes(examples)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + shape + bytes(range(examples)))
    return {"source": "idx", "path": str(folder)}


def write_nothing(folder):
    return {"source": "synthetic", "examples": 8, "held_out": 2}


@pytest.mark.parametrize("write", [write_npz, write_csv, write_parquet, write_idx, write_nothing])
def test_opens_what_the_discriminator_names(tmp_path, write):
    options = validated(DataOptions, write(tmp_path))
    source = open_source(options)
    assert (source.spec.examples, source.spec.held_out) == (8, 2)
    inputs, targets = source.examples(np.arange(8))
    assert inputs.shape == (8, *source.spec.input_shape)
    assert inputs.dtype == np.float32
    assert targets.shape == (8,)
    assert source.held_out(0, 2)[0].shape == (2, *source.spec.input_shape)
    assert validated(DataOptions, options.plain()) == options


def test_opens_a_split_with_nothing_held_out(tmp_path):
    for write in (write_npz, write_csv):
        source = open_source(validated(DataOptions, write(tmp_path) | {"held_out": 0.0}))
        assert source.spec.held_out == 0
        assert source.held_out(0, 0)[0].shape == (0, *source.spec.input_shape)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"source": "mnist"}, "'clicks', 'criteo', 'csv', 'digits', 'idx', 'npz', 'parquet', 'synthetic'"),
        ({"examples": 5}, "source"),
        ({"source": "digits", "path": "/x"}, "path"),
        ({"source": "idx"}, "path"),
    ],
)
def test_wrong_options_are_named(options, named):
    with pytest.raises(ValidationError, match=named):
        validated(DataOptions, options)


def test_importing_the_sources_loads_no_optional_library():
    check = "import sys, parashard.data; print(*{'sklearn', 'pyarrow', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EIO, Unavailable), (errno.ESTALE, Unavailable), (errno.EACCES, BadData)]
)
@pytest.mark.parametrize("write", [write_npz, write_csv, write_idx])
def test_a_disk_that_does_not_give_a_file_may_give_it_later(write, tmp_path, monkeypatch, number, kind):
    options = validated(DataOptions, write(tmp_path))

    def broken(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("pathlib.Path.open", broken)
    monkeypatch.setattr("zipfile.ZipFile", broken)
    with pytest.raises(kind, match=os.strerror(number)):
        open_source(options)
