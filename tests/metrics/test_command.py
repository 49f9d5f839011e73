"""`kvctl metrics` parses the text of the metrics into families and samples."""

from __future__ import annotations

from kvd.cli.metrics import Sample, families, samples
from kvd.metrics import catalogue as c
from kvd.metrics.families import encoded
from kvd.metrics.samples import Buckets, Samples

NASTY = 'a "quoted"\\back\\n\nslash, {x="y"} é'


def some() -> str:
    put = Samples()
    put.put(c.BUDGET, 5)
    put.put(c.RECEIVED, 3, NASTY)
    put.put(c.LAG, Buckets((1,) * (len(c.LAG.bounds) + 1), 0.5))
    return encoded(put)[0].decode()


def test_each_family_has_its_lines():
    found = dict(families(some()))
    assert list(found) == [c.BUDGET.name, c.RECEIVED.name, c.LAG.name]
    assert found[c.BUDGET.name][2:] == ["kvd_budget_bytes 5.0"]
    assert len(found[c.LAG.name]) == 2 + len(c.LAG.bounds) + 3
    assert "\n".join(line for lines in found.values() for line in lines) + "\n" == some()


def test_an_empty_text_has_no_families():
    assert list(families("")) == []


def test_samples_are_read_with_their_labels_and_values():
    read = samples(some().splitlines())
    assert read[:2] == [
        Sample("kvd_budget_bytes", {}, 5),
        Sample("kvd_requests_received_total", {"model": NASTY}, 3),
    ]
    assert Sample("kvd_event_loop_lag_seconds_bucket", {"le": "+Inf"}, 13) in read
    assert Sample("kvd_event_loop_lag_seconds_sum", {}, 0.5) in read
    assert len(read) == 2 + len(c.LAG.bounds) + 3
