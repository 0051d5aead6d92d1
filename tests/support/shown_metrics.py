"""Metric families as a scrape shows them."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families


def shown_families(families: Iterable[Metric]) -> list[Metric]:
    """Return families as they are read from the text of a scrape."""
    text = generate_latest(SimpleNamespace(collect=lambda: families)).decode()  # type: ignore[arg-type]
    return list(text_string_to_metric_families(text))


def shown_value(families: Iterable[Metric], name: str) -> float | None:
    """Return the value of the only sample of this name; None: there is none."""
    values = [sample.value for family in families for sample in family.samples if sample.name == name]
    assert len(values) <= 1, name
    return values[0] if values else None
