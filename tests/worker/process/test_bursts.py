"""Once a worker has seen a burst, it collects the next one before its first step."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from kvd.worker.fake.engine import FakeEngine
from kvd.worker.process import bursts
from kvd.worker.process.bursts import GAP_S, MOST_S, Bursts
from protocol.types import ModelInfo
from protocol.worker import PhaseChanged, Submit
from tests.worker.process.peer import DEADLINE_S, Thread, submit, wait_until


@dataclass
class Arrivals:
    """Requests with given arrival times, and a clock that only `receive` and `run` move."""

    times: list[float] = field(default_factory=list)
    now: float = 0.0
    waits: int = 0

    def __post_init__(self) -> None:
        self.bursts = Bursts(lambda: self.now)

    def received(self) -> int:
        return sum(time <= self.now for time in self.times)

    def receive(self, seconds: float) -> None:
        self.waits += 1
        coming = [time for time in self.times if time > self.now]
        self.now = min([self.now + seconds, *coming])

    def run(self, *delays: float, step: float = 0.03) -> int:
        """Send a request, and others after ``delays``; return how many the first pass has."""
        before = len(self.times)
        self.now += 1.0
        self.times += [self.now, *(self.now + delay for delay in delays)]
        self.bursts.begin(before, self.received, self.receive)
        together = self.received() - before
        self.now += step
        self.bursts.step_done(self.received() - before - together)
        return together


def test_single_requests_never_wait() -> None:
    arrivals = Arrivals()
    assert [arrivals.run() for _ in range(3)] == [1, 1, 1]
    assert arrivals.waits == 0


def test_a_second_burst_shares_a_pass() -> None:
    arrivals, delays = Arrivals(), [0.001 * number for number in range(1, 8)]
    assert arrivals.run(*delays) == 1
    assert arrivals.run(*delays) == 8
    assert arrivals.run(*delays) == 8


def test_a_wait_without_another_request_is_short_and_not_repeated() -> None:
    arrivals = Arrivals()
    arrivals.run(0.01)
    before = arrivals.now
    assert arrivals.run() == 1
    assert arrivals.now - before == pytest.approx(1.03 + GAP_S)
    waits = arrivals.waits
    assert arrivals.run() == 1
    assert arrivals.waits == waits


def test_a_stream_of_requests_is_not_awaited_to_its_end() -> None:
    arrivals = Arrivals()
    arrivals.run(0.01)
    together = arrivals.run(*(0.001 * number for number in range(1, 1000)))
    assert together == pytest.approx(MOST_S / 0.001, abs=2)


def test_requests_that_come_after_the_first_step_are_no_burst() -> None:
    arrivals = Arrivals()
    arrivals.run(0.5)
    assert not arrivals.bursts.expected


class Engine(FakeEngine):
    """Records its calls. Steps block until the test sets ``sent``."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []
        self.sent = threading.Event()

    def load(self, *given: Any) -> ModelInfo:
        return msgspec.structs.replace(super().load(*given), device="cuda")

    def submit(self, request: Submit) -> int:
        self.done.append(request.rid)
        return super().submit(request)

    def step(self) -> list[Any]:
        self.done.append("step")
        self.sent.wait(DEADLINE_S)
        return super().step()


def test_the_loop_receives_a_burst_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bursts, "GAP_S", DEADLINE_S)  # MOST_S ends the wait, not GAP_S
    engine = Engine()
    peer = Thread(engine, clock=lambda: MOST_S * sum(one != "step" for one in engine.done))
    try:
        peer.load()
        peer.send(submit("a"))
        wait_until(lambda: "step" in engine.done)
        peer.send(submit("b"))
        engine.sent.set()
        peer.wait_for_end("a", "b")
        peer.wait_for(lambda: peer.of(PhaseChanged)[-1].phase == "idle")
        engine.done.clear()
        peer.send(submit("c"))
        wait_until(lambda: "c" in engine.done)
        peer.send(submit("d"))
        peer.wait_for_end("c", "d")
        assert engine.done[:3] == ["c", "d", "step"]
    finally:
        peer.close()
