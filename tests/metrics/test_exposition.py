"""A scrape is gathered on the event loop and encoded in a thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from actors import telemetry
from kvd.metrics import families
from kvd.metrics.exposition import Answer, Exposition
from protocol.types import DaemonStatus, HostMemory
from tests.sim.loop import simulated


class Idle:
    """A system that does nothing, and knows one model."""

    busy = False

    def status(self) -> DaemonStatus:
        return DaemonStatus(
            version="0.1",
            pid=1,
            uptime_s=2.0,
            home="/home/kvd",
            state="serving",
            budget_bytes=3,
            granted_bytes=0,
            footprint_bytes=4,
            host=HostMemory(total=5, available=6),
            models=[],
        )

    def count_requests(self) -> dict:
        return {}

    def knows(self, model: str) -> bool:
        return model == "m"


@simulated
async def test_observations_during_the_encoding_are_in_the_next_scrape():
    async def late(call) -> Answer:
        exposition.counters(telemetry.RequestAdmitted("m", 0.2))
        exposition.counters(telemetry.RequestPaused("m", "memory"))
        exposition.answered("/metrics", 200)
        return call()

    exposition = Exposition(Idle, run_in_thread=late)
    exposition.counters(telemetry.RequestArrived("m"))
    for number in range(3):
        text = await exposition.text()
        assert f'kvd_request_queue_time_seconds_count{{model="m"}} {number}.0\n' in text
        assert f'kvd_requests_paused_total{{model="m",reason="memory"}} {number}.0\n' in text
        answers = f'kvd_http_responses_total{{code="200",path="/metrics"}} {number}.0\n'
        assert (answers in text) == (number > 0)


@simulated
async def test_scrapes_come_one_after_the_other():
    most = now = 0

    async def slow(call) -> Answer:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(1)
        now -= 1
        return call()

    exposition = Exposition(Idle, run_in_thread=slow)
    texts = await asyncio.gather(*(exposition.text() for _ in range(5)))
    assert (len(texts), most) == (5, 1)


async def test_encoding_runs_in_a_thread(monkeypatch: pytest.MonkeyPatch):
    encoded, threads = families.encoded, []

    def watched(*arguments) -> Answer:
        threads.append(threading.current_thread())
        return encoded(*arguments)

    monkeypatch.setattr(families, "encoded", watched)
    body, kind = await Exposition(Idle).answer("application/openmetrics-text")
    assert b"kvd_draining 0.0\n" in body
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()
