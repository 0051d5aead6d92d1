"""Files of data by paths, patterns and URLs, also of buckets."""

from __future__ import annotations

import os
import urllib.request
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import parashard as ps
from parashard.data.data_files import _RemoteFile, data_files, read_rows
from parashard.errors import BadData, ConfigurationError, Unavailable
from parashard.store import buckets, open_store

pa = pytest.importorskip("pyarrow", reason="NO TEST OF PARQUET FILES: pyarrow is not installed")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("obstore", reason="NO TEST OF DATA IN BUCKETS: obstore is not installed")

NAMES = ("a.parquet", "b.parquet", "deep/c.parquet", "deep/er/d.parquet", "a.csv")


def table(first: int) -> bytes:
    sink = pa.BufferOutputStream()
    rows = np.arange(first, first + 3)
    parquet.write_table(pa.table({"x": rows / 2, "y": rows}), sink, row_group_size=2)
    return bytes(sink.getvalue())


@pytest.fixture(params=["disk", "file", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return where the files are, as a path and as URLs."""
    s3 = request.param == "s3"
    url = request.getfixturevalue("s3_url") if s3 else str(tmp_path / "rows")
    store = open_store(url)
    for index, name in enumerate(NAMES):
        store.create(name, table(10 * index))
    return f"file://{url}" if request.param == "file" else url


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.parquet", ["a.parquet"]),
        ("*.parquet", ["a.parquet", "b.parquet"]),
        ("[b-z].parquet", ["b.parquet"]),
        ("d??p/*.parquet", ["deep/c.parquet"]),
        ("**/*.parquet", ["a.parquet", "b.parquet", "deep/c.parquet", "deep/er/d.parquet"]),
        ("*/*/*", ["deep/er/d.parquet"]),
    ],
)
def test_a_pattern_names_files_in_the_order_of_names(root: str, pattern: str, names: list[str]) -> None:
    found = data_files([f"{root}/{pattern}"])
    ends = [file.path.partition(f"{root.rpartition('/')[2]}/")[2] for file in found]
    assert ends == names


def test_rows_are_read_from_there(root: str) -> None:
    inputs, targets = ps.parquet([f"{root}/b.parquet", f"{root}/deep/*.parquet"], targets="y")
    assert targets.tolist() == [10, 11, 12, 20, 21, 22]
    assert inputs.tolist() == [[y / 2] for y in targets.tolist()]


def test_another_content_has_another_version(root: str) -> None:
    store = open_store(root)
    before, again = (data_files([f"{root}/a.parquet"])[0].version for _ in range(2))
    assert before == again
    store.replace("a.parquet", table(7))
    assert data_files([f"{root}/a.parquet"])[0].version != before


@pytest.mark.parametrize("name", ["none.parquet", "none*.parquet"])
def test_a_file_that_is_not_there_is_named(root: str, name: str) -> None:
    with pytest.raises(BadData, match=name.replace("*", r"\*")):
        data_files([f"{root}/{name}"])


def test_a_file_of_a_web_server_is_read_too(s3_url: str) -> None:
    url = f"{os.environ['AWS_ENDPOINT_URL']}/{s3_url.removeprefix('s3://')}/a.parquet"
    headers = {"Content-Type": "application/octet-stream", "x-amz-acl": "public-read"}
    put = urllib.request.Request(url, table(0), headers, method="PUT")
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(put, timeout=10).close()
    assert ps.parquet(url, targets="y")[1].tolist() == [0, 1, 2]


def test_a_bucket_that_does_not_answer_may_do_so_later(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(s3_url).create("a.parquet", table(0))
    [file] = data_files([f"{s3_url}/a.parquet"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(buckets, "RETRIES_MAX", 0)
    with pytest.raises(Unavailable, match=r"cannot be read: .*connection refused"):
        data_files([file.url])
    nowhere = partial(_RemoteFile, buckets.Bucket(s3_url), file.path, 1000)
    with pytest.raises(Unavailable, match=r"cannot be read: .*connection refused"):
        list(read_rows([file._replace(open=nowhere)], None))


def test_a_file_that_may_not_be_read_is_named(s3_url: str) -> None:
    open_store(s3_url).create("a.parquet", table(0))
    with pytest.raises(BadData, match=r"a\.parquet: cannot be read: "):  # without a signature
        data_files([f"{os.environ['AWS_ENDPOINT_URL']}/{s3_url.removeprefix('s3://')}/a.parquet"])


@pytest.mark.parametrize("url", ["hf://rows/a.parquet", "zip://a.parquet::s3://b/c.zip"])
def test_other_urls_are_refused_with_what_is_allowed(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r":// is not read; allowed are paths, file://, az://, gs://, http://"):
        data_files([url])
