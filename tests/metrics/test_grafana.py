"""Grafana's own types keep every field of the dashboard: Grafana would ignore unknown ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

DASHBOARD = Path(__file__).parents[2] / "deploy/grafana/kvd.json"
BEYOND = ("step", "titleFormat", "textFormat", "tagKeys")
"""Fields of Prometheus annotations that Grafana knows although its types do not have them."""


def lost(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each value of ``ours`` that ``theirs`` does not have."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            if key in theirs:
                yield from lost(value, theirs[key], f"{path}/{key}")
            else:
                yield f"{path}/{key}"
    elif isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            yield path
        for at, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            yield from lost(one, other, f"{path}/{at}")
    elif ours != theirs:
        yield path


def read_and_written(page: dict[str, Any]) -> dict[str, Any]:
    plugins.register_default_plugins()
    written: dict[str, Any] = json.loads(JSONEncoder().encode(Dashboard.from_json(page)))
    return written


def test_grafanas_types_keep_every_field():
    page = json.loads(DASHBOARD.read_text())
    missing = [it for it in lost(page, read_and_written(page)) if not it.endswith(BEYOND)]
    assert not missing


def test_a_field_that_grafana_does_not_know_would_be_noticed():
    page = json.loads(DASHBOARD.read_text())
    panel = next(it for it in page["panels"] if it["type"] == "timeseries")
    panel["options"]["legend"]["displaymode"] = "list"
    panel["fieldConfig"]["defaults"]["custom"]["stacked"] = True
    missing = [it for it in lost(page, read_and_written(page)) if not it.endswith(BEYOND)]
    assert {it.rpartition("/")[2] for it in missing} == {"displaymode", "stacked"}
