"""Callbacks that write files: ModelCheckpoint, CSVLogger and TensorBoard; BackupAndRestore only resumes the run."""

from __future__ import annotations

import csv
import io
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parashard.callbacks.base import Callback, Logs
from parashard.callbacks.deciding import Mode, Monitor
from parashard.errors import ConfigurationError, StoreFailed
from parashard.process.best_effort import why_failed
from parashard.process.durable import disk_failed
from parashard.process.extras import install

SUFFIX = ".safetensors"


class ModelCheckpoint(Callback):
    """Saves the weights of each evaluated epoch, exactly those that its figures belong to.

    Epochs without an evaluation are skipped. A file has the variables by name, like `weights.safetensors` of a run.

    Parameters
    ----------
    filepath : str or Path
        Must end in ".safetensors"; "{epoch}" is the epoch, counted from 1, and "{val_loss:.3f}" for example a figure.
    monitor : str
        Name of the figure to compare epochs by.
    save_best_only : bool
        True: save only epochs that are better than all before.
    mode : {"auto", "min", "max"}
        Whether lower or higher values are better; "auto" infers it from the name, and with `save_best_only` refuses an
        unknown one.
    initial_value_threshold : float, optional
        With `save_best_only`, save only weights whose figure is better than this.
    """

    decides = False
    uses_weights = True
    _kept = ("best",)

    def __init__(
        self,
        filepath: str | Path,
        *,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = True,
        mode: Mode = "auto",
        save_freq: str = "epoch",
        initial_value_threshold: float | None = None,
    ) -> None:
        if not str(filepath).endswith(SUFFIX):
            raise ConfigurationError(f"ModelCheckpoint: filepath {str(filepath)!r} must end in {SUFFIX}")
        if save_freq != "epoch":
            raise ConfigurationError(
                f"ModelCheckpoint: save_freq is {save_freq!r}; allowed: 'epoch', where weights are evaluated"
            )
        if not save_weights_only:
            raise ConfigurationError("ModelCheckpoint: save_weights_only is False; a file has the weights only")
        self._filepath = str(filepath)
        self._best_only = save_best_only
        # Without save_best_only no figures are compared, and any may be named.
        self._monitor = Monitor(self, monitor, mode if save_best_only or mode != "auto" else "min")
        self._threshold = initial_value_threshold
        self.best = self._start()

    @property
    def waits(self) -> bool:
        """Whether training waits after each epoch, so that no epoch's weights are missed."""
        return self._best_only

    def _start(self) -> float:
        return self._monitor.worst if self._threshold is None else self._threshold

    def on_train_begin(self, logs: Logs) -> None:
        self.best = self._start()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Save the weights if they were evaluated and, with `save_best_only`, are the best so far."""
        if not self.model.has_weights:
            return
        best = self.best
        if self._best_only:
            value = self._monitor.value(self, logs)
            if value is None or not self._monitor.better(value, self.best):
                return
            best = value
        try:
            path = self._filepath.format(epoch=epoch + 1, **logs)
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigurationError(
                f"ModelCheckpoint: filepath {self._filepath!r} cannot be filled in ({error}); there are epoch, "
                f"{', '.join(sorted(logs))}"
            ) from None
        try:
            self.model.save_weights(path)
        except (OSError, StoreFailed) as error:
            if not disk_failed(error):
                raise
            warnings.warn(f"ModelCheckpoint: {path} cannot be written: {why_failed(error)}", stacklevel=2)
        else:
            self.best = best


class CSVLogger(Callback):
    """Writes a line of figures for every epoch.

    Parameters
    ----------
    filename : str or Path
        The file.
    separator : str
        Separates values.
    append : bool
        True: continue an existing file. False: overwrite it, unless the run is resumed.
    """

    decides = False

    def __init__(self, filename: str | Path, separator: str = ",", append: bool = False) -> None:
        self._path = Path(filename)
        self._separator = separator
        self._append = append
        self._columns: list[str] = []
        self._bytes = 0  # length of the file up to the last complete line
        self._waiting = ""  # lines not written yet because the disk was full

    def on_train_begin(self, logs: Logs) -> None:
        self._columns, self._bytes = [], 0
        if self._append and self._path.exists():
            with self._path.open(newline="") as file:
                self._columns = next(csv.reader(file, delimiter=self._separator), [])
            self._bytes = self._path.stat().st_size

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Write a line, without figures that the first epoch did not have."""
        begins = not self._columns
        self._columns = self._columns or ["epoch", *sorted(logs)]
        text = io.StringIO()
        writer = csv.DictWriter(
            text, self._columns, restval="NA", extrasaction="ignore", delimiter=self._separator, lineterminator="\n"
        )
        if begins:
            writer.writeheader()
        writer.writerow({"epoch": epoch, **logs})
        self._waiting += text.getvalue()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("r+b" if self._bytes else "wb") as file:
                file.truncate(self._bytes)  # a line written just before a crash is written again
                file.seek(self._bytes)
                file.write(self._waiting.encode())
        except OSError as error:
            if not disk_failed(error):
                raise
            warnings.warn(f"CSVLogger: {self._path} waits for room: {why_failed(error)}", stacklevel=2)
        else:
            self._bytes, self._waiting = self._bytes + len(self._waiting.encode()), ""

    def get_state(self) -> dict[str, Any]:
        """Return the columns, the file's length, and lines that wait for disk space."""
        return {"columns": self._columns, "bytes": self._bytes, "waiting": self._waiting}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._columns, self._waiting = list(state["columns"]), state.get("waiting", "")
        there = self._path.stat().st_size if self._path.exists() else 0
        self._bytes = min(there, state.get("bytes", there))


