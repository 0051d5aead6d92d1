"""A small transformer that writes like Python's own manual, one character after the other: needs the extra `torch`.

    python examples/characters_torch.py [--workers 4] [--epochs 5] [--text FILE]

The text is what `help()` shows, which comes with Python: no download.
"""

import argparse
import json
from pathlib import Path

import torch
from torch.nn import functional

import parashard as ps

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--text", type=Path)
parser.add_argument("--characters", type=int, default=300_000)
options = parser.parse_args()

CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 2


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)])
        self.attention = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.mixed = torch.nn.Linear(WIDTH, WIDTH)
        layers = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        self.dense = torch.nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.attention(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.mixed(attended.transpose(1, 2).flatten(2))
        return x + self.dense(self.norms[1](x))


class Transformer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters = torch.nn.Embedding(len(alphabet), WIDTH)
        torch.nn.init.normal_(self.characters.weight, std=0.02)
        self.places = torch.nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.characters(ids) + self.places[: ids.shape[1]])
        return self.norm(x) @ self.characters.weight.T  # the same table reads and writes


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def manual() -> str:
    from pydoc_data.topics import topics

    return "".join(topics.values())


text = (options.text.read_text() if options.text else manual())[: options.characters]
alphabet = sorted(set(text))
ids = torch.tensor([alphabet.index(character) for character in text])
rows = ids[: (len(ids) - 1) // CONTEXT * CONTEXT + 1]
x, y = rows[:-1].view(-1, CONTEXT), rows[1:].view(-1, CONTEXT)
held = len(x) // 10  # the end of the text is not trained on

model = ps.torch.Model(Transformer, loss)
strategy = ps.ParameterServerStrategy(shards=2, workers=options.workers)
trainer = ps.Trainer(model, ps.AdamW(3e-3, weight_decay=0.01), strategy)
trainer.fit((x[:-held], y[:-held]), epochs=options.epochs, batch_size=32, validation_data=(x[-held:], y[-held:]))

net, written = trainer.model(), [alphabet.index("T")]
generator = torch.Generator().manual_seed(0)
with torch.no_grad():
    for _ in range(200):
        probabilities = functional.softmax(net(torch.tensor([written[-CONTEXT:]]))[0, -1], -1)
        written.append(int(torch.multinomial(probabilities, 1, generator=generator)))
print("".join(alphabet[i] for i in written))
print(json.dumps(trainer.evaluate((x[-held:], y[-held:]))))
