"""Rows of tables in PyTorch modules: outputs and gradients of torch.nn's own over a dense table of the same rows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api.splitting import Accumulated
from parashard.client.pulled_rows import TableSet
from parashard.data.base import Batch
from parashard.errors import ConfigurationError, WrongModel
from parashard.models.base import HeldTable
from parashard.models.framework import (
    step_seed,
)
from parashard.models.looking_up import looked_up, placed
from parashard.plan.embedding import EmbeddingTable, mixed
from parashard.plan.optimizers import SGD

torch = pytest.importorskip(
    "torch", reason="NO TEST OF ps.torch.Embedding: PyTorch is not installed; `make test-frameworks` has it"
)
functional = torch.nn.functional

USERS, ITEMS = ps.Table("users", 3, scale=0.5), ps.Table("items", 2, scale=0.5)
ALL = np.array([-(7**20), 10**15, 3, 0, 1 - 2**63, 2**63 - 1], np.int64)
"""Keys, by their places in a dense table."""
PADDING = -1
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 5, (8, 4))
"""Of the dense table; the last key is in none."""
Y = np.arange(8) % 2


class Net(torch.nn.Module):  # type: ignore[misc]
    """Looks up by one layer, and sums what it gives."""

    def __init__(self, layer: Callable[[], Any], call: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = layer()
        self.call = call
        self.out = torch.nn.Linear(3, 2)

    def forward(self, ids: Any) -> Any:
        return self.out(self.call(self.layer, ids))


def trained(layer: Callable[[], Any], call: Callable[..., Any]) -> Any:
    model = ps.torch.Model(lambda: Net(layer, call), functional.cross_entropy, keys=lambda ids: {"users": ids})
    model.seed(3)
    return model


def tables(model: Any) -> dict[str, EmbeddingTable]:
    return {table.name: table for table in model.tables}


def step(model: Any, inputs: Any, number: int = 0) -> tuple[Batch, dict[str, Any]]:
    """Return a batch of these inputs, and the variables and rows that a worker gives the model."""
    batch = looked_up(model, Batch(number, 0, np.arange(8), inputs, Y), tables(model))
    drawn = TableSet(tuple(tables(model).values()), 3)
    rows = {name: drawn.first_rows(name, keys) for name, keys in batch.keys.items()}
    return batch, {**model.initial_variables(), **rows}


def dense(table: ps.Table) -> Any:
    """Return a dense table with the rows of ALL, and of the padding key after them."""
    rows = TableSet((table,), 3).first_rows(table.name, mixed(ALL))
    return torch.from_numpy(np.concatenate([rows, np.zeros((1, table.dimension), np.float32)])).requires_grad_()


def pool(layer: Any, ids: Any) -> Any:
    return layer(ids).relu_().mean(1)  # in place, as a user may


WEIGHTS = torch.linspace(-1, 1, 32).reshape(8, 4)
OFFSETS = torch.tensor([0, 3, 3, 5, 9, 14, 20, 29])

CASES: dict[str, tuple[Callable[[], Any], Callable[..., Any], Callable[..., Any]]] = {
    "embedding": (
        lambda: ps.torch.Embedding(USERS),
        pool,
        lambda table, ids: functional.embedding(ids, table).relu().mean(1),
    ),
    "embedding, twice": (
        lambda: ps.torch.Embedding(USERS),
        lambda layer, ids: layer(ids[:, 0]) * layer(ids[:, 1]),
        lambda table, ids: functional.embedding(ids[:, 0], table) * functional.embedding(ids[:, 1], table),
    ),
    "embedding, padded": (
        lambda: ps.torch.Embedding(USERS, padding_key=PADDING),
        pool,
        lambda table, ids: functional.embedding(ids, table, padding_idx=6).relu().mean(1),
    ),
    "sum": (
        lambda: ps.torch.EmbeddingBag(USERS, "sum"),
        lambda layer, ids: layer(ids),
        lambda table, ids: functional.embedding_bag(ids, table, mode="sum"),
    ),
    "mean": (
        lambda: ps.torch.EmbeddingBag(USERS, "mean"),
        lambda layer, ids: layer(ids),
        lambda table, ids: functional.embedding_bag(ids, table, mode="mean"),
    ),
    "mean, padded": (
        lambda: ps.torch.EmbeddingBag(USERS, "mean", padding_key=PADDING),
        lambda layer, ids: layer(ids),
        lambda table, ids: functional.embedding_bag(ids, table, mode="mean", padding_idx=6),
    ),
    "offsets": (
        lambda: ps.torch.EmbeddingBag(USERS, "mean"),
        lambda layer, ids: layer(ids.reshape(-1), OFFSETS),
        lambda table, ids: functional.embedding_bag(ids.reshape(-1), table, OFFSETS, mode="mean"),
    ),
    "weights": (
        lambda: ps.torch.EmbeddingBag(USERS, "sum"),
        lambda layer, ids: layer(ids, per_sample_weights=WEIGHTS),
        lambda table, ids: functional.embedding_bag(ids, table, mode="sum", per_sample_weights=WEIGHTS),
    ),
    "offsets and weights": (
        lambda: ps.torch.EmbeddingBag(USERS, "sum"),
        lambda layer, ids: layer(ids.reshape(-1), OFFSETS, WEIGHTS.reshape(-1)),
        lambda table, ids: functional.embedding_bag(
            ids.reshape(-1), table, OFFSETS, mode="sum", per_sample_weights=WEIGHTS.reshape(-1)
        ),
    ),
}


def inputs_of(name: str) -> tuple[Any, Any]:
    """Return keys, and the places of their rows in the dense table."""
    places = IDS.copy()
    if "padded" in name:
        places[2:5, 1:3], places[6] = 6, 6  # the whole of one bag
    return np.append(ALL, PADDING)[places], places


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_a_dense_table(name: str) -> None:
    layer, call, alone = CASES[name]
    model, (keys, places) = trained(layer, call), inputs_of(name)
    batch, values = step(model, keys)
    loss, gradients = model.loss_and_gradients(values, batch, np)
    table, net = dense(USERS), model._ready()
    due = functional.cross_entropy(net.out(alone(table, torch.from_numpy(places))), torch.from_numpy(Y))
    of_table, of_weight = torch.autograd.grad(due, [table, net.out.weight])
    assert loss == pytest.approx(due.item(), rel=1e-6)
    assert gradients["out.weight"] == pytest.approx(of_weight.numpy(), abs=1e-6)
    used = [place for place in range(5) if (places == place).any()]
    found = gradients["users"][np.searchsorted(batch.keys["users"], mixed(ALL[used]))]
    assert found == pytest.approx(of_table[used].numpy(), abs=1e-6)
    assert len(batch.keys["users"]) == len(used) == len(gradients["users"]), "padding has no row"
    outputs = model.predict(values, keys, batch.keys)
    assert outputs == pytest.approx(net.out(alone(table, torch.from_numpy(places))).detach().numpy(), abs=1e-6)


class Two(torch.nn.Module):  # type: ignore[misc]
    """Three look-ups among the rows of two tables, one of which two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.friend = ps.torch.Embedding(USERS), ps.torch.EmbeddingBag(USERS, "sum")
        self.item = ps.torch.Embedding(ITEMS)
        self.drop, self.out = torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)

    def forward(self, user: Any, friends: Any, item: Any) -> Any:
        return self.out(self.drop(torch.cat([self.user(user), self.friend(friends), self.item(item)], 1)))


