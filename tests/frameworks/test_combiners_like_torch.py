"""Rows of several keys become the vector that torch's EmbeddingBag makes of them, with its gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.data.tree import NO_KEY
from parashard.errors import ConfigurationError
from parashard.models.row_places import bags_of, combined, keys_of_lists

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(0)
LISTS = np.where(np.arange(5) < RNG.integers(0, 6, 40)[:, None], RNG.integers(0, 9, (40, 5)), NO_KEY)
LISTS[:2] = [[NO_KEY] * 5, [3, 3, 3, NO_KEY, NO_KEY]]
NO_KEYS = np.empty((40, 0), np.int64)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_vectors_and_gradients_are_those_of_an_embedding_bag(mode: str) -> None:
    table, weights = RNG.standard_normal((9, 4)).astype(np.float32), RNG.standard_normal((40, 4)).astype(np.float32)
    ids = keys_of_lists(NO_KEYS, [LISTS])
    vectors, pull_back = combined(table[ids], bags_of([LISTS], np), mode, np)
    offsets = np.concatenate(([0], np.cumsum((LISTS != NO_KEY).sum(axis=1))[:-1]))
    bag = torch.nn.EmbeddingBag(9, 4, mode=mode)
    bag.weight.data = torch.from_numpy(table)
    due = bag(torch.from_numpy(ids), torch.from_numpy(offsets))
    np.testing.assert_allclose(vectors, due.detach().numpy(), rtol=1e-6, atol=1e-7)
    assert (vectors[0] == 0).all()
    (due * torch.from_numpy(weights)).sum().backward()
    by_table = np.zeros_like(table)
    np.add.at(by_table, ids, pull_back(weights))
    np.testing.assert_allclose(by_table, bag.weight.grad.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("combiner", "mode", "due"), [("sum", None, "sum"), (None, None, "mean"), ("sum", "mean", "mean")]
)
def test_a_table_s_combiner_is_the_mode_of_a_bag_that_is_given_none(combiner: Any, mode: Any, due: str) -> None:
    assert ps.torch.EmbeddingBag(ps.Table("tags", 4, combiner=combiner), mode).mode == due


class Net(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, *layers: Any) -> None:
        super().__init__()
        self.layers, self.out = torch.nn.ModuleList(layers), torch.nn.Linear(4, 2)

    def forward(self, ids: Any) -> Any:
        return self.out(sum(layer(ids) for layer in self.layers))


def test_a_combiner_that_no_layer_takes_is_refused() -> None:
    table = ps.Table("tags", 4, combiner="sum")
    said = (
        "table 'tags' has combiner='sum', and nothing takes it: it is the mode of a ps.torch.EmbeddingBag that is given"
    )
    for layers in (
        [lambda: ps.torch.Embedding(table)],
        [lambda: ps.torch.EmbeddingBag(table, "mean")],
    ):
        model = ps.torch.Model(lambda made=layers: Net(*(make() for make in made)), lambda o, t: o.sum(), keys=_keys)
        with pytest.raises(ConfigurationError, match=said):
            model.seed(1)
    shared = lambda: Net(ps.torch.EmbeddingBag(table), ps.torch.EmbeddingBag(table, "mean"))  # noqa: E731
    ps.torch.Model(shared, lambda o, t: o.sum(), keys=_keys).seed(1)


def _keys(ids: Any) -> Any:
    return {"tags": ids}
