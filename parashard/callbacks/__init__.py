"""Callbacks of a trainer's `fit`, with the names and hooks of Keras: `import parashard as ps`, then `ps.callbacks`.

They run in the process that called `fit`, on steps, epochs and evaluations: once per event, whatever the number of
workers. See docs/callbacks.md.
"""

from parashard.callbacks.base import Callback as Callback
from parashard.callbacks.base import History as History
from parashard.callbacks.base import LambdaCallback as LambdaCallback
from parashard.callbacks.base import Training as Training
from parashard.callbacks.deciding import EarlyStopping as EarlyStopping
from parashard.callbacks.deciding import LearningRateScheduler as LearningRateScheduler
from parashard.callbacks.deciding import ReduceLROnPlateau as ReduceLROnPlateau
from parashard.callbacks.deciding import TerminateOnNaN as TerminateOnNaN
from parashard.callbacks.files import BackupAndRestore as BackupAndRestore
from parashard.callbacks.files import CSVLogger as CSVLogger
from parashard.callbacks.files import ModelCheckpoint as ModelCheckpoint
from parashard.callbacks.files import TensorBoard as TensorBoard
