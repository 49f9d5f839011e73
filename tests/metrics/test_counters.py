"""Counters: sums of observations that never fall, for a limited number of models."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from actors import telemetry
from actors.machines.process_exit import CAUSES
from kvd.metrics.counters import (
    ACTIONS,
    FAILURES,
    GLOBAL_ACTIONS,
    KEPT_AFTER_UNLOAD,
    NO_MODEL,
    Counters,
)
from protocol.errors import KvdError
from protocol.types import DurationHistogram, MemoryUse, PrefixUse, WorkerStats

DOCS = Path(__file__).parents[2] / "docs"


def counters_of(*models: str) -> tuple[Counters, set[str]]:
    known = set(models)
    return Counters(known.__contains__), known


def stats(step: int, hits: int = 0, decode: int = 0, peak: int = 0) -> WorkerStats:
    return WorkerStats(
        step=step,
        computed_tokens=10 * step,
        flushes=step // 2,
        kernel_launches=3 * step,
        prefix=PrefixUse(queries=1, query_tokens=2 * hits, hit_tokens=hits, evicted=4),
        phases={"decode": DurationHistogram((decode,) + (0,) * 15, decode * 0.0004)},
        memory=MemoryUse(peak=peak),
    )


def test_the_life_of_a_request():
    counters, _ = counters_of("m")
    for moment in (
        telemetry.RequestArrived("m"),
        telemetry.RequestAccepted("m", 12),
        telemetry.RequestAdmitted("m", 0.05),
        telemetry.TokensSent("m", 1, first_s=0.2),
        telemetry.TokensSent("m", 4, gap_s=0.04),
        telemetry.RequestPaused("m", "memory"),
        telemetry.RequestResumed("m"),
        telemetry.RequestFinished("m", "length", 3.0),
        telemetry.RequestFailed("m", "overloaded"),
    ):
        counters(moment)

    it = counters.models["m"]
    assert (it.received, it.prompt_tokens, it.generated, it.resumed) == (1, 12, 5, 1)
    assert it.finished == {"stop": 0, "length": 1, "cancelled": 0}
    assert (it.failed["overloaded"], it.paused["memory"]) == (1, 1)
    assert (it.queue.total, it.first.total, it.whole.total) == (0.05, 0.2, 3.0)
    assert sum(it.gaps.counts) == 4, "each token has a gap"
    assert it.gaps.total == pytest.approx(0.04)
    assert it.gaps.counts[it.gaps.bounds.index(0.01)] == 4, "divided among the tokens"


def test_a_value_at_a_bound_is_in_its_bucket_and_a_huge_one_in_the_last():
    counters, _ = counters_of("m")
    counters(telemetry.RequestAdmitted("m", 0.3))
    counters(telemetry.RequestAdmitted("m", 1e9))
    queue = counters.models["m"].queue
    assert queue.counts[queue.bounds.index(0.3)] == 1
    assert queue.counts[-1] == 1


def test_counters_continue_from_those_of_the_last_process():
    counters, _ = counters_of("m")
    seen = []
    for life, reported in ((1, 5), (1, 9), (2, 2), (2, 4), (3, 0), (3, 7)):
        counters(
            telemetry.StatsReported("m", life, stats(reported, hits=reported, decode=reported))
        )
        seen.append(counters.models["m"].worker.total)

    assert [it.step for it in seen] == [5, 9, 11, 13, 13, 20]
    for before, after in itertools.pairwise(seen):
        assert after.computed_tokens >= before.computed_tokens
        assert after.flushes >= before.flushes
        assert after.kernel_launches >= before.kernel_launches
        assert after.prefix.hit_tokens >= before.prefix.hit_tokens
        assert after.prefix.evicted >= before.prefix.evicted
        assert after.phases["decode"].total_s >= before.phases["decode"].total_s
    assert seen[-1].phases["decode"].counts[0] == 20
    assert seen[-1].prefix == PrefixUse(queries=3, query_tokens=40, hit_tokens=20, evicted=12)


def test_a_peak_is_kept_until_the_next_process():
    counters, _ = counters_of("m")
    for life, peak, expected in ((1, 50, 50), (1, 20, 50), (1, 70, 70), (2, 10, 10)):
        counters(telemetry.StatsReported("m", life, stats(1, peak=peak)))
        assert counters.models["m"].worker.peak == expected


def test_requests_for_unknown_models_are_counted_without_a_model():
    counters, _ = counters_of("m")
    for number in range(1000):
        counters(telemetry.RequestArrived(f"made up {number}"))
        counters(telemetry.RequestFailed(f"made up {number}", "unknown_model"))

    assert counters.models.keys() == {NO_MODEL}
    assert counters.models[NO_MODEL].failed["unknown_model"] == 1000
    assert counters.name("made up 7") == NO_MODEL


def test_an_unloaded_model_keeps_its_counters_until_many_others_are_unloaded():
    counters, known = counters_of("first")
    counters(telemetry.RequestArrived("first"))
    known.clear()
    counters(telemetry.RequestFailed("first", "draining"))
    assert counters.models["first"].failed["draining"] == 1

    for number in range(1000):
        known.add(f"m{number}")
        counters(telemetry.StateChanged(f"m{number}", "ready"))
        known.discard(f"m{number}")

    assert "first" not in counters.models
    assert len(counters.models) <= KEPT_AFTER_UNLOAD + 2, (
        "`KEPT_AFTER_UNLOAD` unloaded models, the entry without a model, and the newest model"
    )


def test_counters_of_known_models_are_never_dropped():
    counters, known = counters_of("stays")
    counters(telemetry.RequestArrived("stays"))
    for number in range(100):
        known.add(f"m{number}")
        counters(telemetry.RequestArrived(f"m{number}"))
        known.discard(f"m{number}")
    counters(telemetry.RequestArrived("stays"))
    assert counters.models["stays"].received == 2


def test_loads_and_restarts():
    counters, _ = counters_of("m")
    for state, cause in (
        ("spawning", ""),
        ("loading", ""),
        ("ready", ""),
        ("backoff", "killed"),
        ("spawning", ""),
        ("ready", ""),
        ("failed", "model_failed"),
    ):
        counters(telemetry.StateChanged("m", state, cause))
    it = counters.models["m"]
    assert it.loads == 2
    assert {reason: count for reason, count in it.restarts.items() if count} == {"killed": 1}
    assert it.restarts.keys() == set(CAUSES)


def test_counts_of_all_event_kinds_start_at_0():
    section = (DOCS / "protocol.md").read_text().partition("| kind | |")[2].partition("\n## ")[0]
    kinds = {
        kind
        for row in re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
        for kind in re.findall(r"`([a-z_]+)`", row)
    }
    assert kinds == {*ACTIONS, *GLOBAL_ACTIONS}


def test_failures_whose_counts_start_at_0_are_error_codes_of_kvd():
    def codes(base: type[KvdError]) -> set[str]:
        return {base.code}.union(*(codes(sub) for sub in base.__subclasses__()))

    assert codes(KvdError) >= {*FAILURES, "unknown_model"}
