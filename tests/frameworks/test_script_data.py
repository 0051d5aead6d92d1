"""Data of frameworks in a script: PyTorch's datasets and loaders, pandas, Keras' batches; weights against autograd."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api.examples.indexed import indexed, indexed_inputs
from parashard.api.examples.source import source_of
from parashard.data.base import Batch
from parashard.data.tree import leaves
from parashard.errors import BadData, ConfigurationError, WrongModel

torch: Any = pytest.importorskip(
    "torch", reason="NO TEST OF ps.torch: PyTorch is not installed; `make test-frameworks` has it"
)
functional, torch_data = torch.nn.functional, torch.utils.data

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.arange(8) % 3
W = np.arange(8, dtype=np.float32) / 4


class Padded(torch_data.Dataset):  # type: ignore[misc]
    """Texts of several lengths."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return torch.arange(index + 1), index


def padded(items: list[Any]) -> Any:
    ids = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in items], batch_first=True)
    return {"ids": ids, "length": torch.tensor([len(ids) for ids, _ in items])}, torch.tensor([y for _, y in items])


class Stream(torch_data.IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Any:
        return iter([(1.0, 2)])


def take(data: Any, rows: list[int]) -> Any:
    return indexed(data, "data").take(np.array(rows), 0)


TENSORS = torch_data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))


@pytest.mark.parametrize(
    "data",
    [
        TENSORS,
        torch_data.Subset(TENSORS, range(8)),
        torch_data.DataLoader(TENSORS, batch_size=4, shuffle=True),
        torch_data.DataLoader(torch_data.ConcatDataset([TENSORS]), batch_size=4, drop_last=True),
        (torch.from_numpy(X), torch.from_numpy(Y)),
    ],
)
def test_examples_of_pytorch(data: Any) -> None:
    inputs, targets = take(data, [5, 0])
    assert (inputs.tolist(), targets.tolist()) == (X[[5, 0]].tolist(), Y[[5, 0]].tolist())
    is_loader = isinstance(data, torch_data.DataLoader)
    assert indexed(data, "data").batch_size == (4 if is_loader else None)
    assert source_of(data).spec.fields == source_of((X, Y)).spec.fields


def test_batches_are_what_a_loader_s_collate_fn_makes_of_them() -> None:
    loader = torch_data.DataLoader(Padded(), batch_size=2, collate_fn=padded)
    inputs, targets = take(loader, [3, 1])
    assert inputs["ids"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert (inputs["length"].tolist(), targets.tolist()) == ([4, 2], [3, 1])
    assert source_of(loader, loader).spec.held_out == 6


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (torch_data.DataLoader(Stream()), "the DataLoader's dataset can only be iterated"),
        (Stream(), "Stream can only be iterated"),
        (torch_data.DataLoader(TENSORS, batch_size=None), "makes its batches itself"),
        (
            torch_data.DataLoader(TENSORS, sampler=torch_data.WeightedRandomSampler([1.0] * 8, 8)),
            "sampler is WeightedRandomSampler, and a job has each example once in each epoch, in an order of its own",
        ),
        (
            torch_data.DataLoader(TENSORS, sampler=torch_data.RandomSampler(TENSORS, num_samples=4)),
            "sampler is RandomSampler",
        ),
        (
            torch_data.DataLoader(Padded(), collate_fn=lambda items: 1 / 0),
            "collate_fn of examples 0: ZeroDivisionError",
        ),
        (Padded(), "data: example 1 has int64 (2,), int64 (), example 0 has int64 (1,)"),
    ],
)
def test_a_loader_that_is_not_plain_says_what_to_pass(loader: Any, says: str) -> None:
    with pytest.raises(BadData) as refused:
        source_of(loader)
    assert says in refused.value.message


