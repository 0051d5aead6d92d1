"""Write a first job file for a table, with guesses about its columns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from parashard.data import open_source
from parashard.data.columns import Cells, ColumnTable, Lists, Numbers, shown_cell, typed
from parashard.data.input_columns import MAX_CATEGORIES
from parashard.data.labels import kind_of_labels
from parashard.data.options import CsvOptions, ParquetOptions, TargetKind, is_index
from parashard.data.table_files import is_parquet, opened_text, read_csv, read_readable_columns
from parashard.data.tabular import notation, rare, useless
from parashard.errors import BadData

EMPTY_NAME = '""'
SEPARATORS = (",", ";", "\t", "|")
BATCHES_MIN = 10
"""Fewest batches of an epoch: a small table has small ones."""
BATCH_SIZE_MAX = 128
STEPS = 2000
"""Approximate number of steps of the job."""
EPOCHS_MAX = 100
CODE_WIDTH = 30
"""Width of the lines before their comments."""

AnyOptions = CsvOptions | ParquetOptions


class StarterJob(NamedTuple):
    """A job file, a summary of its data in one line, and the columns that are left out, with the reasons."""

    text: str
    summary: str
    left_out: tuple[str, ...] = ()


def starter_of(path: Path, label: str | None, name: str, shown: str, encoding: str = "utf-8") -> StarterJob:
    """Return a job file that trains on a CSV file with a header row or a Parquet file, its guesses as comments."""
    options, table, unreadable = _read(path, encoding)
    options = options.replaced(label=list(table.columns)[-1] if label is None else label)
    if options.label in unreadable:
        raise BadData(f"{path}: column {options.label!r} cannot be the label: it {unreadable[options.label]}")
    target = _target(options, table)
    ignore, categorical = _inputs(options, table, unreadable)
    options = options.replaced(target=target, ignore=tuple(ignore), categorical=tuple(categorical))
    spec = open_source(options).spec  # reads as the job does: the file that is written can be run
    batch = max(1, min(BATCH_SIZE_MAX, spec.examples // BATCHES_MIN))
    epochs = max(1, min(EPOCHS_MAX, STEPS * batch // spec.examples))
    return StarterJob(
        _text(options, name, shown, ignore, batch, epochs),
        spec.summary(),
        tuple(f"column {shown_cell(column)} {why}" for column, why in ignore.items()),
    )


def _read(path: Path, encoding: str) -> tuple[AnyOptions, ColumnTable, dict[str, str]]:
    """Return the options that read a table, its columns, and why some of them cannot be read."""
    if is_parquet(path):
        table, unreadable = read_readable_columns(path)
        return ParquetOptions(path=path, label=""), table, unreadable
    options = CsvOptions(path=path, label="", separator=_separator(path, encoding), encoding=encoding)
    return options, read_csv(path, options), {}


def _separator(path: Path, encoding: str) -> str:
    """Return the most frequent separator of the header."""
    with opened_text(path, encoding) as file:
        header = file.readline()
    found = max(SEPARATORS, key=header.count)
    return f"{found} " if found != "\t" and header.count(f"{found} ") == header.count(found) > 0 else found


def _target(options: AnyOptions, table: ColumnTable) -> TargetKind:
    """Return the kind of the labels; if they do not determine it, numbers are values and texts are classes."""
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


def _inputs(options: AnyOptions, table: ColumnTable, unreadable: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the columns to ignore with the reasons, and those in which only some cells are numbers."""
    ignore: dict[str, str] = {}
    categorical = []
    for name in table.columns:
        if name == options.label:
            continue
        found = "is an index of pandas without a name" if is_index(name) else unreadable.get(name, "")
        if not found and isinstance(table.columns[name], Lists):
            found = "has lists, of which data.list_columns makes keys"
        if not found:
            try:
                column = typed(table, name, as_text=name in table.categories)
            except BadData:
                column = typed(table, name, as_text=True)
                categorical.append(name)
            found = useless(column) or _too_many(column)
        if found:
            ignore[name] = found
    return ignore, [name for name in categorical if name not in ignore]


def _too_many(column: Cells) -> str:
    """Return why the texts of a column are left out, or "" if they are names."""
    if isinstance(column, Numbers):
        return ""
    if len(column.used()) >= MAX_CATEGORIES:
        return f"has more than {MAX_CATEGORIES:,} distinct texts"
    return notation(column) or rare(column)


def _text(options: AnyOptions, name: str, shown: str, ignore: dict[str, str], batch: int, epochs: int) -> str:
    meaning = "its values are classes" if options.target == "class" else "its values are numbers to predict"
    lines = [
        f"# A job for {_comment(shown)}; every line is a guess that you may change.",
        "# `parashard config` shows all keys, and docs/job-file.md says what they mean.",
        "",
        "[job]",
        f"name = {_quoted(name)}",
        _line(f"epochs = {epochs}", "how often every row is used"),
        _line(f"batch_size = {batch}", "rows of an update; the workers share them"),
        "",
        "[data]",
        'source = "csv"' if isinstance(options, CsvOptions) else 'source = "parquet"',
        _line(f"path = {_quoted(shown)}", "relative to this file"),
        *(_reading(options) if isinstance(options, CsvOptions) else ()),
        _line(f"label = {_quoted(options.label)}", "the column to predict"),
        _line(f"target = {_quoted(options.target or 'class')}", meaning),
        _line("held_out = 0.2", "the share of the rows that is kept to judge the model"),
        *(f"# {_comment(column) or EMPTY_NAME} {_comment(why)}" for column, why in ignore.items()),
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


def _reading(options: CsvOptions) -> Iterator[str]:
    if options.separator != ",":
        yield f"separator = {_quoted(options.separator)}"
    if options.encoding != "utf-8":
        yield f"encoding = {_quoted(options.encoding)}"


def _line(code: str, comment: str) -> str:
    return f"{code:<{CODE_WIDTH}}  # {comment}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _list(texts: Sequence[str]) -> str:
    return f"[{', '.join(map(_quoted, texts))}]"


def _comment(text: str) -> str:
    """Return a text of the table for a comment: on one line, without characters that TOML refuses there."""
    return "".join(character if character.isprintable() else " " for character in text)