class BackupAndRestore(Callback):
    """Makes `fit` resume an interrupted run, as `resume=True` does; it writes nothing.

    Every run can be resumed: shards, coordinator and callbacks save their state in the run's folder.

    Parameters
    ----------
    backup_dir : str or Path, optional
        Ignored: state is in the run's folder.
    """

    decides = False

    def __init__(self, backup_dir: str | Path | None = None, **_: object) -> None:
        self.backup_dir = backup_dir


_NOTHING: dict[str, object] = {
    **{"histogram_freq": 0, "embeddings_freq": 0, "embeddings_metadata": None, "profile_batch": 0},
    **{"write_graph": False, "write_images": False, "write_steps_per_second": False, "update_freq": "epoch"},
}
"""Other arguments of Keras' callback, with their only allowed values."""


class TensorBoard(Callback):
    """Writes figures of every epoch as scalars to `LOG_DIR/train` and `LOG_DIR/validation`, as Keras' callback does.

    Parameters
    ----------
    log_dir : str or Path
        The folder.

    Raises
    ------
    ConfigurationError
        If one of Keras' other arguments asks for more than scalars of every epoch, or the package `tensorboard` is not
        installed (extra `tensorboard`).
    """

    decides = False

    def __init__(self, log_dir: str | Path = "logs", **others: object) -> None:
        for name, value in others.items():
            if name not in _NOTHING or value not in (_NOTHING[name], None):
                raise ConfigurationError(
                    f"callbacks.TensorBoard writes the figures of every epoch as scalars, and nothing else: leave out "
                    f"{name}={value!r}"
                )
        try:
            import tensorboard  # noqa: F401
        except ImportError:
            raise ConfigurationError(
                f"callbacks.TensorBoard needs the package tensorboard: {install('tensorboard')}"
            ) from None
        self._folder = Path(log_dir)
        self._writers: dict[str, Any] = {}

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Write the figures and flush the files."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for name, value in logs.items():
            where = "validation" if name.startswith("val_") else "train"
            summary = Summary(value=[Summary.Value(tag=f"epoch_{name.removeprefix('val_')}", simple_value=value)])
            self._writer(where).add_event(Event(wall_time=time.time(), step=epoch, summary=summary))
        for writer in self._writers.values():
            writer.flush()

    def on_train_end(self, logs: Logs) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _writer(self, where: str) -> Any:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if where not in self._writers:
            self._writers[where] = EventFileWriter(str(self._folder / where))
        return self._writers[where]
