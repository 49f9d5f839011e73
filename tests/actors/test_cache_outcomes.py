"""What the daemon keeps of the prefix cache's outcomes, and which misses it records."""

from __future__ import annotations

import pytest

from actors.cache_outcomes import MAX_OUTCOMES, RECORD_SECONDS, CacheOutcomes
from actors.event_log import EventLog
from protocol.cache_outcome import (
    CacheOutcome,
    CachePart,
    CacheReason,
    Difference,
    Eviction,
    PromptPlace,
)
from protocol.cache_text import advice, sentence, summary

SECRET = "secret words"


class Log:
    """An event log with a clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.notices: list[object] = []
        self.counted: list[object] = []
        self.events = EventLog(self.notices.append, self.counted.append, lambda: self.now)
        self.outcomes = CacheOutcomes(self.events)

    def misses(self) -> list[str]:
        return [one.reason for one in self.events.records if one.kind == "cache_miss"]


def outcome(*parts: tuple[CacheReason, int], **more) -> CacheOutcome:
    return CacheOutcome(parts=[CachePart(*part) for part in parts], chunk=256, **more)


def differs(kind: str, number: int = 0, of: int = 0, tokens: int = 5000) -> CacheOutcome:
    place = PromptPlace(kind, number, of, "user" if kind == "message" else "")
    difference = Difference(1100, place, SECRET, SECRET, SECRET)
    parts = ("memory", 1024), ("between", 76), ("differs", tokens)
    return outcome(*parts, difference=difference)


EVICTED = outcome(("evicted", 4096), ("new", 9), eviction=Eviction(4096, 995.0, "reclaim"))


@pytest.mark.parametrize(
    ("found", "recorded"),
    [
        (differs("message", 3, 17), True),
        (differs("message", 17, 17), False),
        (differs("message", 3, 17, tokens=900), False),
        (differs("tools", 2, 5), True),
        (differs("template"), True),
        (EVICTED, True),
        (outcome(("unread", 2000), unread="damaged"), True),
        (outcome(("memory", 4096), ("new", 9000)), False),
        (outcome(("empty", 9000)), False),
        (outcome(("lowered", 9000)), False),
    ],
)
def test_misses_that_could_be_avoided_are_recorded(found: CacheOutcome, recorded: bool) -> None:
    log = Log()
    log.outcomes.record("1.1", "req_a", "m", found)
    assert len(log.misses()) == recorded
    assert log.counted[0].outcome == found
    assert [one.outcome.parts for one in log.outcomes.find("1.1")] == [found.parts]


def test_a_record_has_positions_and_no_text() -> None:
    log = Log()
    log.outcomes.record("1.1", "req_a", "m", differs("message", 3, 17))
    (text,) = log.misses()
    assert text == (
        "request 1.1: 5,076 of 6,100 prompt tokens were computed; 5,000 of them: differs from the"
        " nearest cached prompt at token 1,100, in message 3 of 17 (user)"
    )
    (record,) = log.events.records
    assert record.numbers == {
        "prompt_tokens": 6100, "cached_tokens": 1024, "token": 1100, "message": 3,
    }  # fmt: skip
    assert SECRET not in str(record) + str(log.notices)


def test_a_client_that_always_misses_does_not_fill_the_log() -> None:
    log = Log()
    for seconds in (0.0, RECORD_SECONDS - 0.1, 0.2):
        log.now += seconds
        log.outcomes.record("1.1", "a", "m", differs("tools", 1, 1))
    log.outcomes.record("1.2", "b", "other", differs("tools", 1, 1))
    assert len(log.misses()) == 3


@pytest.mark.parametrize(
    ("at", "requester", "wanted"),
    [(994.0, "code", "code"), (996.0, "code", ""), (900.0, "code", ""), (994.0, None, "")],
)
def test_the_model_that_needed_the_memory_is_named(at, requester, wanted) -> None:
    log = Log()
    log.now = at
    log.events.record("reclaim_prefixes", "m", "r", requester=requester)
    log.events.record("reclaim_prefixes", "other", "r", requester="wrong")
    log.now = 1000.0
    log.outcomes.record("1.1", "a", "m", EVICTED)
    (found,) = log.outcomes.find("a")
    assert found.outcome.eviction.requester == wanted
    text = sentence(found.outcome, found.outcome.parts[0])
    assert ("code needed the memory" in text) == bool(wanted)


def test_requests_are_found_by_each_of_their_ids_and_the_oldest_are_forgotten() -> None:
    log = Log()
    for number in range(MAX_OUTCOMES + 1):
        log.outcomes.record(f"1.{number}", "http", "m", outcome(("empty", number + 1)))
    newest = log.outcomes.find(None)
    assert [one.outcome.prompt_tokens for one in newest] == list(range(MAX_OUTCOMES + 1, 1, -1))
    assert log.outcomes.find("http") == newest
    assert [one.request for one in log.outcomes.find("1.7")] == ["1.7"]
    assert log.outcomes.find("1.0") == []


@pytest.mark.parametrize("reason", CacheReason.__args__)
def test_every_reason_has_a_text(reason: CacheReason) -> None:
    it = outcome(
        (reason, 3),
        difference=Difference(7),
        eviction=Eviction(3, 1.0, "rows"),
        unread="slower",
    )
    text = sentence(it, it.parts[0])
    assert text not in (reason, f"computed: {reason}")
    assert text.startswith("computed: ") == (reason not in ("memory", "disk"))
    assert advice(it) or reason not in ("differs", "evicted", "between")
    assert summary(it).startswith("0 of 3" if reason in ("memory", "disk") else "3 of 3")
