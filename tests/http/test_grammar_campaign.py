"""A share of the campaign of hostile grammars, against the daemon of this folder's tests."""

from __future__ import annotations

import pytest

from kvd.client import AsyncClient
from tests.http.grammar_campaign import campaign
from tests.http.live import Live

pytestmark = [pytest.mark.process, pytest.mark.mlx, pytest.mark.slow]


async def test_hostile_grammars_do_not_change_a_stream(demo: Live) -> None:
    async with AsyncClient(home=demo.home.root) as client:
        report = await campaign(client, seed=1, count=60)

    assert not report.wrong
    assert not report.stream.changed
    assert len(report.workers) == 1
    assert report.stream.streams
    assert all(report.stream.own_ms["beside"].values())
    assert sum(report.outcomes.values()) == 60
    assert {"stop", "invalid_request"} <= report.outcomes.keys()
