"""The contract of a model: arithmetic only. A model holds no weights and knows no shard, step plan or device."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from parashard.data.base import Array, Batch
from parashard.data.tree import Tree
from parashard.errors import ConfigurationError
from parashard.models.user_errors import named_with_line
from parashard.plan.embedding import Keys
from parashard.plan.variables import Float32s, Slots, Variable
from parashard.process.threads import holding_model_lock

if TYPE_CHECKING:
    from parashard.checkpoints.row_files import StoredRows
    from parashard.metrics import Metric
    from parashard.models.due_rows import Applied
    from parashard.models.evaluation import MetricPart  # which makes metrics with this package

Initial = Variable | Float32s | tuple[Variable, Float32s]
"""Initial value of one variable: its declaration, its values, or both."""


class StepSignal(enum.Enum):
    """Return values of a model for a step without a loss, or without an update.

    Gradients of zeros still move variables with momentum or decay; an empty push is recorded, and moves nothing
    (`async` and `ssp`). None has neither meaning, because a function that forgets to return gives None.
    """

    NO_LOSS = "no loss"
    NO_PUSH = "no push"


class Model(Protocol):
    """A loss with hand-written gradients.

    A user's own model is an object with these three methods, returned by the factory that the job file names as
    `module:factory`. The factory is called with the job's `DataSpec` and the other keys of the `[model]` table.
    """

    def initial_variables(self) -> Mapping[str, Initial]:
        """Return the model's variables by name: declared (drawn from the job's seed), arrays to start from, or both."""

    def loss_and_gradients(
        self, variables: Mapping[str, Array], batch: Batch, xp: Any
    ) -> tuple[float | Array, Mapping[str, Array] | StepSignal]:
        """Return the mean loss over a batch and its gradient by every variable.

        Parameters
        ----------
        variables : mapping of str to array of float32
            Current values, in the namespace `xp`; not to be changed or kept: the memory is reused for a later step.
            Gradients may be views of it.
        batch : Batch
            `batch.step` seeds random operations, so that a step computed twice gives the same gradient. On a GPU the
            memory of its arrays is reused for a later step, too.
        xp : module
            `numpy` or `cupy`.

        Returns
        -------
        loss : float, or array of shape ()
            On a GPU an array is faster: it is copied to the host with the gradients; a float costs a synchronisation.
        gradients : mapping of str to array
            By variable, in its shape, of floating point: one for each variable that is not frozen. None is a gradient
            of zeros, which is not sent. State without a gradient (`Variable.state`) has the batch's value or an
            increment instead, by its kind. The caller owns the arrays: they may still be pushed while the next step is
            computed, so a model must not write into them again. They may be arrays that are still being computed, such
            as those of JAX: the worker reads the next step's examples before it waits for them. On a GPU the variables
            are a `parashard.plan.flat.FlatArrays`; gradients in one of the same layout are moved in one copy.
        """

    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, MetricPart]:
        """Return metrics that are means over the batch's examples, such as {"loss": 0.1, "accuracy": 0.97}.

        For a metric that is not a mean, return its state: `parashard.metrics.AUC().of(outputs, targets)`.
        """


@runtime_checkable
class Seeded(Protocol):
    """A model that draws at random in a step, such as `parashard.Sequential` with dropout."""

    def seed(self, seed: int) -> None:
        """Seed random operations by the job's seed, and by the number of each step."""


@runtime_checkable
class TellsMetrics(Protocol):
    """A model that reports metrics of training batches, from the outputs that the loss was computed from."""

    @property
    def added_metrics(self) -> Mapping[str, Metric]:
        """Those metrics, by name."""

    def step_metrics(self) -> Mapping[str, MetricPart]:
        """Return the metrics of the last batch that this thread computed, and forget them.

        As `Model.evaluate` returns them; with the loss only if that is not a mean over the examples.
        """


