"""New prompts wait for others that can share their first pass, while rows decode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.worker.core import gathering
from kvd.worker.core import submissions as submissions_module
from kvd.worker.core.gathering import GAP_S, MOST_S, PAUSE_S, Gathering
from protocol.tools import Grammar
from protocol.types import Sampling
from tests.worker.core.driver import Driver
from tests.worker.core.prompts import prompt_of

STEP_S = 0.003
"""Seconds of a decode step."""
PASS_S = 0.03


@dataclass
class Requests:
    """Requests that come at given times, and passes that read all that have come."""

    times: list[float]
    decode_s: float = STEP_S
    now: float = 0.0
    seen: int = 0
    waits: list[float] = field(default_factory=list)
    """By request: seconds from its first step to its pass."""

    def __post_init__(self) -> None:
        self.gathering = Gathering(lambda: self.now)
        self.gathering.is_on = True

    def play(self) -> list[int]:
        """Return how many requests each pass reads."""
        groups: list[int] = []
        while sum(groups) < len(self.times):
            unread = self.seen - sum(groups)
            while self.seen < len(self.times) and self.times[self.seen] <= self.now:
                self.gathering.note_request()
                self.seen += 1
                unread += 1
                self.waits.append(-self.now)
            if not unread and not self.decode_s:
                self.now = self.times[self.seen]
            elif self.gathering.waits(new=unread > 0, coming=False, decode_s=self.decode_s):
                self.now += self.decode_s or PAUSE_S
            elif unread:
                read = range(sum(groups), self.seen)
                self.waits[read.start :] = [self.waits[at] + self.now for at in read]
                groups.append(unread)
                self.now += PASS_S
            else:
                self.now += self.decode_s
        return groups


def test_requests_that_come_together_share_a_pass_while_rows_decode() -> None:
    assert Requests([0.001 * number for number in range(8)]).play() == [8]


def test_an_idle_engine_reads_the_first_request_at_once_and_then_expects_others() -> None:
    burst = [0.001 * number for number in range(8)]
    times = burst + [1.0 + time for time in burst] + [2.0, 3.0]
    requests = Requests(times, decode_s=0.0)
    assert requests.play() == [1, 7, 8, 1, 1]
    assert requests.waits[0] == 0.0
    assert GAP_S <= requests.waits[-2] < GAP_S + 2 * PAUSE_S  # requests came together before
    assert requests.waits[-1] == 0.0


def test_a_single_request_waits_for_one_decode_step() -> None:
    requests = Requests([0.0, 1.0])
    assert requests.play() == [1, 1]
    assert requests.waits == pytest.approx([STEP_S, STEP_S])


def test_no_request_waits_for_a_long_decode_step() -> None:
    requests = Requests([0.0, 0.001, 1.0], decode_s=MOST_S)
    assert requests.play() == [1, 1, 1]
    assert requests.waits == [0.0, 0.0, 0.0]


def test_a_cancelled_wait_does_not_shorten_the_next_one() -> None:
    requests = Requests([])
    requests.gathering.note_request()
    assert requests.gathering.waits(new=True, coming=False, decode_s=STEP_S)
    assert not requests.gathering.waits(new=False, coming=False, decode_s=STEP_S)  # cancelled
    requests.now = 1.0
    requests.gathering.note_request()
    assert requests.gathering.waits(new=True, coming=False, decode_s=STEP_S)


def test_prompts_wait_for_what_is_coming_but_not_for_long() -> None:
    requests = Requests([])
    requests.gathering.note_request()
    waits = []
    for _ in range(20):
        waits.append(requests.gathering.waits(new=True, coming=True, decode_s=0.0))
        requests.now += 0.001
    assert waits.index(False) == pytest.approx(MOST_S / 0.001, abs=1)


@given(
    st.lists(st.floats(0.0, 0.05), min_size=1, max_size=30).map(lambda gaps: [*accumulate(gaps)]),
    st.sampled_from([0.0, STEP_S, MOST_S / 2]),
)
def test_no_prompt_waits_longer_than_the_limit_and_a_step(
    times: list[float], decode_s: float
) -> None:
    requests = Requests(times, decode_s)
    assert sum(requests.play()) == len(times)
    assert max(requests.waits) <= MOST_S + max(decode_s, PAUSE_S)


@pytest.fixture
def gathers(demo: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """An engine whose prompts wait, on a simulated clock that advances one second per step."""
    monkeypatch.setattr(gathering, "GAP_S", 1.5)
    monkeypatch.setattr(gathering, "MOST_S", 1e9)
    engine = demo.engine
    monkeypatch.setattr(engine._prompts.gathering, "is_on", True)
    monkeypatch.setattr(engine._prompts.gathering, "_clock", lambda: float(engine._steps))
    return demo


@pytest.mark.mlx
def test_prompts_of_an_engine_share_a_pass_while_others_decode(
    gathers: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    prompts = gathers.engine._prompts
    prefill = prompts._prefill
    monkeypatch.setattr(
        prompts, "_prefill", lambda chunks: (passes.append(len(chunks)), prefill(chunks))
    )
    greedy = Sampling(temperature=0.0)
    prompt = {rid: prompt_of(30, seed) for seed, rid in enumerate("abcd")}
    gathers.submit("a", prompt["a"], greedy, max_tokens=40)
    gathers.run(until=lambda: len(gathers.outcomes["a"].tokens) > 2)
    for rid in "bcd":
        gathers.submit(rid, prompt[rid], greedy, max_tokens=8)
        gathers.step()
    gathers.run()
    assert passes == [1, 3]
    assert len(gathers.outcomes["a"].tokens) == 40
    for rid in "bcd":
        assert gathers.outcomes[rid] == gathers.alone(prompt[rid], greedy, max_tokens=8)


@pytest.mark.mlx
@pytest.mark.parametrize("tokenizes", [False, True])
def test_prompts_wait_for_texts_that_are_tokenized_and_not_for_grammars(
    gathers: Driver, monkeypatch: pytest.MonkeyPatch, tokenizes: bool
) -> None:
    """A grammar may take seconds to compile."""
    submissions, scheduler = gathers.engine._submissions, gathers.engine._scheduler
    work = submissions.work
    monkeypatch.setattr(submissions, "work", lambda _now: None)  # it stays under way
    if tokenizes:
        monkeypatch.setattr(submissions_module, "LONG_CHARACTERS", 1)
        gathers.submit("other", prompt_of(500), max_tokens=1)
        gathers.submit("under way", "Hello", max_tokens=2)
    else:
        digits = Grammar("regex", "[0-9]+")
        gathers.submit("under way", "Hello", grammar=digits, max_tokens=2)
        gathers.submit("other", prompt_of(500), max_tokens=1)
    assert submissions.waiting
    gathers.step()
    read = scheduler.find("other").prompt_started
    monkeypatch.setattr(submissions, "work", work)
    gathers.run()
    assert read == (not tokenizes)
