"""The format, as others read it."""

from __future__ import annotations

import math

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from kvd.metrics import catalogue as c
from kvd.metrics.histogram import Histogram
from kvd.metrics.samples import Buckets, Samples
from kvd.metrics.text import write

NASTY = 'a "quoted"\\back\nslash {x="y"} é'


def some() -> Samples:
    samples = Samples()
    samples.put(c.BUDGET, 8 * 2**30)
    samples.put(c.RECEIVED, 3, "m")
    samples.put(c.RECEIVED, 2**53 - 1, NASTY)
    samples.put(c.BUILD, 1, "0.1", "3.11")
    samples.put(c.CPU, 1e-7)
    lag = Histogram(c.LAG.bounds)
    for value in (0.0001, 0.001, 0.0011, 0.2, 99.0):
        lag.observe(value)
    samples.put(c.LAG, Buckets(lag.counts, lag.total))
    samples.put(c.PHASES, Buckets((1,) * 16, 2.5), "m", "decode")
    return samples


@pytest.mark.parametrize(
    ("parse", "openmetrics"),
    [(parse_plain, False), (parse_openmetrics, True)],
    ids=["0.0.4", "1.0"],
)
def test_what_is_written_is_what_is_read(parse, openmetrics):
    read = {}
    for family in parse(write(some(), openmetrics=openmetrics)):
        for sample in family.samples:
            read[sample.name, *sorted(sample.labels.values())] = sample.value

    assert read["kvd_budget_bytes",] == 8 * 2**30
    assert read["kvd_requests_received_total", "m"] == 3
    assert read["kvd_requests_received_total", NASTY] == 2**53 - 1
    assert read["kvd_build_info", "0.1", "3.11"] == 1
    assert read["kvd_process_cpu_seconds_total",] == 1e-7
    buckets = {
        float(le): value
        for (name, *labels), value in read.items()
        for le in labels
        if name == "kvd_event_loop_lag_seconds_bucket"
    }
    assert buckets.keys() == {*c.LAG.bounds, math.inf}
    assert (buckets[0.001], buckets[0.0025], buckets[0.25], buckets[math.inf]) == (2, 3, 4, 5)
    assert read["kvd_event_loop_lag_seconds_count",] == 5
    assert read["kvd_event_loop_lag_seconds_sum",] == pytest.approx(99.2022)
    assert read["kvd_step_phase_seconds_bucket", "0.0005", "decode", "m"] == 1
    assert read["kvd_step_phase_seconds_bucket", "+Inf", "decode", "m"] == 16


def test_families_have_their_help_and_type_in_both_formats():
    plain = {it.name: it for it in parse_plain(write(some()))}
    opened = {it.name: it for it in parse_openmetrics(write(some(), openmetrics=True))}
    assert plain.keys() == opened.keys()
    for name, family in plain.items():
        assert (family.type, family.documentation) == (
            opened[name].type,
            opened[name].documentation,
        )


def test_a_metric_without_samples_is_not_there():
    assert "kvd_accelerator_limit_bytes" not in write(some())


def test_wrong_labels_are_a_mistake_of_ours():
    samples = Samples()
    samples.put(c.BUDGET, 1, "m")
    with pytest.raises(ValueError, match="zip"):
        write(samples)
