"""Serve status, rows and variables over HTTP, in JSON. Refusals say what was found and what is allowed.

Infinite numbers and NaN, which JSON does not have, are null.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

import numpy as np

from parashard.checkpoints.catalogue import CheckpointId
from parashard.errors import InvalidRequest, LimitExceeded, NotReady, ParashardError, UnknownVariable, shortened
from parashard.plan.embedding import Keys
from parashard.plan.variables import Float32s
from parashard.serving.checkpoint_watcher import Published
from parashard.serving.served import ServedRun
from parashard.serving.versions import variable_of

ELEMENTS_MAX = 1 << 20
"""Most elements of a variable in one answer."""

Answer = tuple[int, str, bytes]


class Pages:
    """Answers of the paths under /v1."""

    def __init__(self, run: ServedRun) -> None:
        self._run = run

    def gets(self) -> dict[str, Callable[[str], Answer]]:
        """Return the pages of GET, which take a query."""
        return {
            "/v1/status": lambda query: _answered(lambda: self._status(_asked(query, ()))),
            "/v1/rows": lambda query: _answered(lambda: self._rows(_query_of_rows(query))),
            "/v1/variable": lambda query: _answered(lambda: self._variable(_asked(query, ("name",)))),
        }

    def posts(self) -> dict[str, Callable[[bytes], Answer]]:
        """Return the pages of POST, which take a body."""
        return {"/v1/rows": lambda body: _answered(lambda: self._rows(_body_of_rows(body)))}

    def ready(self) -> str:
        """Return why nothing can be looked up yet, or ""."""
        try:
            self._run.published()
        except NotReady as error:
            return str(error)
        return ""

    def _status(self, asked: Mapping[str, str]) -> dict[str, Any]:
        published, sight = self._run.published(), self._run.watcher.sight
        versions, seconds = self._run.behind()
        return {
            "run": self._run.watcher.run_id,
            "job": self._run.job,
            "versions": _versions(published),
            "newest": [str(id_) for id_ in sight.newest],
            "behind": {"versions": versions, "seconds": round(seconds, 3)},
            "done": sight.final_steps is not None,
            "problem": sight.problem,
            "fresh": self._run.watcher.fresh,
            "resyncs": self._run.watcher.resyncs,
            "tables": {
                name: {
                    "dimension": table.row_elements,
                    "rows": sum(shard.tables[name].rows.rows for shard in published.shards),
                }
                for name, table in sorted(self._run.tables.by_name.items())
            },
            "variables": {name: list(variable.shape) for name, variable in sorted(published.variables.items())},
        }

    def _rows(self, asked: tuple[str, Keys]) -> dict[str, Any]:
        published, found = self._run.look_up(*asked)
        return {"rows": _plain(found.rows), "present": found.present.tolist(), "versions": _versions(published)}

    def _variable(self, asked: Mapping[str, str]) -> dict[str, Any]:
        published = self._run.published()
        name = asked["name"]
        variable = published.variables.get(name)
        if variable is not None and variable.elements > ELEMENTS_MAX:
            raise LimitExceeded(
                f"variable {shortened(name)!r} has {variable.elements:,} elements; allowed: at most {ELEMENTS_MAX:,} "
                "over HTTP; gRPC has no such bound"
            )
        values = variable_of(published.variables, published.shards, name)
        return {"shape": list(values.shape), "values": _plain(values), "versions": _versions(published)}


def _answered(answer: Callable[[], dict[str, Any]]) -> Answer:
    try:
        return 200, "application/json", json.dumps(answer(), allow_nan=False, separators=(",", ":")).encode()
    except ParashardError as error:
        return _status_of(error), "application/json", json.dumps({"error": str(error), "code": error.code}).encode()


def _status_of(error: ParashardError) -> int:
    if isinstance(error, UnknownVariable):
        return 404
    return 400 if isinstance(error, InvalidRequest) else 503


def _asked(query: str, names: tuple[str, ...]) -> dict[str, str]:
    """Return the parameters of a query, which must have each of `names` once."""
    try:
        found = parse_qs(query, keep_blank_values=True, max_num_fields=16) if query else {}
    except ValueError:
        found = {"too many": []}
    if sorted(found) != sorted(names) or any(len(values) != 1 for values in found.values()):
        due = ", ".join(f"{name}=..." for name in names) or "nothing"
        raise InvalidRequest(f"?{shortened(query)}: allowed after the question mark: {due}, once each")
    return {name: values[0] for name, values in found.items()}


def _query_of_rows(query: str) -> tuple[str, Keys]:
    asked = _asked(query, ("table", "keys"))
    texts = [text.strip() for text in asked["keys"].split(",") if text.strip()]
    try:
        return asked["table"], _keys([int(text) for text in texts])
    except ValueError:
        raise InvalidRequest(f"keys={shortened(asked['keys'])}: allowed: whole numbers with commas between") from None


def _body_of_rows(body: bytes) -> tuple[str, Keys]:
    due = '{"table": NAME, "keys": [whole numbers of 64 bits]}'
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"the body is not JSON; due: {due}") from None
    if not isinstance(asked, dict) or set(asked) != {"table", "keys"}:
        raise InvalidRequest(f"the body is {shortened(json.dumps(asked))}; due: {due}")
    if not isinstance(asked["table"], str) or not isinstance(asked["keys"], list):
        raise InvalidRequest(f"the body is {shortened(json.dumps(asked))}; due: {due}")
    return asked["table"], _keys(asked["keys"])


def _keys(numbers: list[Any]) -> Keys:
    for number in numbers:
        if type(number) is not int or not -(1 << 63) <= number < 1 << 64:
            raise InvalidRequest(f"key {shortened(repr(number))}: allowed: whole numbers of up to 64 bits")
    return np.array([number % (1 << 64) for number in numbers], np.uint64)


def _versions(published: Published) -> list[str]:
    return [str(CheckpointId(*version.id)) for version in published.versions]


def _plain(values: Float32s) -> Any:
    if np.isfinite(values).all():
        return values.tolist()
    plain = values.astype(object)
    plain[~np.isfinite(values)] = None
    return plain.tolist()
