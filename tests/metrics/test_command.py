"""What `kvctl metrics` makes of the text."""

from __future__ import annotations

import pytest

from kvd.cli.metrics import Sample, families, sample
from kvd.metrics import catalogue as c
from kvd.metrics.samples import Buckets, Samples
from kvd.metrics.text import write

NASTY = 'a "quoted"\\back\\n\nslash, {x="y"} é'


def some() -> str:
    samples = Samples()
    samples.put(c.BUDGET, 5)
    samples.put(c.RECEIVED, 3, NASTY)
    samples.put(c.LAG, Buckets((1,) * (len(c.LAG.bounds) + 1), 0.5))
    return write(samples)


def test_each_family_has_its_lines():
    found = dict(families(some()))
    assert list(found) == [c.BUDGET.name, c.RECEIVED.name, c.LAG.name]
    assert found[c.BUDGET.name][2:] == ["kvd_budget_bytes 5"]
    assert len(found[c.LAG.name]) == 2 + len(c.LAG.bounds) + 3
    assert "\n".join(line for lines in found.values() for line in lines) + "\n" == some()


def test_nothing_has_no_families():
    assert list(families("")) == []


def test_samples_are_read_as_they_were_meant():
    lines = [line for line in some().splitlines() if not line.startswith("#")]
    read = [sample(line) for line in lines]
    assert read[:2] == [
        Sample("kvd_budget_bytes", {}, 5),
        Sample("kvd_requests_received_total", {"model": NASTY}, 3),
    ]
    assert Sample("kvd_event_loop_lag_seconds_bucket", {"le": "+Inf"}, 13) in read
    assert Sample("kvd_event_loop_lag_seconds_sum", {}, 0.5) in read


def test_what_is_no_sample_is_not_taken_for_one():
    with pytest.raises(ValueError, match="no sample"):
        sample("# HELP kvd_budget_bytes Memory")
