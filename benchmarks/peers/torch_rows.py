"""PyTorch in one process, one thread: a step of a sparse embedding with Adagrad, its ids as they come."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peers import click_ids, seam


class TorchRows:
    """The table and its optimizer."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._table = torch.nn.Embedding(click_ids.ROWS, click_ids.DIMENSION, sparse=True)
        self._optimizer = torch.optim.Adagrad(self._table.parameters(), lr=click_ids.LEARNING_RATE)
        self._ids = [torch.from_numpy(batch.reshape(-1)) for batch in click_ids.batches()]
        self._gradient = torch.from_numpy(click_ids.gradients(click_ids.BATCH * click_ids.COLUMNS))

    def answer(self, request: Any) -> dict[str, Any]:
        """Return milliseconds of a step of each batch."""
        self._step(self._ids[0])
        return {"step_ms": [seam.milliseconds(lambda i=ids: self._step(i)) for ids in self._ids[: request["batches"]]]}

    def _step(self, ids: Any) -> None:
        self._optimizer.zero_grad()
        self._table(ids).backward(self._gradient)
        self._optimizer.step()


if __name__ == "__main__":
    seam.serve(TorchRows().answer, ["torch", "numpy"])
