"""PyTorch models: `parashard.torch.Model` makes one trainable by a `Trainer`.

Owns what of a module is a variable, the way of weights into it and of gradients out of it. The module's own parameters
are not used while it trains: each step computes with the pulled arrays in their place (`torch.func.functional_call`).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from parashard.data.base import Array, Batch
from parashard.errors import ConfigurationError
from parashard.models.framework import ACCURACY, Metric, WrongModel, metrics_by_name, rows, step_seed
from parashard.plan.variables import Float32s

try:
    import torch
except ImportError:
    raise ConfigurationError("ps.torch needs PyTorch: pip install 'parashard[torch]'") from None

Loss = Callable[[Any, Any], Any]

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the fraction of examples whose greatest output is the target's; one output a class on the last axis."""
    return (outputs.argmax(-1) == targets).float().mean()


class Model:
    """A PyTorch module with a loss.

    Parameters
    ----------
    module : Module, class or callable
        The module, or what makes it without arguments: a class or factory is called after PyTorch's generators were
        seeded with the trainer's seed, an instance begins with the weights that it has.
    loss : callable (outputs, targets) -> tensor of one number
        The mean over a batch, such as `torch.nn.functional.cross_entropy`.
    metrics : sequence of str or callable (outputs, targets) -> number
        What evaluations tell besides the loss: "accuracy", or functions that are means over a batch.

    Notes
    -----
    Variables are the parameters by their names in `named_parameters`, and the floating buffers, which are not trained;
    they travel as float32 whatever the module computes in, a scalar as one row. A module that changes a buffer in
    training, such as batch normalisation, is refused: its statistics have no gradient to push. A parameter that
    a step does not use has a gradient of zeros, where PyTorch's optimizers would skip it. Before each step PyTorch's
    generators are seeded with the job's seed and the step, so that dropout is the same wherever the step is computed.
    """

    def __init__(self, module: Any, loss: Loss, metrics: Sequence[Metric] = ()) -> None:
        if not callable(module):
            raise ConfigurationError(
                f"module is a torch.nn.Module, its class or a factory, found {type(module).__name__}"
            )
        if not callable(loss):
            raise ConfigurationError(f"loss is a function of outputs and targets, found {type(loss).__name__}")
        self._given = module
        self._loss = loss
        self._metrics = metrics_by_name(metrics, {ACCURACY: accuracy})
        self._seed = 0
        self._module: torch.nn.Module | None = None
        self._own: dict[str, torch.Tensor] = {}
        self._dtype: torch.dtype | None = None

    def seed(self, seed: int) -> None:
        """Begin with what this seed makes of the module; an instance keeps its weights."""
        if seed != self._seed and not isinstance(self._given, torch.nn.Module):
            self._module = None
        self._seed = seed
        self._ready()

    def fixed_sha256(self) -> str:
        """Return SHA-256 (hex) of the buffers that are no variables, such as a permutation of whole numbers."""
        digest = hashlib.sha256()
        for name, buffer in self._ready().named_buffers():
            if not buffer.is_floating_point():
                digest.update(f"{name}\0{buffer.dtype}\0{tuple(buffer.shape)}\0".encode())
                digest.update(np.ascontiguousarray(buffer.detach().cpu().numpy()).tobytes())
        return digest.hexdigest()

    def frozen(self) -> list[str]:
        """Return the names of parameters that need no gradient, and of buffers."""
        return [name for name, tensor in self._tensors().items() if not tensor.requires_grad]

    def initial_variables(self) -> Mapping[str, Float32s]:
        """Return parameters and floating buffers as float32."""
        return {name: rows(_array(tensor)) for name, tensor in self._tensors().items()}

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float | Array, Mapping[str, Array | None]]:
        """Return the loss of a batch and its gradients, as `parashard.models.base.Model` says."""
        module = self._ready()
        module.train()
        state, own = self._state(variables), self._tensors()
        _seed_generators(step_seed("torch", self._seed, batch.step))
        trained = {name: tensor.requires_grad_() for name, tensor in state.items() if own[name].requires_grad}
        # Batch normalisation writes its statistics without telling autograd's version counters: into copies, then.
        fixed = {name: tensor.clone() for name, tensor in state.items() if name not in trained}
        versions = {name: tensor._version for name, tensor in trained.items()}
        outputs = torch.func.functional_call(module, {**trained, **fixed}, (self._data(batch.inputs),))
        loss = self._loss(outputs, self._data(batch.targets))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise WrongModel(f"the loss must be a tensor of one number, the mean over a batch; found {shape}")
        written = [name for name, tensor in trained.items() if tensor._version != versions[name]]
        written += [name for name, tensor in fixed.items() if not torch.equal(tensor, state[name])]
        if written:
            raise WrongModel(
                f"{written[0]!r} is written in place while a step is computed: such state has no gradient to push, and "
                "is not supported yet; normalisation without it is LayerNorm or GroupNorm"
            )
        found = torch.autograd.grad(loss.reshape(()), list(trained.values()), allow_unused=True)
        gradients = {
            name: None if g is None else rows(_gradient(g, xp)) for name, g in zip(trained, found, strict=True)
        }
        return float(loss.detach()), gradients

    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, float]:
        """Return the loss and the metrics, means over the batch."""
        with torch.no_grad():
            outputs = self._outputs(variables, batch.inputs)
            targets = self._data(batch.targets)
            values = {"loss": self._loss(outputs, targets)}
            values |= {name: metric(outputs, targets) for name, metric in self._metrics.items()}
        return {name: float(value) for name, value in values.items()}

    def predict(self, values: Mapping[str, Float32s], inputs: Any) -> Any:
        """Return the outputs as a NumPy array."""
        with torch.no_grad():
            return _array(self._outputs(values, inputs))

    def own(self, values: Mapping[str, Float32s]) -> torch.nn.Module:
        """Return a copy of the module with these weights in it."""
        module = copy.deepcopy(self._ready())
        with torch.no_grad():
            for name, tensor in _tensors(module).items():
                tensor.copy_(_tensor(values[name]).reshape(tensor.shape))
        return module.eval()

    def _outputs(self, variables: Mapping[str, Array], inputs: Any) -> Any:
        module = self._ready()
        module.eval()
        return torch.func.functional_call(module, self._state(variables), (self._data(inputs),))

    def _state(self, variables: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Return the module's tensors as views of pulled arrays, converted where the module has another type."""
        return {
            name: _tensor(variables[name]).reshape(tensor.shape).to(tensor.dtype).detach()
            for name, tensor in self._tensors().items()
        }

    def _tensors(self) -> dict[str, torch.Tensor]:
        self._ready()
        return self._own

    def _data(self, array: Any) -> torch.Tensor:
        """Return inputs or targets as a tensor; floating ones in the type of the module, where all of it has one."""
        tensor = _tensor(array)
        return tensor.to(self._dtype) if tensor.is_floating_point() and self._dtype is not None else tensor

    def _ready(self) -> torch.nn.Module:
        if self._module is None:
            self._module = self._built()
            self._own = _tensors(self._module)  # once, not in each step
            types = {parameter.dtype for parameter in self._module.parameters()}
            self._dtype = types.pop() if len(types) == 1 else None
        return self._module

    def _built(self) -> torch.nn.Module:
        module = self._given
        if not isinstance(module, torch.nn.Module):
            with torch.random.fork_rng(devices=[]):  # the user's own draws go on as if nothing had been drawn
                torch.manual_seed(self._seed)
                module = module()
        if not isinstance(module, torch.nn.Module):
            raise ConfigurationError(f"module() returned {type(module).__name__}; due is a torch.nn.Module")
        for name, parameter in module.named_parameters():
            if parameter.dtype not in FLOATING:
                raise ConfigurationError(f"parameter {name!r} is {parameter.dtype}; allowed: real floating point")
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigurationError(f"{type(module).__name__} has no parameter that needs a gradient")
        return module


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    buffers = {name: buffer for name, buffer in module.named_buffers() if buffer.is_floating_point()}
    return {**dict(module.named_parameters()), **buffers}


def _seed_generators(seed: int) -> None:
    """Seed the default generators that a step can draw from.

    `torch.manual_seed` also notes the seed, with a traceback, for devices that are not in use: a millisecond each time.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def _tensor(array: Any) -> torch.Tensor:
    """Return a tensor that shares an array's memory, or that of a copy if the array may not be written."""
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    return torch.as_tensor(array)  # CuPy's, by __cuda_array_interface__


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a NumPy array of a tensor's values, floating ones as float32."""
    values = tensor.detach().cpu()
    return np.array((values.float() if values.is_floating_point() else values).numpy())


def _gradient(gradient: torch.Tensor, xp: Any) -> Array:
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    gradient = gradient.detach().float()
    return gradient.numpy() if xp is np else xp.from_dlpack(gradient)
