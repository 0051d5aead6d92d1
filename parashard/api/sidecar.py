"""SidecarEvaluator: evaluates the newest weights that `ModelCheckpoint` writes to a folder, during training."""

from __future__ import annotations

import csv
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from numbers import Real
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from parashard.api.examples.indexed import as_bad_data, indexed
from parashard.api.jobs import shapes_of
from parashard.api.trained_model import figures_over
from parashard.api.trained_state import check_without_tables
from parashard.api.trainer import EXAMPLES_AT_ONCE
from parashard.callbacks.files import SUFFIX, TensorBoard
from parashard.display.live import console_for
from parashard.errors import BadData, ConfigurationError
from parashard.models.base import FrameworkModel, Model
from parashard.plan.variables import Float32s, as_imported
from parashard.process.addresses import split_address
from parashard.process.arguments import checked_whole
from parashard.process.run_files import short_path
from parashard.store.arrays import from_bytes
from parashard.telemetry.http import HttpPort, Metrics

TIMEOUT_S = 3600.0
POLL_S = 1.0
Kept = tuple[int, str, int]
"""Identity of a weights file: modification time in ns, name and inode; a replaced file differs."""
COLUMNS = ("time", "file")
"""Columns of the CSV file before the figures."""


class SidecarEvaluator:
    """Evaluates the newest weights file in a folder whenever there is a new one.

    Files that are superseded during an evaluation are skipped. A file is never read half-written, since
    `ModelCheckpoint` replaces files atomically.

    Parameters
    ----------
    model : Model
        The model in training, as `Trainer` takes it; models with embedding tables are refused.
    data
        The examples to evaluate on, as `Trainer.evaluate` takes them.
    checkpoint_dir : str or Path
        The folder that `ModelCheckpoint` writes to; it need not exist yet.
    targets : str or sequence of str, optional
        As in `Trainer.evaluate`.
    batch_size : int
        Examples per batch.
    max_evaluations : int, optional
        End after this many evaluations.
    timeout_s : float
        End after this time without a new file.
    poll_s : float
        Interval at which the folder is checked.
    csv_path : str or Path, optional
        CSV file that gets a line for every evaluation; an existing file is continued.
    log_dir : str or Path, optional
        Folder for TensorBoard logs (extra `tensorboard`); the step is the number of the evaluation.
    metrics_address : str, optional
        "HOST:PORT" that serves the newest figures as Prometheus metrics; port 0 picks a free one.

    Raises
    ------
    BadData
        If there are no examples.
    ConfigurationError
        If a number is out of bounds, an address is invalid, examples have weights that the model cannot use, the model
        has embedding tables, or TensorBoard is requested but not installed.
    """

    def __init__(
        self,
        model: Model,
        data: Any,
        checkpoint_dir: str | Path,
        *,
        targets: str | Sequence[str] | None = None,
        batch_size: int = EXAMPLES_AT_ONCE,
        max_evaluations: int | None = None,
        timeout_s: float = TIMEOUT_S,
        poll_s: float = POLL_S,
        csv_path: str | Path | None = None,
        log_dir: str | Path | None = None,
        metrics_address: str | None = None,
    ) -> None:
        checked_whole("SidecarEvaluator: batch_size", batch_size)
        for name, value, least in (
            ("max_evaluations", 1 if max_evaluations is None else max_evaluations, 1),
            ("timeout_s", timeout_s, 0),
            ("poll_s", poll_s, 0.01),
        ):
            if not isinstance(value, Real) or not value >= least:
                raise ConfigurationError(
                    f"SidecarEvaluator: {name} must be a number of at least {least}, found {value!r}"
                )
        check_without_tables(model, "SidecarEvaluator judges files of weights")
        self._model = model
        with as_bad_data():
            self._examples = indexed(data, "data", targets=targets)
        if not len(self._examples):
            raise BadData("data has no examples")
        if any(field.name == "weights" for field in self._examples.fields()) and not getattr(model, "weighted", False):
            raise ConfigurationError("SidecarEvaluator: the examples have weights, and the model's loss takes none")
        self._folder = Path(checkpoint_dir)
        self._batch_size = batch_size
        self._max_evaluations = max_evaluations
        self._timeout_s = timeout_s
        self._poll_s = poll_s
        self._csv_path = None if csv_path is None else Path(csv_path)
        self._board = None if log_dir is None else TensorBoard(log_dir)
        self._address = None if metrics_address is None else _host_and_port(metrics_address)
        if isinstance(model, FrameworkModel):
            model.seed(0)
        self._shapes = shapes_of(model.initial_variables())
        self._evaluated: Kept | None = None
        self.evaluations = 0
        """Number of evaluations."""
        self.metrics: dict[str, float] = {}
        """Figures of the newest evaluation."""
        self.file = ""
        """Name of its file."""
        self.evaluated_s = 0.0
        """Its Unix time."""
        self.address = ""
        """Address of the Prometheus metrics while `start` runs."""

    def start(self) -> dict[str, float]:
        """Evaluate until `max_evaluations`, `timeout_s` without a new file, or Ctrl-C; return the newest figures.

        Raises
        ------
        BadData
            If a file does not have this model's weights; figures written before are kept.
        ConfigurationError
            If the existing CSV file has other columns.
        Unavailable
            If the metrics address is not available.
        """
        with ExitStack() as open_:
            if self._address is not None:
                self._serve(open_, *self._address)
            if self._board is not None:
                open_.callback(self._board.on_train_end, {})
            with suppress(KeyboardInterrupt):
                self._follow()
        if not self.evaluations:
            there = "" if self._folder.is_dir() else ", which is not there"
            sys.stderr.write(f"ps.SidecarEvaluator: no file of weights came to {short_path(self._folder)}{there}\n")
        return dict(self.metrics)

    def _follow(self) -> None:
        until_s = time.monotonic() + self._timeout_s
        while True:
            kept = self._newest()
            if kept is not None and self._evaluate(self._folder / kept[1]):
                until_s = time.monotonic() + self._timeout_s
                if self.evaluations == self._max_evaluations:
                    return
            elif time.monotonic() >= until_s:
                return
            else:
                time.sleep(min(self._poll_s, max(0.0, until_s - time.monotonic())))

    def _newest(self) -> Kept | None:
        """Return the newest file if it is newer than the last evaluated one."""
        found: list[Kept] = []
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if entry.name.endswith(SUFFIX) and entry.is_file():
                        found.append(_kept(entry.name, entry.stat()))
        newest = max(found, default=None)
        evaluated = self._evaluated
        if newest is None or evaluated is None:
            return newest
        return None if newest == evaluated or newest < evaluated else newest

    def _evaluate(self, path: Path) -> bool:
        """Evaluate a file and report the figures; return False if it is gone."""
        try:
            with path.open("rb") as file:
                kept = _kept(path.name, os.fstat(file.fileno()))  # of the open file, even if it is replaced meanwhile
                content = file.read()
        except FileNotFoundError:
            return False
        values = self._values(path, content)
        self._evaluated, self.metrics = kept, figures_over(self._examples, self._batch_size, self._model, values)
        self.file, self.evaluated_s = path.name, time.time()
        self.evaluations += 1
        self._tell()
        return True

    def _values(self, path: Path, content: bytes) -> Mapping[str, Float32s]:
        """Return the variables in a file's content; raise BadData if they are not this model's."""
        try:
            values = as_imported(from_bytes(content))
        except ValueError as error:
            raise BadData(f"{path}: cannot be read as safetensors: {error}") from None
        found = {name: array.shape for name, array in values.items()}
        for name in sorted(found.keys() | self._shapes.keys()):
            if found.get(name) != self._shapes.get(name):
                raise BadData(
                    f"{path} has no weights of this model: variable {name!r} is {_shape(found.get(name))} there and "
                    f"{_shape(self._shapes.get(name))} in the model"
                )
        return values

    # --- reporting figures ---

    def _tell(self) -> None:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        console_for(sys.stdout).print(f"{self.file}: {figures}", soft_wrap=True, markup=False, highlight=False)
        if self._csv_path is not None:
            self._add_line(self._csv_path)
        if self._board is not None:
            self._board.on_epoch_end(self.evaluations, {f"val_{name}": value for name, value in self.metrics.items()})

    def _add_line(self, path: Path) -> None:
        columns = [*COLUMNS, *sorted(self.metrics)]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+", newline="") as file:
            file.seek(0)
            there = next(csv.reader(file), None)
            if there not in (None, columns):
                raise ConfigurationError(
                    f"{path} has the columns {', '.join(there or [])}, and the evaluation {', '.join(columns)}: give "
                    "csv_path another name, or remove the file"
                )
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            if there is None:
                writer.writeheader()
            when = datetime.fromtimestamp(self.evaluated_s, UTC).isoformat(timespec="seconds")
            writer.writerow({"time": when, "file": self.file, **self.metrics})

    def _serve(self, open_: ExitStack, host: str, port: int) -> None:
        shown = Metrics("evaluator")
        shown.add(self._families)
        http = HttpPort(host, port, shown, lambda: "" if self.evaluations else "no file was evaluated yet")
        self.address = http.address
        http.start()
        open_.callback(http.stop)

    def _families(self) -> Iterator[Metric]:
        """Yield the newest figures; before the first evaluation, only the count."""
        count, text = self.evaluations, "Files of weights that were evaluated."
        yield CounterMetricFamily("parashard_evaluations", text, value=count)
        if count:
            text = "Unix time of the newest evaluation."
            yield GaugeMetricFamily("parashard_evaluated_timestamp_seconds", text, value=self.evaluated_s)
            family = GaugeMetricFamily("parashard_evaluation", "Figures of the newest weights.", labels=["metric"])
            for name, value in dict(self.metrics).items():
                family.add_metric([name], value)
            yield family


def _kept(name: str, about: os.stat_result) -> Kept:
    return about.st_mtime_ns, name, about.st_ino


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {shape}"


def _host_and_port(address: str) -> tuple[str, int]:
    try:
        return split_address(address, least_port=0)
    except ConfigurationError:
        raise ConfigurationError(f"SidecarEvaluator: metrics_address must be HOST:PORT, found {address!r}") from None
