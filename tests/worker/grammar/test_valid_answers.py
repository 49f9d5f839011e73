"""A share of the campaign: answers by random schemas are valid, judged by jsonschema."""

from __future__ import annotations

import pytest

from tests.worker.core.driver import Driver
from tests.worker.grammar.json_schemas import is_valid
from tests.worker.grammar.valid_campaign import campaign

pytestmark = pytest.mark.mlx


@pytest.mark.slow
def test_answers_are_valid_by_random_schemas(demo: Driver) -> None:
    result = campaign(demo, seed=31000, count=50)

    assert not result.wrong
    assert result.valid == 50


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ('{"type": "string", "format": "ipv4"}', '"1.2.3.256"'),
        ('{"type": "string", "format": "date-time"}', '"2024-02-30T00:00:00Z"'),
        ('{"type": "string", "format": "time"}', '"24:00:00Z"'),
        ('{"type": "number", "maximum": 0.1}', "0.10000000000000000001"),
        ('{"type": "string", "maxLength": 1}', '"ab"'),
        ("{}", "NaN"),
        ("{}", "{"),
    ],
)
def test_the_judge_rejects_what_is_not_valid(schema: str, text: str) -> None:
    assert not is_valid(schema, text)


def test_the_judge_accepts_the_year_0() -> None:
    assert is_valid('{"type": "string", "format": "date"}', '"0000-02-29"')
