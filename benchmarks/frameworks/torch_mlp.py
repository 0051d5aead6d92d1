"""The MLP in PyTorch."""

from __future__ import annotations

import torch

import parashard as ps
from benchmarks.frameworks.mnist import CLASSES, EPOCHS, HIDDEN, LEARNING_RATE, PIXELS, batches

cross_entropy = torch.nn.functional.cross_entropy


def net():
    """Return the module."""
    return torch.nn.Sequential(torch.nn.Linear(PIXELS, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES))


def model():
    """Return the model for a trainer."""
    return ps.torch.Model(net, cross_entropy, metrics=["accuracy"])


def gradients(values, x, y):
    """Return the gradients of a batch, as PyTorch alone computes them."""
    module = net()
    module.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()})
    cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y)).backward()
    return {name: parameter.grad.numpy() for name, parameter in module.named_parameters()}


def alone(training, held_out, seed):
    """Return the held-out accuracy of a plain loop."""
    torch.manual_seed(seed)
    module = net()
    optimizer = torch.optim.Adam(module.parameters(), LEARNING_RATE)
    x, y = (torch.from_numpy(array) for array in training)
    for epoch in range(EPOCHS):
        for some in batches(len(y), seed, epoch):
            optimizer.zero_grad()
            cross_entropy(module(x[some]), y[some]).backward()
            optimizer.step()
    with torch.no_grad():
        return (module(torch.from_numpy(held_out[0])).argmax(1).numpy() == held_out[1]).mean()
