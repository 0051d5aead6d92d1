"""A token model on a padded DataLoader, on a real cluster: rounds give the same bits for any number of workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from support.script_run import ScriptRun

pytest.importorskip("torch", reason="NO TEST OF ps.torch: PyTorch is not installed; `make test-frameworks` has it")
pytestmark = [pytest.mark.xdist_group("frameworks"), pytest.mark.timeout(600)]

TOKENS = """
import json, random, sys
import torch
import parashard as ps
from torch.utils.data import DataLoader, Dataset

class Texts(Dataset):  # the class of a text is its first word; the words after it are drawn anew each time
    def __len__(self):
        return 90

    def __getitem__(self, i):
        words = [i % 3, *(random.randrange(3, 9) for _ in range(i % 4))]
        return torch.tensor(words), i % 3

def padded(items):
    ids = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in items], batch_first=True, padding_value=9)
    return {"ids": ids, "mask": ids != 9}, torch.tensor([label for _, label in items])

class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = torch.nn.Embedding(10, 8), torch.nn.Linear(8, 3)

    def forward(self, ids, mask):
        return self.out((self.words(ids) * mask[..., None]).sum(1))

workers, consistency = sys.argv[1:]
loader = DataLoader(Texts(), batch_size=5, shuffle=True, collate_fn=padded)
model = ps.torch.Model(Tagger, torch.nn.functional.cross_entropy, metrics=["accuracy"])
strategy = ps.ParameterServerStrategy(shards=2, workers=int(workers), consistency=consistency)
trainer = ps.Trainer(model, ps.Adam(0.05), strategy)
history = trainer.fit(loader, epochs=3, validation_data=loader, class_weight={0: 2.0}, verbose=0)
history = trainer.fit(loader, epochs=6, initial_epoch=3, validation_data=loader, class_weight={0: 2.0}, verbose=0)
shape = list(trainer.predict(loader).shape)
print(json.dumps([history.report["weights_sha256"], trainer.evaluate(loader)["accuracy"], shape]))
"""


def told(run: ScriptRun) -> Any:
    assert run.wait() == 0, run.complaint()
    return json.loads(run.output().splitlines()[-1])


@pytest.mark.full("test_torch_state.py has the same bits for any number of workers, test_script_data.py such data")
def test_padded_texts_that_draw_give_the_same_bits_for_any_number_of_workers(start: Callable[..., ScriptRun]) -> None:
    digest, accuracy, shape = told(start(TOKENS, "1", "sync:3"))
    assert (accuracy, shape) == (1.0, [90, 3])
    assert told(start(TOKENS, "2", "sync:3"))[0] == digest
