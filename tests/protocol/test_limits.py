"""Every number in configurations and requests has a lower and an upper bound, both finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import inspect

from kvd.config.config import Config
from kvd.http.requests import ChatRequest, CompletionRequest
from protocol.messages import Request

FREE = {"v", "keep_alive"}
"""Fields without bounds here: the protocol's version, of which only one is accepted, and what
`parse_keep_alive` bounds, because it may be a text."""


def numbers(kind: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every number that a value of this type may contain, with its path."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            yield path, kind
        case inspect.StructType(fields=fields):
            for field in fields:
                if field.name not in FREE:
                    yield from numbers(field.type, f"{path}.{field.name}")
        case inspect.UnionType(types=kinds) | inspect.TupleType(item_types=kinds):
            for one in kinds:
                yield from numbers(one, path)
        case inspect.DictType(key_type=key, value_type=value):
            yield from numbers(key, f"{path} (key)")
            yield from numbers(value, f"{path} (value)")
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            yield from numbers(item, f"{path}[]")


@pytest.mark.parametrize(
    ("kind", "some"),
    [
        (Config, ".drain_timeout_s"),
        (Request, ".sampling.temperature"),
        (ChatRequest, ".deadline_s"),
        (CompletionRequest, ".prompt[][]"),
    ],
)
def test_numbers_from_outside_are_bounded(kind, some):
    found = dict(numbers(inspect.type_info(kind)))
    assert some in found
    for path, number in found.items():
        low = number.gt if number.ge is None else number.ge
        high = number.lt if number.le is None else number.le
        assert low is not None, f"{path} has no lower bound"
        assert high is not None, f"{path} has no upper bound"
        assert math.isfinite(low), path
        assert math.isfinite(high), path
