"""PyTorch models: `parashard.torch.Model` makes one trainable by a `Trainer`.

Owns what of a module is a variable, the way of weights into it and of gradients out of it. The module's own parameters
are not used while it trains: each step computes with the pulled arrays in their place (`torch.func.functional_call`).
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from parashard.data.base import Array, Batch
from parashard.data.tree import map_leaves
from parashard.errors import ConfigurationError
from parashard.models.base import Initial
from parashard.models.framework import (
    ACCURACY,
    LOSS_SCALE,
    Computed,
    Metric,
    WrongModel,
    metrics_by_name,
    rows,
    step_seed,
    unscaled,
)
from parashard.models.state import FROZEN, checked_kind, initial_of, pushed_for, value_of
from parashard.models.weighted import weighted_loss
from parashard.plan.state import AVERAGE, COUNTER
from parashard.plan.variables import Float32s

try:
    import torch
except ImportError:
    raise ConfigurationError("ps.torch needs PyTorch: pip install 'parashard[torch]'") from None

Loss = Callable[[Any, Any], Any]

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}
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
        The mean over a batch, such as `torch.nn.functional.cross_entropy`. Where examples have weights it is
        sum(weight * loss) / examples: a loss of PyTorch with `reduction` gives that, and one with a parameter
        `sample_weight` gets the weights.
    metrics : sequence of str or callable (outputs, targets) -> number
        What evaluations tell besides the loss: "accuracy", or functions that are means over a batch.
    state : mapping of str to str
        Buffers that the module changes in training, and how: "average:M" for a running average, "counter" for whole
        numbers, "sum" in `sync:N`. Those of batch and instance normalisation need not be named.
    autocast : {"bfloat16", "float16"}, optional
        Compute module and loss under `torch.autocast` of this type; parameters stay in theirs.

    Notes
    -----
    The module is called with the inputs: with one tensor, with the tensors of a tuple or list one after the other, with
    those of a dict by their names. Targets go to the loss as they were given.

    Variables are the parameters by their names in `named_parameters`, and the floating buffers; they travel as float32
    whatever the module computes in, a scalar as one row. Running statistics of normalisation are averaged on the
    shards: a step pushes its batch's. Other buffers are frozen; a module that changes one is refused. A parameter that
    a step does not use has a gradient of zeros, where PyTorch's optimizers would skip it. Before each step PyTorch's
    generators are seeded with the job's seed and the step, so that dropout is the same wherever the step is computed.
    With float16, autocast or parameters, the loss is multiplied by 2^15 and gradients are divided by it; a step whose
    gradients overflow is computed again with half of that. A module of `torch.compile` has the names of the original.
    """

    def __init__(
        self,
        module: Any,
        loss: Loss,
        metrics: Sequence[Metric] = (),
        *,
        state: Mapping[str, str] | None = None,
        autocast: str | None = None,
    ) -> None:
        if not callable(module):
            raise ConfigurationError(
                f"module is a torch.nn.Module, its class or a factory, found {type(module).__name__}"
            )
        if not callable(loss) or isinstance(loss, type):
            found = f"the class {loss.__name__}" if isinstance(loss, type) else type(loss).__name__
            raise ConfigurationError(
                "loss is a function of outputs and targets, or an object such as torch.nn.CrossEntropyLoss(), found "
                f"{found}"
            )
        if autocast is not None and autocast not in AUTOCAST:
            raise ConfigurationError(f"autocast is {' or '.join(AUTOCAST)}, found {autocast!r}")
        self._given = module
        self._autocast = AUTOCAST[autocast] if autocast is not None else None
        self._scale = 1.0
        self._loss = loss
        self._weighted = weighted_loss(loss)
        self._metrics = metrics_by_name(metrics, {ACCURACY: accuracy})
        self._seed = 0
        self._module: torch.nn.Module | None = None
        self._state_kinds = dict(state or {})
        self._kinds: dict[str, str] = {}
        self._own: dict[str, torch.Tensor] = {}
        self._full: dict[str, str] = {}  # the module's own names by ours
        self._dtype: torch.dtype | None = None

    @property
    def weighted(self) -> bool:
        """Whether the loss takes weights of examples."""
        return self._weighted is not None

    def seed(self, seed: int) -> None:
        """Begin with what this seed makes of the module; an instance keeps its weights."""
        if seed != self._seed and not isinstance(self._given, torch.nn.Module):
            self._module = None
        self._seed = seed
        self._ready()

    def fixed_sha256(self) -> str:
        """Return SHA-256 (hex) of the buffers that are no variables, such as a permutation of whole numbers."""
        digest = hashlib.sha256()
        for name, buffer in _named(self._ready().named_buffers()).items():
            if name not in self._own:
                digest.update(f"{name}\0{buffer.dtype}\0{tuple(buffer.shape)}\0".encode())
                digest.update(np.ascontiguousarray(buffer.detach().cpu().numpy()).tobytes())
        return digest.hexdigest()

    def parameter_names(self) -> dict[int, str]:
        """Return the names of the parameters of a module that was given as an instance, by their `id`."""
        given = self._given
        return {id(own): name for name, own in given.named_parameters()} if isinstance(given, torch.nn.Module) else {}

    def initial_variables(self) -> Mapping[str, Initial]:
        """Return parameters and buffers with their first values, as float32."""
        tensors = self._tensors()
        return {name: initial_of(name, _array(tensor), self._kinds[name]) for name, tensor in tensors.items()}

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float | Array, Mapping[str, Array | None]]:
        """Return the loss of a batch and its gradients, as `parashard.models.base.Model` says."""
        self._ready()
        return unscaled(lambda scale: self._computed(variables, batch, xp, scale), self._scale, xp)

    def _computed(self, variables: Mapping[str, Array], batch: Batch, xp: Any, scale: float) -> Computed:
        module = self._ready()
        module.train()
        pulled = self._pulled(variables)
        _seed_generators(step_seed("torch", self._seed, batch.step, batch.part))
        trained = {name: tensor.requires_grad_() for name, tensor in pulled.items() if not self._kinds[name]}
        # Batch normalisation writes its statistics without telling autograd's version counters: into copies, then.
        state = {name: tensor.clone() for name, tensor in pulled.items() if name not in trained}
        constants = {name: b for name, b in _named(module.named_buffers()).items() if name not in pulled}
        versions = {name: tensor._version for name, tensor in {**trained, **constants}.items()}
        tensors = {**trained, **state}
        inputs, targets = self._trees(batch.inputs), self._trees(batch.targets)
        with self._precision(tensors):
            outputs = self._called(module, tensors, inputs)
            loss = self._loss_of(outputs, targets, batch.weights)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise WrongModel(f"the loss must be a tensor of one number, the mean over a batch; found {shape}")
        written = [name for name, tensor in trained.items() if tensor._version != versions[name]]
        if written:
            raise WrongModel(f"parameter {written[0]!r} is written in place while a step is computed")
        now = _named(module.named_buffers())
        written = [name for name, b in constants.items() if now[name] is not b or b._version != versions[name]]
        frozen = [name for name in state if self._kinds[name] == FROZEN]
        written += [name for name in frozen if not torch.equal(tensors[name], pulled[name])]
        if written:
            raise WrongModel(
                f"{written[0]!r} is written while a step is computed, and has no gradient to push; say how it changes: "
                f"state={{{written[0]!r}: 'average:0.1'}} for a running average, 'counter' for whole numbers, 'sum'"
            )
        whole = loss.reshape(()) if scale == 1 else loss.reshape(()).float() * scale
        found = torch.autograd.grad(whole, list(trained.values()), allow_unused=True)
        gradients = {
            name: None if g is None else rows(_gradient(g, xp, scale)) for name, g in zip(trained, found, strict=True)
        }
        for name in state.keys() - frozen:
            before, after = _array(pulled[name]), _array(tensors[name])
            gradients[name] = xp.asarray(pushed_for(self._kinds[name], before, after))
        return float(loss.detach()), gradients

    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, float]:
        """Return the loss and the metrics, means over the batch."""
        with torch.no_grad():
            outputs = self._outputs(variables, batch.inputs)
            targets = self._trees(batch.targets)
            with self._precision(self._own):
                values = {"loss": self._loss_of(outputs, targets, batch.weights)}
            values |= {name: metric(outputs, targets) for name, metric in self._metrics.items()}
        return {name: float(value) for name, value in values.items()}

    def predict(self, values: Mapping[str, Float32s], inputs: Any) -> Any:
        """Return the outputs as NumPy arrays, in the form in which the module returns them."""
        with torch.no_grad():
            return map_leaves(_output, self._outputs(values, inputs))

    def own(self, values: Mapping[str, Float32s]) -> torch.nn.Module:
        """Return a copy of the module with these weights in it."""
        module = copy.deepcopy(self._ready())
        with torch.no_grad():
            for name, tensor in _tensors(module, self._kinds).items():
                tensor.copy_(_tensor(value_of(values[name], self._kinds[name])).reshape(tensor.shape))
        return module.eval()

    def _outputs(self, variables: Mapping[str, Array], inputs: Any) -> Any:
        module = self._ready()
        module.eval()
        tensors = self._pulled(variables)
        with self._precision(tensors):
            return self._called(module, tensors, self._trees(inputs))

    def _called(self, module: torch.nn.Module, tensors: dict[str, torch.Tensor], inputs: Any) -> Any:
        """Call the module with these tensors in it; those that it set anew are in `tensors` then.

        The tensors of a dict are given by their names, those of a tuple or list one after the other.
        """
        own = {self._full[name]: tensor for name, tensor in tensors.items()}
        if isinstance(inputs, dict):
            outputs = torch.func.functional_call(module, own, (), inputs)
        else:
            several = isinstance(inputs, tuple | list)
            outputs = torch.func.functional_call(module, own, tuple(inputs) if several else (inputs,))
        tensors.update((_plain(name), tensor) for name, tensor in own.items())
        return outputs

    def _loss_of(self, outputs: Any, targets: Any, weights: Any) -> Any:
        if weights is None:
            return self._loss(outputs, targets)
        assert self._weighted is not None  # a trainer has asked
        return self._weighted(outputs, targets, _tensor(weights))

    def _precision(self, tensors: Mapping[str, torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        """Return the context that module and loss are computed in, where these tensors are."""
        if self._autocast is None:
            return contextlib.nullcontext()
        device = next(iter(tensors.values())).device.type
        return torch.autocast(device, self._autocast)  # type: ignore[no-any-return]

    def _pulled(self, variables: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Return the module's tensors as views of pulled arrays, converted where the module has another type."""
        return {
            name: _tensor(value_of(variables[name], self._kinds[name])).reshape(tensor.shape).to(tensor.dtype).detach()
            for name, tensor in self._tensors().items()
        }

    def _tensors(self) -> dict[str, torch.Tensor]:
        self._ready()
        return self._own

    def _trees(self, given: Any) -> Any:
        return map_leaves(self._data, given)

    def _data(self, array: Any) -> torch.Tensor:
        """Return inputs or targets as a tensor; floating ones in the type of the module, where all of it has one."""
        tensor = _tensor(array)
        return tensor.to(self._dtype) if tensor.is_floating_point() and self._dtype is not None else tensor

    def _ready(self) -> torch.nn.Module:
        if self._module is None:
            self._module = self._built()
            self._kinds = kinds_of(self._module, self._state_kinds)  # once, not in each step
            self._own = _tensors(self._module, self._kinds)
            every = [*self._module.named_parameters(), *self._module.named_buffers()]
            self._full = {_plain(name): name for name, _ in every}
            half = any(parameter.dtype == torch.float16 for parameter in self._module.parameters())
            self._scale = LOSS_SCALE if half or self._autocast == torch.float16 else 1.0
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
        for name, tensor in _named([*module.named_parameters(), *module.named_buffers()]).items():
            if torch.nn.parameter.is_lazy(tensor):
                raise ConfigurationError(
                    f"{name!r} of a lazy layer has no shape yet: call the module once on an example before it is given"
                )
        for name, parameter in module.named_parameters():
            if parameter.dtype not in FLOATING:
                raise ConfigurationError(f"parameter {name!r} is {parameter.dtype}; allowed: real floating point")
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigurationError(f"{type(module).__name__} has no parameter that needs a gradient")
        return module


def kinds_of(module: torch.nn.Module, declared: Mapping[str, str]) -> dict[str, str]:
    """Return what each parameter and buffer is: "" with a gradient, "frozen", or a kind of state; without constants.

    Raises
    ------
    ConfigurationError
        If a buffer that is declared does not exist, or cannot be what it is declared; or if a running average has no
        fixed factor.
    """
    parameters, buffers = _named(module.named_parameters()), _named(module.named_buffers())
    kinds = {name: "" if parameter.requires_grad else FROZEN for name, parameter in parameters.items()}
    kinds |= {name: FROZEN for name, buffer in buffers.items() if buffer.is_floating_point()}
    for prefix, layer in module.named_modules():
        if isinstance(layer, torch.nn.modules.batchnorm._NormBase) and layer.running_mean is not None:
            within = _plain(f"{prefix}." if prefix else "")
            if layer.momentum is None:
                raise ConfigurationError(
                    f"{within}momentum is None: an average over all batches, each with a weight of its own; allowed: a "
                    "number, such as 0.1"
                )
            average = f"{AVERAGE}:{layer.momentum}" if layer.momentum else FROZEN
            kinds |= {f"{within}running_mean": average, f"{within}running_var": average}
            kinds[f"{within}num_batches_tracked"] = COUNTER
    for name, kind in declared.items():
        if name not in buffers:
            raise ConfigurationError(f"state: {name!r} is none of the buffers: {', '.join(buffers) or 'none'}")
        kinds[name] = checked_kind(name, kind, _array(buffers[name]).dtype)
    return kinds


def _tensors(module: torch.nn.Module, kinds: Mapping[str, str]) -> dict[str, torch.Tensor]:
    found = _named([*module.named_parameters(), *module.named_buffers()])
    return {name: tensor for name, tensor in found.items() if name in kinds}


def _named(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {_plain(name): tensor for name, tensor in tensors}


def _plain(name: str) -> str:
    """Return a name without what `torch.compile` puts before it."""
    return name.replace("_orig_mod.", "")


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


def _output(value: Any) -> np.ndarray[Any, Any]:
    if not isinstance(value, torch.Tensor):
        raise ConfigurationError(f"predict needs a module that returns tensors, found {type(value).__name__}")
    return _array(value)


def _gradient(gradient: torch.Tensor, xp: Any, scale: float = 1.0) -> Array:
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    gradient = gradient.detach().float()
    gradient = gradient if scale == 1 else gradient / scale
    return gradient.numpy() if xp is np else xp.from_dlpack(gradient)
