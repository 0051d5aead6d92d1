"""A job file for a table that nobody has described yet.

Owns the guesses: the separator, the label, what it means, and the columns that are no inputs. Called by
`parashard init`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from parashard.data.columns import Cells, Numbers, Table, as_words, typed
from parashard.data.csv import open_csv, opened_text, read_csv
from parashard.data.input_columns import MAX_CATEGORIES
from parashard.data.labels import kind_of_labels
from parashard.data.options import CsvOptions, TargetKind, is_index
from parashard.data.tables import useless
from parashard.errors import BadData

SEPARATORS = (",", ";", "\t", "|")
BATCHES_MIN = 10
"""Batches of an epoch: a small table has small ones."""
BATCH_SIZE_MAX = 128
STEPS = 2000
"""About how many steps the job has."""
EPOCHS_MAX = 100
CODE_WIDTH = 30
"""Of the lines, before their comments."""


class Starter(NamedTuple):
    """A job file, and what its data are in one line."""

    text: str
    summary: str


def starter_of(path: Path, label: str | None, name: str, shown: str, encoding: str = "utf-8") -> Starter:
    """Return a job file that trains on a table, with the guesses in it as comments.

    Parameters
    ----------
    path : Path
        A CSV file with a header row.
    label : str or None
        The column to predict; None: the last one.
    name : str
        Of the job.
    shown : str
        The table's path as the job file has it.
    encoding : str
        Of the table.

    Raises
    ------
    BadData
        The table cannot be read, or has nothing to learn from.
    """
    options = CsvOptions(path=path, label="", separator=_separator(path, encoding), encoding=encoding)
    table = read_csv(path, options)
    options = options.replaced(label=list(table.columns)[-1] if label is None else label)
    target = _target(options, table)
    ignore, categorical = _inputs(options, table)
    options = options.replaced(target=target, ignore=tuple(ignore), categorical=tuple(categorical))
    spec = open_csv(options).spec  # the job's own way of reading it: what is written can be run
    batch = max(1, min(BATCH_SIZE_MAX, spec.examples // BATCHES_MIN))
    epochs = max(1, min(EPOCHS_MAX, STEPS * batch // spec.examples))
    return Starter(_text(options, name, shown, ignore, batch, epochs), spec.summary())


def _separator(path: Path, encoding: str) -> str:
    """Return the separator that the header has most of."""
    with opened_text(path, encoding) as file:
        header = file.readline()
    found = max(SEPARATORS, key=header.count)
    return f"{found} " if found != "\t" and header.count(f"{found} ") == header.count(found) > 0 else found


def _target(options: CsvOptions, table: Table) -> TargetKind:
    """Return what the labels mean: where a job file would have to say, numbers are values and texts are classes."""
    if options.label not in table.columns:
        raise BadData(f"{table.path}: has no column {options.label!r}; its columns: {', '.join(table.columns)}")
    try:
        labels = typed(table, options.label, is_label=True, may_be_class=True)
    except BadData:
        return "class"  # numbers and texts
    try:
        return kind_of_labels(labels, "")
    except BadData:
        return "value" if isinstance(labels, Numbers) else "class"


def _inputs(options: CsvOptions, table: Table) -> tuple[dict[str, str], list[str]]:
    """Return the columns to ignore with the reasons, and those of which some cells only are numbers."""
    ignore: dict[str, str] = {}
    categorical = []
    for name in table.columns:
        if name == options.label:
            continue
        if is_index(name):
            ignore[name] = "is an index of pandas without a name"
            continue
        column: Cells
        try:
            column = typed(table, name)
        except BadData:
            column = typed(table, name, as_text=True)
            categorical.append(name)
        found = useless(column)
        if not found and not isinstance(column, Numbers) and len(as_words(column).used()) >= MAX_CATEGORIES:
            found = f"has more than {MAX_CATEGORIES:,} distinct texts"
        if found:
            ignore[name] = found
    return ignore, [name for name in categorical if name not in ignore]


def _text(options: CsvOptions, name: str, shown: str, ignore: dict[str, str], batch: int, epochs: int) -> str:
    meaning = "its values are classes" if options.target == "class" else "its values are numbers to predict"
    lines = [
        f"# A job for {_comment(shown)}; every line is a guess that you may change.",
        "# `parashard config` shows all keys, and docs/job-file.md says what they mean.",
        "",
        "[job]",
        f"name = {_quoted(name)}",
        _line(f"epochs = {epochs}", "how often every row is used"),
        _line(f"batch_size = {batch}", "rows of a step"),
        "",
        "[data]",
        'source = "csv"',
        _line(f"path = {_quoted(shown)}", "relative to this file"),
        *([f"separator = {_quoted(options.separator)}"] if options.separator != "," else []),
        *([f"encoding = {_quoted(options.encoding)}"] if options.encoding != "utf-8" else []),
        _line(f"label = {_quoted(options.label)}", "the column to predict"),
        _line(f"target = {_quoted(options.target or 'class')}", meaning),
        _line("held_out = 0.2", "the share of the rows that is kept to judge the model"),
        *(f"# {_comment(column)} {_comment(why)}" for column, why in ignore.items()),
        _line(f"ignore = {_list(options.ignore)}", "columns that are no inputs"),
        _line(f"categorical = {_list(options.categorical)}", "columns of names, though some look like numbers"),
        "",
        "[model]",
        _line('kind = "mlp"', '"softmax" is a linear model of classes'),
        _line("hidden = [64, 32]", "units of each hidden layer"),
        _line("dropout = 0.0", "more, such as 0.2, where the held-out loss rises again"),
        "",
        "[optimizer]",
        'kind = "adam"',
        "learning_rate = 0.001",
        _line('schedule = { kind = "cosine" }', "falls to 0 by the end"),
        "",
        "[cluster]",
        _line("shards = 2", "processes that hold the weights"),
        _line("workers = 2", "processes that compute gradients"),
    ]
    return "\n".join(lines) + "\n"


def _line(code: str, comment: str) -> str:
    return f"{code:<{CODE_WIDTH}}  # {comment}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _list(texts: Sequence[str]) -> str:
    return f"[{', '.join(map(_quoted, texts))}]"


def _comment(text: str) -> str:
    """Return a text of the table for a comment: on one line, without characters that TOML refuses there."""
    return "".join(character if character.isprintable() else " " for character in text)
