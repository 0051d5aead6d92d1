"""Files of rows: all rows of a cut, each once and in order, however many files and pieces they take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from parashard.checkpoints.catalogue import CheckpointId
from parashard.checkpoints.row_files import parsed
from parashard.checkpoints.tensors import read_file
from parashard.plan.embedding import EmbeddingTable, mixed
from parashard.plan.optimizers import Adagrad
from parashard_server.durability import checkpoint_writer
from parashard_server.durability.checkpoint_writer import write_rows
from parashard_server.state.rows import row_saving
from parashard_server.state.rows.embedding_tables import EmbeddingTables, RowGradients
from support.store_fakes import MemoryStore

HOST: Any = SimpleNamespace(run_exclusive=lambda call: call(None))
ID = CheckpointId(1, 0, 1, 1)


@pytest.mark.parametrize("dimension", [1, 3, 8])
@pytest.mark.parametrize("rows", [1, 9, 10, 11, 57])
@pytest.mark.parametrize(
    ("file_bytes", "piece_bytes"), [(400, 100), (400, 48), (1 << 20, 100), (333, 1000), (1 << 20, 1 << 20)]
)
def test_every_row_is_in_one_file(
    dimension: int, rows: int, file_bytes: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "FILE_BYTES", file_bytes)
    monkeypatch.setattr(row_saving, "PIECE_BYTES", piece_bytes)
    keys = np.sort(mixed(np.arange(rows)))
    gradients = np.random.default_rng(0).normal(size=(rows, dimension)).astype(np.float32)
    tables = EmbeddingTables([EmbeddingTable("user", dimension, Adagrad(0.1), rows_max=1000)], 0, 0, 1)
    tables.apply({"user": RowGradients(keys, gradients)}, t=1)
    store = MemoryStore()
    files = write_rows(store, ID, tables.cut(1), HOST)
    assert sum(file.rows for file in files) == rows
    stored = [parsed(read_file(store, ID.folder, file), file.name).rows for file in files]
    assert np.concatenate([some.keys for some in stored]).tolist() == keys.tolist()
    now = tables.by_name["user"].pull(keys, 1).values
    assert np.concatenate([some.values for some in stored]).tobytes() == now.tobytes()
    if rows == 57 and file_bytes < 1000:
        assert len(files) >= 3
