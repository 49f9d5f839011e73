"""Samples that no test with a fake daemon covers: the timing of attention kernels."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvd.metrics import catalogue as c
from kvd.metrics.counters import Counters
from kvd.metrics.gather import Snapshot, samples_of
from kvd.metrics.histogram import Histogram
from kvd.metrics.process import Process
from kvd.metrics.samples import Samples
from protocol.types import FusedAttention
from tests.cli.stub import INFO, MODEL, daemon_status


def gathered(fused: FusedAttention | None) -> Samples:
    """Return the samples of a daemon with one model and this use of kernels."""
    model = replace(MODEL, info=replace(INFO, fused=fused))
    snapshot = Snapshot(
        status=daemon_status(model),
        requests={},
        counters=Counters(lambda _: True),
        lag=Histogram(c.LAG.bounds),
        answers={},
        ignored={},
        process=Process(cpu_s=1.0, open_files=9, most_files=None),
        started_at=1.0,
    )
    return samples_of(snapshot)


@pytest.mark.parametrize(("used", "call_ms"), [(True, 0.25), (False, 2.0)])
def test_timed_attention_exports_the_seconds_of_both_paths(used, call_ms):
    fused = FusedAttention(used=used, call_ms=call_ms, reference_ms=1.5)
    assert gathered(fused).found[c.ATTENTION_CALL] == {
        ("demo", "fused"): call_ms / 1000,
        ("demo", "reference"): 0.0015,
    }


@pytest.mark.parametrize("fused", [None, FusedAttention(used=False, reason="switched off")])
def test_attention_that_was_not_timed_exports_no_seconds(fused):
    found = gathered(fused).found
    assert c.ATTENTION_CALL not in found
    assert found[c.ATTENTION] == {("demo", INFO.attention_path): 1}
