"""What leaves a PyTorch trainer: files of weights that its module loads, traces, and tables as dense embeddings."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.errors import ConfigurationError

torch: Any = pytest.importorskip(
    "torch", reason="NO TEST OF ps.torch: PyTorch is not installed; `make test-frameworks` has it"
)
nn = torch.nn
from safetensors.torch import load_file  # noqa: E402  # needs PyTorch

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.arange(8) % 4


class Net(nn.Module):  # type: ignore[misc]
    """Has one of each kind of tensor that is no plain variable."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.b.weight = self.a.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.rough = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.register_buffer("table", torch.arange(3))
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: Any) -> Any:
        return self.b(self.norm(self.a(x))) * self.scale * self.rough.float()


def test_a_run_s_weights_load_into_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = ps.Trainer(ps.torch.Model(Net, nn.functional.cross_entropy), ps.SGD(0.1), ps.OneDeviceStrategy())
    for _ in range(2):  # the second goes on from the first's
        history = trainer.fit((X, Y), batch_size=8, epochs=2, verbose=0)
        net, due = Net(), trainer.model()
        assert net.load_state_dict(load_file(history.run_dir / "weights.safetensors")).missing_keys == []
        for name, tensor in due.state_dict().items():
            found = net.state_dict()[name]
            assert (found.dtype, found.shape, torch.equal(found, tensor)) == (tensor.dtype, tensor.shape, True), name
    assert due.norm.num_batches_tracked == 4
    assert not torch.equal(Net().a.weight, due.a.weight)


def test_one_file_has_the_weights_of_a_module_of_plain_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = ps.Trainer(
        ps.torch.Model(lambda: nn.Linear(4, 4), nn.functional.cross_entropy), ps.SGD(0.1), ps.OneDeviceStrategy()
    )
    history = trainer.fit((X, Y), batch_size=8, verbose=0)
    assert [path.name for path in history.run_dir.glob("*.safetensors")] == ["weights.safetensors"]


USERS, WORDS = ps.Table("users", 3, scale=0.5), ps.Table("words", 3, scale=0.5)
USER, WORD = np.array([7, 10**15, 3, 7, -(2**40), 3, 8, 9]), np.array([[5, -1, 6], [6, -1, -1]] * 4)


class Looking(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.user, self.friend = ps.torch.Embedding(USERS), ps.torch.Embedding(USERS)
        self.words = ps.torch.EmbeddingBag(WORDS, "mean", padding_key=-1)
        self.out = nn.Linear(3, 4)

    def forward(self, user: Any, words: Any) -> Any:
        return self.out(self.user(user) + self.friend(user.flip(0)) + self.words(words))


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    keys = lambda user, words: {"users": user, "words": words}  # noqa: E731
    model = ps.torch.Model(Looking, nn.functional.cross_entropy, keys=lambda inputs: keys(*inputs))
    trainer = ps.Trainer(model, ps.SGD(0.5), ps.OneDeviceStrategy())
    trainer.fit(((USER, WORD), Y), batch_size=4, epochs=2, verbose=0)
    return trainer.model()


@pytest.mark.parametrize("trace", [torch.jit.trace, torch.export.export])
def test_a_trace_of_tables_is_refused(trace: Callable[..., Any], net: Any) -> None:
    given = torch.from_numpy(USER), torch.from_numpy(WORD)
    with pytest.raises(ConfigurationError, match=r"a trace would keep the rows of table 'users' .*ps.torch.exportable"):
        trace(net, given)


def test_tables_become_embeddings_by_place(net: Any) -> None:
    module, vocabularies = ps.torch.exportable(net)
    assert (type(module.user), type(module.words)) == (nn.Embedding, nn.EmbeddingBag)
    assert module.user.weight is module.friend.weight
    assert isinstance(net.user, ps.torch.Embedding), "a copy"
    assert vocabularies["users"].keys.tolist() == sorted({*USER.tolist()})

    def places(user: Any, word: Any) -> Any:
        return tuple(
            torch.from_numpy(vocabularies[name].places(ids)) for name, ids in (("users", user), ("words", word))
        )

    traced = torch.jit.trace(module, places(USER, WORD))
    written = io.BytesIO()
    torch.jit.save(traced, written)
    again = torch.jit.load(io.BytesIO(written.getvalue()))
    other = USER[::-1].copy(), WORD[::-1].copy()
    due = net(*map(torch.from_numpy, other))
    for one in (module, traced, again, torch.export.export(module, places(USER, WORD)).module()):
        torch.testing.assert_close(one(*places(*other)), due)
    assert vocabularies["users"].places([[3, 4]]).tolist() == [[1, len(vocabularies["users"].keys)]]
    assert not module.user(torch.tensor(len(vocabularies["users"].keys))).any(), "zeros"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (nn.Linear(2, 2), "is for a module with ps.torch.Embedding or ps.torch.EmbeddingBag"),
        (Looking(), "the module has no rows of table 'users': give ps.torch.exportable what trainer.model"),
    ],
)
def test_others_have_nothing_to_export(given: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        ps.torch.exportable(given)
