"""TensorBoard: every epoch's figures as event files, by the tensorboard package's own writer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from parashard.callbacks.base import Callback, Logs
from parashard.errors import ConfigurationError
from parashard.process.extras import install

_NOTHING: dict[str, object] = {
    **{"histogram_freq": 0, "embeddings_freq": 0, "embeddings_metadata": None, "profile_batch": 0},
    **{"write_graph": False, "write_images": False, "write_steps_per_second": False, "update_freq": "epoch"},
}
"""Other arguments of Keras' callback, with the values by which nothing else is written."""


class TensorBoard(Callback):
    """Writes figures of every epoch as scalars: `LOG_DIR/train` and `LOG_DIR/validation`, as Keras' callback does.

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
