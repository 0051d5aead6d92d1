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
    from parashard.models.evaluation import Told  # which makes metrics with this package

Initial = Variable | Float32s | tuple[Variable, Float32s]
"""What a model starts from under one name."""


class Nothing(enum.Enum):
    """What a model returns that has no loss to tell, or whose step moves nothing.

    Gradients of zeros move what has momentum or decays; a push of nothing is recorded, and moves nothing (`async` and
    `ssp`). None is neither: it is what a function returns that forgets to.
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
    ) -> tuple[float | Array, Mapping[str, Array] | Nothing]:
        """Return the mean loss over a batch and its gradient by every variable.

        Parameters
        ----------
        variables : mapping of str to array of float32
            Current values, in the namespace `xp`; not to be changed or kept: the memory is reused for a later step.
            Gradients may be views of it.
        batch : Batch
            `batch.step` seeds what is random, so that a step computed twice gives the same gradient. On a GPU the
            memory of its arrays is used again for a later step, too.
        xp : module
            `numpy` or `cupy`.

        Returns
        -------
        loss : float, or array of shape ()
            On a GPU an array is faster: it is copied to the host with the gradients; a float costs a synchronisation.
        gradients : mapping of str to array
            By variable, in its shape, of floating point: one for each variable that is not frozen. None is a gradient
            of zeros, which is not sent. State without a gradient (`Variable.state`) has what its kind says instead: the
            batch's value, or what is added. The caller owns them: they may still be pushed while the next step is
            computed, so a model must not write into them again. What NumPy can read may still be being computed, such
            as arrays of JAX: the worker reads the next step's examples before it waits for them. On a GPU the variables
            are a `parashard.plan.flat.FlatArrays`; gradients that are one, too, of its layout, are moved at once.
        """

    def evaluate(self, variables: Mapping[str, Array], batch: Batch, xp: Any) -> Mapping[str, Told]:
        """Return metrics that are means over the batch's examples, such as {"loss": 0.1, "accuracy": 0.97}.

        Of a metric that is no mean it is the state: `parashard.metrics.AUC().of(outputs, targets)`.
        """


@runtime_checkable
class Seeded(Protocol):
    """A model that draws at random in a step, such as `parashard.Sequential` with dropout."""

    def seed(self, seed: int) -> None:
        """Draw what is random by this seed, the job's, and the step."""


@runtime_checkable
class TellsMetrics(Protocol):
    """A model that tells metrics of the batches that it trains on, of the outputs that their losses are of."""

    @property
    def added_metrics(self) -> Mapping[str, Metric]:
        """Those metrics, by name."""

    def step_metrics(self) -> Mapping[str, Told]:
        """Return the metrics of the batch whose loss and gradients this thread has computed last, once.

        As `Model.evaluate` returns them, without the loss, but where that is no mean over the examples.
        """


@runtime_checkable
class LooksUp(Protocol):
    """A model that uses rows of embedding tables, which the job declares; in a script its attribute `tables` does."""

    def keys(self, batch: Batch) -> Mapping[str, Array]:
        """Return the keys whose rows a batch needs, by table: arrays of whole numbers, of any shape.

        A function of the batch alone, on NumPy, which may be called in another thread. The rows arrive among the
        variables, under the table's name, shape (rows, dimension): each once, however often its key is named.
        `batch.places[table]` has the place of each key's row among them, in the shape of the keys. The gradient of a
        table is of these rows, in their order.
        """


@runtime_checkable
class Checked(Protocol):
    """A model that can tell before a job begins that its steps cannot be computed."""

    def check(self, batch: Batch) -> None:
        """Raise what a step or an evaluation of such a batch would raise."""


@runtime_checkable
class Threaded(Protocol):
    """A model that knows what threads may share of it; of any other one each thread has a deep copy."""

    def for_thread(self) -> Model:
        """Return a model for another thread, which computes at the same time; this one where it may be shared."""


@runtime_checkable
class FrameworkModel(Model, Seeded, Protocol):
    """A model that a trainer can also predict with and give back, such as `parashard.torch.Model`.

    Of a framework it may have `state_dict(values)`, which returns weights as its own object saves them; `hold(own,
    tables)`, which gives what `own` returned all rows; `optimizer_state(optimizer, spec)`, the state of one of its
    optimizers; and of an object with one `own_optimizer(own)` and `restore_optimizer(own, spec, state)`.
    """

    def fixed_sha256(self) -> str:
        """Return SHA-256 (hex) of what of the model is in no variable and decides its gradients; "" for nothing."""

    def predict(self, values: Mapping[str, Float32s], inputs: Tree) -> Tree:
        """Return the outputs for inputs, in their order: an array, or a dict, tuple or list of them.

        A model with tables is given a third argument: by table the keys of all rows that the inputs need, mixed and
        ascending. `values` has these rows, too.
        """

    def own(self, values: Mapping[str, Float32s]) -> Any:
        """Return the user's own object with these weights."""


class HeldTable(NamedTuple):
    """All rows of a table."""

    keys: Keys  # mixed, ascending
    rows: Float32s  # of shape (rows, row_elements)
    first_rows: Callable[[Keys], Float32s]  # from mixed keys that have no row to what a look-up gives


@runtime_checkable
class Audited(Protocol):
    """A model whose final weights show whether every step was applied exactly once (the oracles)."""

    def audit(self, variables: Mapping[str, Float32s], epochs: int) -> Mapping[str, int]:
        """Return counts of violations by name, such as {"ledger_wrong": 0}; they go into the job's report."""


@runtime_checkable
class AuditsRows(Audited, Protocol):
    """An audited model whose tables show it, too."""

    def audit_rows(
        self, rows: Iterable[tuple[str, StoredRows]], epochs: int, applied: Applied | None = None
    ) -> Mapping[str, int]:
        """Return the same of all rows of all tables, which come piece by piece, each key once.

        `applied`: what the job has applied, if its tables have rules of which rows there are.
        """


def adds_losses(model: object) -> bool:
    """Tell whether a model's loss is a sum over examples, and no mean."""
    return bool(getattr(model, "adds_losses", False))


class OptimizerState(NamedTuple):
    """How many updates were done, and the slots that they have left, of whole variables."""

    updates: int
    slots: Slots


def for_thread(model: Model) -> Model:
    """Return a model of one thread's own: what it says itself, else a deep copy; ConfigurationError: there is none."""
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