def two(**arguments: Any) -> Any:
    def keys(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        together = torch.cat([inputs["user"][:, None], inputs["friends"]], 1)
        return {"users": together, "items": inputs["item"].numpy()}  # an array is as good as a tensor

    model = ps.torch.Model(Two, functional.cross_entropy, keys=keys, **arguments)
    model.seed(3)
    return model


INPUTS = {"user": ALL[IDS[:, 0]], "friends": ALL[IDS[:, 1:3]], "item": ALL[IDS[:, 3]]}


def test_layers_that_share_a_table_share_its_rows_and_their_gradient() -> None:
    model = two()
    batch, values = step(model, INPUTS)
    gradients = model.loss_and_gradients(values, batch, np)[1]
    net, users, items = model._ready(), dense(USERS), dense(ITEMS)
    at = {name: torch.from_numpy(IDS[:, where]) for name, where in (("u", 0), ("f", slice(1, 3)), ("i", 3))}
    torch.manual_seed(step_seed("torch", 3, 0))
    found = torch.cat([users[at["u"]], users[at["f"]].sum(1), items[at["i"]]], 1)
    loss = functional.cross_entropy(net.out(functional.dropout(found, 0.5)), torch.from_numpy(Y))
    for name, due in zip(("users", "items"), torch.autograd.grad(loss, [users, items]), strict=True):
        rows = np.isin(mixed(ALL), batch.keys[name])
        places = np.searchsorted(batch.keys[name], mixed(ALL[rows]))
        assert gradients[name][places] == pytest.approx(due[:6][rows].numpy(), abs=1e-6)


def test_pulled_rows_are_only_read_and_a_step_again_has_its_bits() -> None:
    model = two()
    batch, values = step(model, INPUTS)
    for value in values.values():
        value.flags.writeable = False
    first, again = (model.loss_and_gradients(values, batch, np)[1] for _ in range(2))
    assert {name: g.tobytes() for name, g in first.items()} == {name: g.tobytes() for name, g in again.items()}


def test_pieces_of_a_step_have_the_gradient_of_the_whole() -> None:
    class Mean(Two):
        def __init__(self) -> None:
            super().__init__()
            self.drop = torch.nn.Identity()

    model = ps.torch.Model(Mean, functional.cross_entropy, keys=two().keys_function)
    model.seed(3)
    batch, values = step(model, INPUTS)
    due = model.loss_and_gradients(values, batch, np)[1]
    found = Accumulated(model, 3).loss_and_gradients(values, batch, np)[1]
    for name, gradient in due.items():
        assert np.asarray(found[name]) == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize("autocast", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_rows_have_the_type_of_the_parameters_and_gradients_are_float32(dtype: str, autocast: str | None) -> None:
    seen = []

    def call(layer: Any, ids: Any) -> Any:
        found = layer(ids).mean(1)
        seen.append(found.dtype)
        return found

    model = ps.torch.Model(
        lambda: Net(lambda: ps.torch.Embedding(USERS), call).to(getattr(torch, dtype)),
        functional.cross_entropy,
        keys=lambda ids: {"users": ids},
        autocast=autocast,
    )
    model.seed(3)
    batch, values = step(model, ALL[IDS])
    plain = trained(lambda: ps.torch.Embedding(USERS), lambda layer, ids: layer(ids).mean(1))
    due = plain.loss_and_gradients(values, batch, np)[1]["users"]
    found = model.loss_and_gradients(values, batch, np)[1]["users"]
    assert (seen[0], found.dtype) == (getattr(torch, dtype), np.float32)
    assert found == pytest.approx(due, abs=2e-3)


def test_a_worker_thread_has_layers_of_its_own() -> None:
    model = two()
    own = model.for_thread()
    assert own._look_ups[0] is not model._look_ups[0]
    batch, values = step(model, INPUTS)
    mine, theirs = (one.loss_and_gradients(values, batch, np)[1]["users"] for one in (model, own))
    assert mine.tobytes() == theirs.tobytes()


def test_an_evaluation_has_the_rows_of_all_of_its_pieces() -> None:
    model = two(metrics=["accuracy"])
    batch, values = step(model, INPUTS)
    piece = Batch(-1, -1, np.arange(3), {name: array[:3] for name, array in INPUTS.items()}, Y[:3])
    there = placed(model, piece, tables(model), batch.keys)
    outputs = torch.from_numpy(model.predict(values, piece.inputs, batch.keys))
    judged = model.evaluate(values, there, np)
    assert float(judged["loss"]) == pytest.approx(
        functional.cross_entropy(outputs, torch.from_numpy(Y[:3])).item(), rel=1e-6
    )
    assert float(judged["accuracy"]) == pytest.approx((outputs.argmax(1).numpy() == Y[:3]).mean())


def test_a_key_that_was_not_named_is_refused_with_the_key() -> None:
    model = ps.torch.Model(
        lambda: Net(lambda: ps.torch.Embedding(USERS), lambda layer, ids: layer(ids).mean(1)),
        functional.cross_entropy,
        keys=lambda ids: {"users": ids[:, :1]},
    )
    batch, values = step(model, np.broadcast_to(ALL[[0, 0, 1, 2]], (8, 4)))
    with pytest.raises(WrongModel, match=f"key {10**15} of table 'users' is looked up, and keys= did not name it"):
        model.loss_and_gradients(values, batch, np)


def test_a_table_that_a_batch_does_not_use_has_no_gradient() -> None:
    model = two()
    batch, values = step(model, INPUTS)
    model._ready().item.forward = lambda ids: torch.zeros(len(ids), 2)
    assert model.loss_and_gradients(values, batch, np)[1]["items"] is None
    empty = trained(lambda: ps.torch.Embedding(USERS, padding_key=PADDING), lambda layer, ids: layer(ids).mean(1))
    batch, values = step(empty, np.full((8, 4), PADDING))
    loss, gradients = empty.loss_and_gradients(values, batch, np)
    assert np.isfinite(loss)
    assert (gradients["users"], values["users"].shape) == (None, (0, 3))


def test_a_look_up_that_does_not_count_adds_nothing() -> None:
    def call(layer: Any, ids: Any) -> Any:
        layer(ids[:, 1])
        return layer(ids[:, 0])

    found, due = (
        trained(lambda: ps.torch.Embedding(USERS), one) for one in (call, lambda layer, ids: layer(ids[:, 0]))
    )
    batch, values = step(found, ALL[IDS])
    gradients = [model.loss_and_gradients(values, batch, np)[1]["users"] for model in (found, due)]
    assert gradients[0].tobytes() == gradients[1].tobytes()


def test_the_module_of_a_trainer_holds_the_rows_and_draws_others() -> None:
    model = two()
    batch, values = step(model, INPUTS)
    own = model.to_user_object({name: values[name] for name in model.initial_variables()})
    held = {
        name: HeldTable(
            batch.keys[name],
            2 * values[name],
            lambda words, name=name: np.ones((len(words), 2 + (name == "users")), np.float32),
        )
        for name in batch.keys
    }
    model.hold(own, held)
    ids = torch.from_numpy(ALL[:3])
    due = 2 * values["users"][np.searchsorted(batch.keys["users"], mixed(ALL[:3]))]
    assert own.user(ids).numpy().tobytes() == due.tobytes()
    assert own.user(torch.tensor([[12345]])).tolist() == [[[1.0, 1.0, 1.0]]]
    with pytest.raises(ConfigurationError, match="holds rows of tables, with which no fit begins"):
        ps.torch.Model(own, model._loss, keys=model.keys_function).initial_variables()


def test_a_layer_outside_of_a_step_has_no_rows() -> None:
    with pytest.raises(WrongModel, match="the rows of table 'users' are on the shards: trainer"):
        ps.torch.Embedding(USERS)(torch.tensor([1]))


def test_a_layer_takes_the_table_that_a_job_file_declares() -> None:
    layer = ps.torch.Embedding(EmbeddingTable("users", 3, SGD(0.1)))
    assert (layer.dimension, str(layer)) == (3, "Embedding('users', 3)")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ps.torch.Embedding(10), "ps.torch.Embedding: table is one such as ps.Table"),
        (lambda: ps.torch.Embedding(USERS, 1.5), "padding_key is a whole number, found 1.5"),
        (lambda: ps.torch.EmbeddingBag(USERS, "max"), "ps.torch.EmbeddingBag: mode is sum or mean, found 'max'"),
        (lambda: ps.torch.Model(Two, functional.cross_entropy).seed(0), "rows of 'items', 'users', and nothing says"),
        (
            lambda: ps.torch.Model(torch.nn.Linear(2, 2), functional.cross_entropy, keys=lambda x: {}).seed(0),
            "keys= names rows of tables, and the module has neither ps.torch.Embedding nor",
        ),
        (lambda: ps.torch.Model(Two, functional.cross_entropy, keys={"users": 0}), "keys is a function of the inputs"),
    ],
)
def test_what_makes_no_model_is_refused_in_a_sentence(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        make()


@pytest.mark.parametrize("ids", [torch.zeros(2), "ab"])
def test_ids_are_whole_numbers(ids: Any) -> None:
    with pytest.raises(WrongModel, match="ids of table 'users' are a tensor of whole numbers, found"):
        ps.torch.Embedding(USERS)(ids)


def test_a_compiled_module_looks_up_outside_of_its_graphs() -> None:
    graphs: list[str] = []

    def eager(graph: Any, _: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    layer, call, _ = CASES["embedding"]
    plain = trained(layer, call)
    model = ps.torch.Model(
        lambda: torch.compile(Net(layer, call), backend=eager),
        functional.cross_entropy,
        keys=lambda ids: {"users": ids},
    )
    model.seed(3)
    batch, values = step(model, ALL[IDS])
    loss, gradients = model.loss_and_gradients(values, batch, np)
    due, of_plain = plain.loss_and_gradients(values, batch, np)
    assert graphs
    assert not any("index_select" in graph or "look_up" in graph for graph in graphs)
    assert loss == pytest.approx(due, rel=1e-6)
    assert gradients["users"] == pytest.approx(of_plain["users"], abs=1e-6)


def test_what_compiles_is_not_imported_for_a_module_without_look_ups() -> None:
    source = """
import sys, numpy as np, torch, parashard as ps
from parashard.data.base import Batch
model = ps.torch.Model(lambda: torch.nn.Linear(2, 2), torch.nn.functional.cross_entropy)
model.seed(0)
batch = Batch(0, 0, np.arange(1), np.ones((1, 2), np.float32), np.zeros(1, np.int64))
assert len(model.loss_and_gradients(model.initial_variables(), batch, np)[1]) == 2
print("torch._dynamo" in sys.modules)
"""
    assert subprocess.check_output([sys.executable, "-c", source], text=True, timeout=60).split() == ["False"]
