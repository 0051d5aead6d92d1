"""TensorBoard: every epoch's figures as event files, by the tensorboard package's own writer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from parashard.callbacks.base import Callback, Logs
from parashard.errors import ConfigurationError


class TensorBoard(Callback):
    """Writes figures of every epoch as scalars: `LOG_DIR/train` and `LOG_DIR/validation`, as Keras' callback does.

    Parameters
    ----------
    log_dir : str or Path
        The folder.

    Raises
    ------
    ConfigurationError
        If the package `tensorboard` is not installed (extra `tensorboard`).
    """

    decides = False

    def __init__(self, log_dir: str | Path = "logs") -> None:
        try:
            import tensorboard  # noqa: F401
        except ImportError:
            raise ConfigurationError(
                "callbacks.TensorBoard needs the package tensorboard: pip install 'parashard[tensorboard]'"
            ) from None
        self._folder = Path(log_dir)
        self._writers: dict[str, Any] = {}

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Write the figures, and have them on the disk."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for name, value in logs.items():
            where = "validation" if name.startswith("val_") else "train"
            summary = Summary(value=[Summary.Value(tag=f"epoch_{name.removeprefix('val_')}", simple_value=value)])
            self._writer(where).add_event(Event(wall_time=time.time(), step=epoch, summary=summary))
        for writer in self._writers.values():
            writer.flush()

    def on_train_end(self, logs: Logs) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _writer(self, where: str) -> Any:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if where not in self._writers:
            self._writers[where] = EventFileWriter(str(self._folder / where))
        return self._writers[where]