@pytest.mark.parametrize("dataset", [TENSORS, torch_data.Subset(TENSORS, range(8))])
def test_a_loader_may_drop_its_last_batch_in_training_alone(dataset: Any) -> None:
    loader = torch_data.DataLoader(dataset, batch_size=3, drop_last=True)
    source: Any = source_of(loader)
    assert (source.drop_last, source.batch_size, source.spec.examples) == (True, 3, 8)
    for evaluate in (lambda: source_of(loader, loader), lambda: indexed_inputs(loader, "inputs")):
        with pytest.raises(
            BadData, match=r"the DataLoader drops the last 2 of 8 examples \(drop_last\), and only training may"
        ):
            evaluate()


def test_what_a_dataset_draws_from_pytorch_is_of_the_seed() -> None:
    class Noisy(Padded):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(2), index

    found = indexed(Noisy(), "data")
    torch.manual_seed(1)
    due = torch.rand(1).item()
    torch.manual_seed(1)
    first, again, other = (found.take(np.arange(2), seed)[0].tolist() for seed in (5, 5, 6))
    assert first == again != other
    assert torch.rand(1).item() == due


# --- several inputs ---


class Two(torch.nn.Module):  # type: ignore[misc]
    """Takes ids and a mask, by place or by name; returns two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 3)

    def forward(self, ids: Any, mask: Any) -> Any:
        found = (self.embedding(ids) * mask[..., None]).sum(1)
        return {"scores": found, "least": found.min(1).values}


IDS, MASK = np.arange(24).reshape(8, 3) % 10, np.ones((8, 3), np.float32)


def least(outputs: Any, targets: Any) -> Any:
    return functional.cross_entropy(outputs["scores"], targets["y"]) + outputs["least"].mean()


@pytest.mark.parametrize("inputs", [{"mask": MASK, "ids": IDS}, (IDS, MASK), [IDS, MASK]])
def test_a_module_gets_several_inputs_as_pytorch_passes_them(inputs: Any) -> None:
    model = ps.torch.Model(Two, least)
    model.seed(3)
    values = model.initial_variables()
    taken = take((inputs, {"y": Y}), [0, 4])
    loss, gradients = model.loss_and_gradients(values, Batch(0, 0, np.arange(2), *taken), np)
    torch.manual_seed(3)
    alone = Two()
    outputs = alone(torch.from_numpy(IDS[[0, 4]]), torch.from_numpy(MASK[[0, 4]]))
    due = least(outputs, {"y": torch.from_numpy(Y[[0, 4]])})
    due.backward()
    assert loss == due.item()
    assert np.array_equal(gradients["embedding.weight"], alone.embedding.weight.grad.numpy())
    trainer = ps.Trainer(model, seed=3)
    whole = trainer.predict(inputs, batch_size=3)
    assert whole["scores"].shape == (8, 3)
    np.testing.assert_array_equal(whole["scores"][[0, 4]], outputs["scores"].detach().numpy())
    assert whole["least"].shape == (8,)


def test_a_dict_reaches_a_module_that_wants_it_whole() -> None:
    class Whole(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 3)

        def forward(self, fields: Any) -> Any:
            return self.linear(fields["x"])

    assert ps.Trainer(ps.torch.Model(Whole, functional.cross_entropy)).predict(({"x": X},)).shape == (8, 3)


# --- weights ---


def own(outputs: Any, targets: Any, sample_weight: Any = None) -> Any:
    return (functional.cross_entropy(outputs, targets, reduction="none") * sample_weight).mean()


@pytest.mark.parametrize(
    "loss",
    [
        functional.cross_entropy,
        torch.nn.CrossEntropyLoss(),
        functools.partial(functional.cross_entropy, label_smoothing=0.0),
        own,
    ],
)
def test_weights_are_those_of_keras(loss: Any) -> None:
    """sum(weight * loss) / examples: `keras.losses.Loss` with its default reduction."""
    model = ps.torch.Model(lambda: torch.nn.Linear(4, 3), loss)
    model.seed(3)
    assert model.weighted
    values = model.initial_variables()
    found, gradients = model.loss_and_gradients(values, Batch(0, 0, np.arange(8), X, Y, W), np)
    weight, bias = (torch.from_numpy(values[name].copy()).requires_grad_() for name in ("weight", "bias"))
    each = functional.cross_entropy(torch.from_numpy(X) @ weight.T + bias, torch.from_numpy(Y), reduction="none")
    due = (each * torch.from_numpy(W)).sum() / 8
    due.backward()
    assert found == pytest.approx(due.item(), rel=1e-6)
    np.testing.assert_allclose(gradients["weight"], weight.grad.numpy(), rtol=1e-5, atol=1e-7)
    assert model.evaluate(values, Batch(-1, -1, np.arange(8), X, Y, W), np)["loss"] == pytest.approx(found)


def test_a_loss_of_several_numbers_an_example_is_weighed_by_example() -> None:
    model = ps.torch.Model(lambda: torch.nn.Linear(4, 2), torch.nn.MSELoss())
    model.seed(0)
    values, targets = model.initial_variables(), X[:, :2]
    found, _ = model.loss_and_gradients(values, Batch(0, 0, np.arange(8), X, targets, W), np)
    outputs = model.predict(values, X)
    assert found == pytest.approx((((outputs - targets) ** 2).mean(1) * W).mean(), rel=1e-5)


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, targets: outputs.mean(),
        torch.nn.CrossEntropyLoss(weight=torch.ones(3)),
        functools.partial(functional.cross_entropy, weight=torch.ones(3)),
        torch.nn.CrossEntropyLoss(reduction="sum"),
    ],
)
def test_a_loss_that_takes_no_weights_is_refused_before_anything_is_started(loss: Any) -> None:
    trainer = ps.Trainer(ps.torch.Model(lambda: torch.nn.Linear(4, 3), loss))
    for call in (lambda: trainer.evaluate((X, Y, W)), lambda: trainer.fit((X, Y), class_weight={0: 2.0})):
        with pytest.raises(ConfigurationError, match="the model's loss takes none: give the loss of a Py"):
            call()


def test_weights_need_a_loss_of_each_example() -> None:
    def whole(outputs: Any, targets: Any, reduction: str = "mean") -> Any:
        return outputs.mean()

    model = ps.torch.Model(lambda: torch.nn.Linear(4, 3), whole)
    with pytest.raises(WrongModel, match=r"values of shape .* for 8 weighted examples"):
        model.loss_and_gradients(model.initial_variables(), Batch(0, 0, np.arange(8), X, Y, W), np)


def test_pieces_of_a_step_draw_other_numbers() -> None:
    model = ps.torch.Model(
        lambda: torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5)), functional.cross_entropy
    )
    model.seed(0)
    values = model.initial_variables()
    losses = {
        model.loss_and_gradients(values, Batch(0, 0, np.arange(8), X, Y, None, part), np)[0] for part in (0, 1, 1, 2)
    }
    assert len(losses) == 3


def test_jax_gets_trees_and_weights() -> None:
    jax = pytest.importorskip("jax", reason="NO TEST OF ps.jax: JAX is not installed; `make test-frameworks` has it")

    def loss(parameters: Any, inputs: Any, targets: Any, key: Any, sample_weight: Any = 1.0) -> Any:
        return (sample_weight * (apply(parameters, inputs)["y"] - targets["y"]) ** 2).mean()

    def apply(parameters: Any, inputs: Any) -> Any:
        return {"y": inputs["a"] @ parameters["w"] + inputs["b"]}

    model = ps.jax.Model(lambda key: {"w": jax.numpy.ones(4)}, loss, apply=apply)
    inputs, y = {"a": X, "b": W}, X.sum(1)
    values = model.initial_variables()
    found, gradients = model.loss_and_gradients(values, Batch(0, 0, np.arange(8), inputs, {"y": y}, W), np)
    assert found == pytest.approx(float((W * W**2).mean()), rel=1e-5)
    np.testing.assert_allclose(gradients["w"], (2 * W * W) @ X / 8, rtol=1e-4)
    assert model.evaluate(values, Batch(-1, -1, np.arange(8), inputs, {"y": y}, W), np)["loss"] == pytest.approx(found)
    trainer = ps.Trainer(model)
    np.testing.assert_allclose(trainer.predict(inputs, batch_size=3)["y"], y + W, rtol=1e-5)
    assert not ps.jax.Model(lambda key: {"w": jax.numpy.ones(4)}, lambda p, i, t, k: 0.0).weighted
    halves = take((jax.numpy.ones((4, 2), jax.numpy.bfloat16), jax.numpy.arange(4)), [1])
    assert [part.dtype for part in halves] == [np.float32, np.int64]


# --- pandas and Keras ---


def test_tables_of_pandas_are_arrays() -> None:
    pd = pytest.importorskip("pandas", reason="NO TEST OF pandas: it is not installed; `make test-frameworks` has it")
    table = pd.DataFrame({"age": [30, 40, 50], "paid": [1.5, 2.5, 3.5], "left": [True, False, True]})
    inputs, targets = take((table[["age", "paid"]], table["left"]), [2, 0])
    assert (inputs.dtype, inputs.tolist(), targets.tolist()) == (np.float32, [[50, 3.5], [30, 1.5]], [1, 1])
    named = indexed(table, "data", targets="left").take(np.array([2, 0]), 0)
    assert [part.tolist() for part in named] == [inputs.tolist(), targets.tolist()]
    several = take(({"age": table["age"], "rest": table[["paid", "left"]]}, table["left"]), [1])[0]
    assert [(name, array.dtype, array.tolist()) for name, array in leaves(several)] == [
        ("age", np.int64, [40]),
        ("rest", np.float32, [[2.5, 0]]),
    ]
    nullable = pd.DataFrame({"a": pd.array([1, 2, 3], dtype="Int64")})
    assert take((nullable, table["left"]), [0])[0].tolist() == [[1]]
    for frame, says in (
        (table.assign(city=["a", "b", "c"]), "column 'city' is str; allowed are numbers and booleans"),
        (table.assign(city=pd.Categorical(["a", "b", "c"])), "column 'city' is category"),
        (table.assign(day=pd.to_datetime(["2026-01-01"] * 3)), "column 'day' is datetime64"),
        (table.assign(age=[1.0, None, 2.0]), "data: inputs: column 'age' has no value in row 1"),
        (pd.DataFrame({"a": pd.array([1, None, 3], dtype="Int64")}), "column 'a' has no value in row 1"),
        (table.assign(age=[2**24, 2**24 + 1, 0]), "column 'age': the whole number 16777217 would lose its last digits"),
        (table.assign(age=[2.0**24, 2**24 + 1, 0]), "column 'age': the whole number 16777217 would lose its last"),
        (pd.DataFrame({"a": np.array([2**63, 1, 2], np.uint64)}), "column 'a': found the value 9223372036854775808"),
        (table.rename(columns={"age": "Unnamed: 0"}), "column 'Unnamed: 0' is an index that pandas wrote into a file"),
        (table[[]], "data: inputs have no columns"),
        (table[["age", "age"]], "column names must differ"),
    ):
        with pytest.raises(BadData) as refused:
            take((frame, table["left"]), [0])
        assert says in refused.value.message


def test_an_index_of_a_py_dataset_of_keras_is_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras", reason="NO TEST OF Keras' data: it is not installed")

    class Batches(keras.utils.PyDataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return X[index : index + 2], Y[index : index + 2], W[index : index + 2]

    class Shuffling(Batches):
        def on_epoch_end(self) -> None: ...

    source = source_of(Batches())
    assert (source.spec.batched, source.spec.examples) == (True, 3)
    assert [part.tolist() for part in source.examples(np.array([1]))] == [part[1:3].tolist() for part in (X, Y, W)]
    with pytest.raises(BadData, match="Shuffling has on_epoch_end"):
        source_of(Shuffling())
