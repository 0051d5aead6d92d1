"""PyTorch models: `parashard.torch.Model` makes one trainable by a `Trainer`.

Each step computes with the pulled arrays in place of the module's parameters, as `torch.func.functional_call` does.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from parashard.data.base import Array, Batch
from parashard.data.tree import map_leaves, rows_of
from parashard.errors import ConfigurationError, WrongModel
from parashard.models.base import HeldTable, Initial, OptimizerState
from parashard.models.evaluation import Given, MetricPart, added_up, metric_states, metrics_by_name
from parashard.models.framework import (
    FROZEN,
    LOSS_SCALE,
    Computed,
    Pairing,
    call_factory,
    initial_of,
    refuse_other_framework,
    step_seed,
    unscaled,
    value_of,
    weighted_loss,
)
from parashard.models.torch import optimizers
from parashard.models.torch.arrays import (
    AUTOCAST,
    array_of,
    on_host,
    output_of,
    seed_generators,
    stored,
    tensor_of,
    torch,
)
from parashard.models.torch.embeddings import (
    Embedding,
    EmbeddingBag,
    HeldRows,
    TorchRows,
    Vocabulary,
    check_module,
    exportable,
    look_ups_in,
    named_ids,
    use_rows,
)
from parashard.models.torch.losses import LossKind, LossSums, called, loss_kind
from parashard.models.torch.steps import DeviceTensors, HostTensors
from parashard.models.torch.variables import (
    Place,
    WriteDetector,
    check,
    compute_again,
    copied,
    kinds_of,
    named,
    places_of,
    plain_name,
    tensors_of,
    use_tensors,
)
from parashard.plan.embedding import EmbeddingTable, Keys
from parashard.plan.flat import GradientRun
from parashard.plan.optimizers import OptimizerSpec
from parashard.plan.variables import Float32s
from parashard.process.threads import holding_model_lock
from parashard.protocol.messages import NO_KEYS

__all__ = ["Embedding", "EmbeddingBag", "Model", "Vocabulary", "exportable"]

Loss = Callable[[Any, Any], Any]

BatchNorm = torch.nn.modules.batchnorm._BatchNorm


class Model:
    """A PyTorch module with a loss.

    Parameters
    ----------
    module : Module, class or callable
        The module, or a class or factory that takes no arguments. An instance starts from its current weights; a class
        or factory is called after PyTorch's generators are seeded with the trainer's seed.
    loss : callable (outputs, targets) -> tensor of one number
        The mean over a batch, such as `torch.nn.functional.cross_entropy`. If examples have weights, the loss is
        sum(weight * loss) / examples: computed here from a PyTorch loss with `reduction`; a loss with a parameter
        `sample_weight` receives the weights.
    metrics : sequence of str, Metric or callable (outputs, targets) -> numbers
        Reported by evaluations besides the loss: names such as "accuracy", metrics of `parashard.metrics`, or functions
        that return one number per example, or one number, the mean over a batch.
    state : mapping of str to str
        Buffers that the module changes in training, and how: "average:M" for a running average, "counter" for whole
        numbers, "sum" in `sync:N`. Buffers of batch and instance normalisation need not be named.
    autocast : {"bfloat16", "float16"}, optional
        Compute module and loss under `torch.autocast` of this type; parameters keep their type.
    keys : callable (inputs) -> mapping of str to tensor of whole numbers, optional
        For a module with `Embedding` or `EmbeddingBag`: returns the ids that a batch looks up, by table, in any shape.
        It must depend on the inputs alone and may be called in another thread: rows are pulled before the module is
        called.

    Notes
    -----
    The module is called with the inputs: one tensor, a tuple or list as positional arguments, a dict as keyword
    arguments. Targets are passed to the loss unchanged.

    Variables are the parameters, named as in `named_parameters`, and the floating-point buffers. They are transferred
    as float32 whatever the module computes in, a scalar as one row. The shards average running statistics of
    normalisation: each step pushes those of its batch. Other buffers are frozen; a module that changes one is refused.
    A parameter that a step does not use gets a gradient of zeros; PyTorch's optimizers would skip it. Before each step
    PyTorch's generators are seeded from the job's seed and the step, so that dropout does not depend on which worker
    computes the step. With float16 (autocast or parameters) the loss is multiplied by 2^15 and gradients are divided by
    it; a step whose gradients overflow is recomputed with the scale halved, down to 1. A module of `torch.compile` has
    the names of the original. Each worker thread of a process has its own module; they compute in turn, since PyTorch's
    generators are shared.
    """

    def __init__(
        self,
        module: Any,
        loss: Loss | None = None,
        metrics: Sequence[Given] = (),
        *,
        state: Mapping[str, str] | None = None,
        autocast: str | None = None,
        keys: Callable[[Any], Mapping[str, Any]] | None = None,
    ) -> None:
        refuse_other_framework(module, "torch")
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
        if keys is not None and not callable(keys):
            raise ConfigurationError(f"keys is a function of the inputs, found {type(keys).__name__}")
        self._given = module
        self.keys_function = keys
        self._look_ups: list[Any] = []  # submodules that look up rows
        self._autocast = AUTOCAST[autocast] if autocast is not None else None
        self._scale = 1.0
        self._loss = loss
        self._pairing = Pairing()
        self._weighted = weighted_loss(loss)
        self._loss_kind = loss_kind(loss)
        self.adds_losses = self._loss_kind is not None and self._loss_kind.adds
        self._metrics = metrics_by_name(metrics)
        self.added_metrics = added_up(self._metrics)
        self._step_metrics: Callable[[], Mapping[str, MetricPart]] = dict  # computes the last step's, until read
        self._seed = 0
        self._module: torch.nn.Module | None = None
        self._state_kinds = dict(state or {})
        self._kinds: dict[str, str] = {}
        self._own: dict[str, torch.Tensor] = {}
        self._on_device: DeviceTensors | None = None
        self._places: dict[str, list[Place]] = {}  # where each tensor is in the module; a tied one has several places
        self._modules: list[tuple[str, torch.nn.Module]] = []  # submodules, by the prefix of their tensors' names
        self._trains: list[tuple[torch.nn.Module, bool]] = []  # submodules, and whether each trains in a step
        self._kept_in_eval: set[str] = set()  # paths of submodules that the user set to evaluation
        self._has_looked_for_writes = False
        self._dtype: torch.dtype | None = None

    @property
    def weighted(self) -> bool:
        """Whether the loss accepts example weights."""
        return self._weighted is not None

    @property
    def tables(self) -> tuple[EmbeddingTable, ...]:
        """The tables whose rows the module looks up."""
        self._ready()
        return tuple(dict.fromkeys(module.table for module in self._look_ups))

    def keys(self, batch: Batch) -> Mapping[str, Array]:
        """Return the ids that a batch looks up, by table, without padding ids."""
        assert self.keys_function is not None, "only a model with tables is asked"
        inputs = map_leaves(tensor_of, batch.inputs)
        named: Mapping[str, Array] = named_ids(self.keys_function(inputs), self._look_ups)
        return named

    def seed(self, seed: int) -> None:
        """Initialise the module from this seed; an instance keeps its weights."""
        if seed != self._seed and not isinstance(self._given, torch.nn.Module):
            self._module = None
        self._seed = seed
        if self._module is None:
            self._ready()
        else:
            self._look_at(self._module)

    @property
    def normalises_batches(self) -> bool:
        """Whether the module has batch normalisation, which may fail on a batch of one example."""
        return any(isinstance(within, BatchNorm) for within in self._ready().modules())

    def loss_divisor(self, batch: Batch) -> str:
        """Return the loss' divisor in words, if it is not the number of examples; "": it is, or is unknown."""
        kind = self._kind_for(batch)
        return kind.differs(self._trees(batch.targets)) if kind is not None else ""

    def share(self, piece: Batch, whole: Batch) -> float:
        """Return the factor of a piece's loss in the loss of the whole batch."""
        if (kind := self._kind_for(whole)) is None:
            return rows_of(piece.inputs) / rows_of(whole.inputs)
        return kind.share(self._trees(piece.targets), self._trees(whole.targets))

    def counts_rows(self, piece: Batch) -> bool:
        """Tell whether a piece's share is its fraction of the examples, whatever the other pieces contain."""
        kind = self._kind_for(piece)
        return kind is None or kind.counts_rows(self._trees(piece.targets))

    def _kind_for(self, batch: Batch) -> LossKind | None:
        return self._loss_kind if batch.weights is None else None

    def for_thread(self) -> Model:
        """Return a model with a new or copied module; threads compute in turn, since generators are shared."""
        own, mine = copy.copy(self), self._ready()
        own._module = None
        made = own._ready() if not isinstance(self._given, torch.nn.Module) else mine
        if made is mine:  # an instance, or a factory that returns the same module each time
            own._module, own._given = None, copied(mine)
            own._ready()
        if own.config_sha256() != self.config_sha256():
            raise ConfigurationError(
                "the module is another one in each worker thread: a buffer of it is drawn without a seed"
            )
        return own

    def config_sha256(self) -> str:
        """Return the SHA-256 (hex) of the buffers that are not variables, such as an integer permutation."""
        digest = hashlib.sha256()
        for name, buffer in named(self._ready().named_buffers()).items():
            if name not in self._own:
                digest.update(f"{name}\0{buffer.dtype}\0{tuple(buffer.shape)}\0".encode())
                digest.update(np.ascontiguousarray(buffer.detach().cpu().numpy()).tobytes())
        return digest.hexdigest()

    def parameter_names(self) -> dict[int, str]:
        """Return parameter names by `id`; empty unless the module was given as an instance."""
        given = self._given
        return {id(own): name for name, own in given.named_parameters()} if isinstance(given, torch.nn.Module) else {}

    def initial_variables(self) -> Mapping[str, Initial]:
        """Return parameters and buffers with their initial values, as float32."""
        self._ready()
        return {name: initial_of(name, array_of(own), self._kinds[name]) for name, own in self._own.items()}

    @holding_model_lock()
    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float | Array, Mapping[str, Array | None]]:
        """Return the loss of a batch and its gradients, as `parashard.models.base.Model` specifies."""
        self._ready()
        return unscaled(lambda scale: self._computed(variables, batch, xp, scale), self._scale, xp)

    def _computed(self, variables: Mapping[str, Array], batch: Batch, xp: Any, scale: float) -> Computed:
        module = self._ready()
        self._train_mode(module)
        there = self._tensors_of(xp)
        pulled = there.pulled(variables)
        seed_generators(step_seed("torch", self._seed, batch.step, batch.part))
        trained = {name: tensor.requires_grad_() for name, tensor in pulled.items() if not self._kinds[name]}
        for name, tensor in trained.items():
            for hook in (self._own[name]._backward_hooks or {}).values():
                tensor.register_hook(hook)
        # Batch normalisation updates its statistics without autograd's version counters noticing: give it copies.
        state = there.copies({name: tensor for name, tensor in pulled.items() if name not in trained})
        constants = {name: b for name, b in self._buffers().items() if name not in pulled}
        tensors = {**trained, **state}
        frozen = {name: pulled[name] for name in state if self._kinds[name] == FROZEN}
        is_first, self._has_looked_for_writes = not self._has_looked_for_writes, True
        copies = None if xp is np or is_first else {name: state[name] for name in frozen}
        writes = WriteDetector(trained, constants, frozen, self._modules, is_first=is_first, copies=copies)
        inputs, targets = self._trees(batch.inputs), self._trees(batch.targets)
        looked_up = TorchRows(variables, batch.keys, self._dtype, trained=True)
        with self._precision(tensors):
            outputs = self._called(module, tensors, inputs, looked_up)
            loss = self._loss_of(outputs, targets, batch.weights)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise WrongModel(f"the loss must be a tensor of one number, the mean over a batch; found {shape}")
        if not loss.requires_grad:
            raise WrongModel(
                "the loss depends on no parameter: it is computed without them, or from detach(), item() or numpy()"
            )
        writes.check({**self._buffers(), **tensors} if constants else tensors)
        self._check_pairing(outputs, targets, loss.detach(), batch.weights)
        single = loss.reshape(()) if loss.ndim else loss
        whole = single if scale == 1 else single.float() * scale
        found = torch.autograd.grad(whole, [*trained.values(), *looked_up.leaves], allow_unused=True)
        of_trained = dict(zip(trained, found[: len(trained)], strict=True))
        gradients: Mapping[str, Array | None] = there.pushed(of_trained, tensors, scale)
        if batch.keys:
            of_rows = looked_up.gradients(found[len(trained) :], xp, scale)
            gradients = gradients.with_rows(of_rows) if isinstance(gradients, GradientRun) else {**gradients, **of_rows}
        kind = self._kind_for(batch)
        counted = targets if kind is None or batch.on_host is None else self._trees(batch.on_host.targets)
        loss_sums = None if kind is None else kind.sums_unless_mean(counted)
        self._step_metrics = dict
        if self.added_metrics or loss_sums is not None:
            kept = map_leaves(lambda value: value.detach() if isinstance(value, torch.Tensor) else value, outputs)
            self._step_metrics = partial(self._metrics_of, kept, targets, batch, single.detach(), loss_sums)
        return there.loss(single), gradients

    def _metrics_of(
        self, outputs: Any, targets: Any, batch: Batch, loss: torch.Tensor, loss_sums: LossSums | None
    ) -> dict[str, MetricPart]:
        """Return a step's metrics, and its loss if that is not a mean over the examples."""
        told: dict[str, MetricPart] = {} if loss_sums is None else {"loss": loss_sums(float(loss))}
        if self.added_metrics:
            with torch.no_grad():
                told |= metric_states(self.added_metrics, outputs, targets, rows_of(batch.inputs), on_host)
        return told

    def step_metrics(self) -> Mapping[str, MetricPart]:
        """Compute and return the states of the last step's metrics, once; waits for a GPU."""
        told, self._step_metrics = self._step_metrics, dict
        return told()

    @holding_model_lock()
    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, MetricPart]:
        """Return the loss (the mean over the batch, or its state) and the metrics' states."""
        with torch.no_grad():
            outputs = self._outputs(variables, batch.inputs, batch.keys, xp)
            targets = self._trees(batch.targets)
            with self._precision(self._own):
                loss = float(self._loss_of(outputs, targets, batch.weights))
            kind = self._kind_for(batch)
            told: MetricPart = loss if kind is None else kind.sums(loss, targets)
            return {"loss": told, **metric_states(self._metrics, outputs, targets, rows_of(batch.inputs), on_host)}

    @holding_model_lock()
    def predict(self, values: Mapping[str, Float32s], inputs: Any, keys: Mapping[str, Keys] = NO_KEYS) -> Any:
        """Return the outputs as NumPy arrays, structured as the module returns them.

        `values` includes the rows of `keys`.
        """
        with torch.no_grad():
            return map_leaves(output_of, self._outputs(values, inputs, keys, np))

    @holding_model_lock()
    def to_user_object(self, values: Mapping[str, Float32s]) -> torch.nn.Module:
        """Return a copy of the module with these weights, in evaluation mode."""
        module = copied(self._ready()).eval()
        with torch.no_grad():
            for name, tensor in tensors_of(module, self._kinds).items():
                tensor.copy_(tensor_of(value_of(values[name], self._kinds[name])).reshape(tensor.shape))
        compute_again(module)
        return module

    def state_dict(self, values: Mapping[str, Float32s]) -> dict[str, Any]:
        """Return the module's `state_dict` with these weights, as arrays; entries that are no tensors are left out."""
        found = self.to_user_object(values).state_dict()
        return {plain_name(name): stored(value) for name, value in found.items() if isinstance(value, torch.Tensor)}

    def optimizer_state(self, optimizer: Any, spec: OptimizerSpec) -> OptimizerState | None:
        """Return the state of a PyTorch optimizer, by our names; None if it has taken no step."""
        return optimizers.state_of(optimizer, self.parameter_names(), spec)

    def optimizer_state_dict(
        self,
        own: torch.nn.Module,
        groups: Sequence[tuple[Sequence[str], float, bool]],
        spec: OptimizerSpec,
        state: OptimizerState,
    ) -> dict[str, Any]:
        """Return the state dict that the equivalent PyTorch optimizer loads, for a module of `to_user_object`."""
        names = {name: plain_name(name) for name, _ in own.named_parameters()}
        return optimizers.state_dict(own, names, groups, spec, state)

    def hold(self, own: torch.nn.Module, tables: Mapping[str, HeldTable]) -> None:
        """Give a module that `to_user_object` returned the rows of all tables."""
        rows = HeldRows(tables, self._dtype)
        for module in look_ups_in(own):
            module._rows = rows

    def _outputs(self, variables: Mapping[str, Array], inputs: Any, keys: Mapping[str, Keys], xp: Any) -> Any:
        module = self._ready()
        module.eval()
        tensors = self._tensors_of(xp).pulled(variables)
        with self._precision(tensors):
            return self._called(module, tensors, self._trees(inputs), TorchRows(variables, keys, self._dtype))

    def _called(
        self, module: torch.nn.Module, tensors: dict[str, torch.Tensor], inputs: Any, looked_up: TorchRows
    ) -> Any:
        """Call the module with these tensors and rows; `tensors` then has those that the module replaced.

        A dict of inputs is passed as keyword arguments, a tuple or list as positional ones.
        """
        named = inputs if isinstance(inputs, dict) else {}
        ordered = () if named is inputs else tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        with use_tensors(tensors, self._places), use_rows(self._look_ups, looked_up):
            return module(*ordered, **named)

    def _check_pairing(self, outputs: Any, targets: Any, loss: torch.Tensor, weights: Any) -> None:
        """Refuse a loss that compares each output with every target."""
        if self._pairing.is_doubtful(outputs, targets) and weights is None:
            with torch.no_grad(), self._precision(self._own):
                self._pairing.check(
                    on_host(outputs),
                    on_host(targets),
                    float(loss),
                    lambda: float(self._loss_of(outputs, targets.flip(0), None)),
                )

    def _loss_of(self, outputs: Any, targets: Any, weights: Any) -> Any:
        if weights is None:
            return called(self._loss, outputs, targets)
        assert self._weighted is not None  # a trainer has asked
        return called(self._weighted, outputs, targets, tensor_of(weights))

    def _precision(self, tensors: Mapping[str, torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast context for module and loss on the device of these tensors."""
        if self._autocast is None:
            return contextlib.nullcontext()
        device = next(iter(tensors.values())).device.type
        return torch.autocast(device, self._autocast)  # type: ignore[no-any-return]

    def _tensors_of(self, xp: Any) -> HostTensors | DeviceTensors:
        """Return the module's tensors on the device of `xp`'s arrays."""
        if xp is np:
            return HostTensors(self._own, self._kinds)
        if self._on_device is None:
            self._on_device = DeviceTensors(self._own, self._kinds, xp)
        return self._on_device

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return the module's current buffers by our names."""
        return {
            f"{prefix}{name}": buffer
            for prefix, within in self._modules
            for name, buffer in within._buffers.items()
            if buffer is not None
        }

    def _trees(self, given: Any) -> Any:
        return map_leaves(self._data, given)

    def _data(self, array: Any) -> torch.Tensor:
        """Return inputs or targets as a tensor; floating-point ones in the module's type, if it has only one."""
        tensor = tensor_of(array)
        return tensor.to(self._dtype) if tensor.is_floating_point() and self._dtype is not None else tensor

    def _ready(self) -> torch.nn.Module:
        if self._module is None:
            self._module = self._built()
            self._look_at(self._module)
        return self._module

    def _look_at(self, module: torch.nn.Module) -> None:
        """Inspect the module at the start of each fit: the user may have frozen, unfrozen or hooked it since."""
        check(module)
        check_module(module, self.keys_function)
        self._kinds = kinds_of(module, self._state_kinds)
        self._own = tensors_of(module, self._kinds)
        self._on_device = None
        self._places = places_of(module)
        self._look_ups = look_ups_in(module)
        self._modules = [(plain_name(f"{path}." if path else ""), within) for path, within in module.named_modules()]
        if module.training:
            self._kept_in_eval = {path for path, within in self._modules if not within.training}
        self._trains = [(within, path not in self._kept_in_eval) for path, within in self._modules]
        self._has_looked_for_writes = False
        half = any(parameter.dtype == torch.float16 for parameter in module.parameters())
        self._scale = LOSS_SCALE if half or self._autocast == torch.float16 else 1.0
        types = {parameter.dtype for parameter in module.parameters()}
        self._dtype = types.pop() if len(types) == 1 else None

    def _train_mode(self, module: torch.nn.Module) -> None:
        """Set the module to training mode, except submodules that the user set to evaluation."""
        if all(within.training is trains for within, trains in self._trains):
            return
        module.train()
        for within, trains in self._trains:
            if not trains:
                within.training = False

    def _built(self) -> torch.nn.Module:
        if isinstance(self._given, torch.nn.Module):
            return self._given
        with torch.random.fork_rng(devices=[]):  # keeps the user's own generator state
            torch.manual_seed(self._seed)
            return call_factory(self._given, "module()")