@runtime_checkable
class LooksUp(Protocol):
    """A model that uses rows of embedding tables, declared by the job, or in a script by its attribute `tables`."""

    def keys(self, batch: Batch) -> Mapping[str, Array]:
        """Return the keys whose rows a batch needs, by table: arrays of whole numbers, of any shape.

        It depends on the batch alone, uses NumPy, and may be called in another thread. The rows arrive among the
        variables, under the table's name, shape (rows, dimension), one for each distinct key. `batch.places[table]` has
        the index of each key's row, in the shape of the keys. The gradient of a table is by these rows, in their
        order.
        """


@runtime_checkable
class Checked(Protocol):
    """A model that can tell before a job begins that its steps cannot be computed."""

    def check(self, batch: Batch) -> None:
        """Raise the error that a step or an evaluation of such a batch would raise."""


@runtime_checkable
class Threaded(Protocol):
    """A model that makes its own copies for threads; any other model is deep-copied for each thread."""

    def for_thread(self) -> Model:
        """Return a model for another thread that computes at the same time; this one if threads may share it."""


@runtime_checkable
class FrameworkModel(Model, Seeded, Protocol):
    """A model that a trainer can also predict with and return to the user, such as `parashard.torch.Model`.

    Optional methods: `state_dict(values)` returns weights in the form that the framework saves; `hold(own, tables)`
    gives an object that `to_user_object` returned all rows; `optimizer_state(optimizer, spec)` returns the state of a
    framework's optimizer; `own_optimizer(own)` returns that of an object, and `restore_optimizer(own, spec, state)`
    loads a state.
    """

    def config_sha256(self) -> str:
        """Return SHA-256 (hex) of everything that affects gradients and is in no variable; "" if there is nothing."""

    def predict(self, values: Mapping[str, Float32s], inputs: Tree) -> Tree:
        """Return the outputs for inputs, in their order: an array, or a dict, tuple or list of them.

        A model with tables is given a third argument: by table the mixed, ascending keys of all rows that the inputs
        need. `values` also has these rows.
        """

    def to_user_object(self, values: Mapping[str, Float32s]) -> Any:
        """Return the user's own object with these weights."""


class HeldTable(NamedTuple):
    """All rows of a table."""

    keys: Keys  # mixed, ascending
    rows: Float32s  # of shape (rows, row_elements)
    first_rows: Callable[[Keys], Float32s]  # initial values for mixed keys without a row


@runtime_checkable
class Audited(Protocol):
    """A model whose final weights show whether every step was applied exactly once (the oracles)."""

    def audit(self, variables: Mapping[str, Float32s], epochs: int) -> Mapping[str, int]:
        """Return counts of violations by name, such as {"ledger_wrong": 0}; they go into the job's report."""


@runtime_checkable
class AuditsRows(Audited, Protocol):
    """An audited model whose table rows are audited, too."""

    def audit_rows(
        self, rows: Iterable[tuple[str, StoredRows]], epochs: int, applied: Applied | None = None
    ) -> Mapping[str, int]:
        """Return the same counts for all rows of all tables, which come piece by piece, each key once.

        `applied`: the updates of the job, if its tables have rules that admit or evict rows.
        """


def adds_losses(model: object) -> bool:
    """Tell whether a model's loss is a sum over examples instead of a mean."""
    return bool(getattr(model, "adds_losses", False))


class OptimizerState(NamedTuple):
    """The number of updates, and the slots after them, of whole variables."""

    updates: int
    slots: Slots


def for_thread(model: Model) -> Model:
    """Return a model for one thread: by its own `for_thread`, else a deep copy; ConfigurationError if that fails."""
    with holding_model_lock():  # built one after the other
        if isinstance(model, Threaded):
            return model.for_thread()
        try:
            return copy.deepcopy(model)
        except Exception as error:
            raise ConfigurationError(
                f"worker threads need a model each, and {type(model).__name__} cannot be copied: "
                f"{named_with_line(error)}; give it a method for_thread() that returns another one, or itself if "
                "threads may share it"
            ) from error
