"""Encoded samples in both formats, as Prometheus's parsers read them."""

from __future__ import annotations

import math

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from kvd.metrics import catalogue as c
from kvd.metrics.families import encoded
from kvd.metrics.histogram import Histogram
from kvd.metrics.samples import Buckets, Samples

NASTY = 'a "quoted"\\back\nslash {x="y"} é'
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPEN = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
both = pytest.mark.parametrize(
    ("parse", "accept"),
    [(parse_plain, ""), (parse_openmetrics, PROMETHEUS_2), (parse_openmetrics, PROMETHEUS_3)],
    ids=["plain", "OpenMetrics", "Prometheus 3"],
)


def some() -> Samples:
    samples = Samples()
    samples.put(c.CPU, 1e-7)
    samples.put(c.BUDGET, 8 * 2**30)
    samples.put(c.RECEIVED, 3, "m")
    samples.put(c.RECEIVED, 2**53 - 1, NASTY)
    samples.put(c.BUILD, 1, "0.1", "3.11")
    lag = Histogram(c.LAG.bounds)
    for value in (0.0001, 0.001, 0.0011, 0.2, 99.0):
        lag.observe(value)
    samples.put(c.LAG, Buckets(tuple(lag.counts), lag.total))
    samples.put(c.PHASES, Buckets((1,) * 16, 2.5), "m", "decode")
    return samples


def text(samples: Samples, accept: str = "") -> str:
    return encoded(samples, accept)[0].decode()


@both
def test_parsers_read_the_gathered_samples(parse, accept):
    read = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parse(text(some(), accept))
        for sample in family.samples
    }
    assert read["kvd_budget_bytes",] == 8 * 2**30
    assert read["kvd_requests_received_total", ("model", "m")] == 3
    assert read["kvd_requests_received_total", ("model", NASTY)] == 2**53 - 1
    assert read["kvd_build_info", ("python", "3.11"), ("version", "0.1")] == 1
    assert read["kvd_process_cpu_seconds_total",] == 1e-7
    buckets = {
        float(labels[0][1]): value
        for (name, *labels), value in read.items()
        if name == "kvd_event_loop_lag_seconds_bucket"
    }
    assert buckets.keys() == {*c.LAG.bounds, math.inf}
    assert (buckets[0.001], buckets[0.0025], buckets[0.25], buckets[math.inf]) == (2, 3, 4, 5)
    assert read["kvd_event_loop_lag_seconds_count",] == 5
    assert read["kvd_event_loop_lag_seconds_sum",] == pytest.approx(99.2022)
    of = ("model", "m"), ("phase", "decode")
    assert read["kvd_step_phase_seconds_bucket", ("le", "0.0005"), *of] == 1
    assert read["kvd_step_phase_seconds_bucket", ("le", "+Inf"), *of] == 16
    assert read["kvd_step_phase_seconds_count", *of] == 16
    assert len(read) == 5 + len(c.LAG.bounds) + 3 + len(c.PHASES.bounds) + 3, "and no more"


@both
def test_families_are_those_of_the_catalogue_in_its_order(parse, accept):
    found = [(it.name, it.type, it.documentation) for it in parse(text(some(), accept))]
    put = (c.BUDGET, c.RECEIVED, c.PHASES, c.BUILD, c.LAG, c.CPU)
    assert found == [(it.name.removesuffix("_total"), it.kind, it.help) for it in put]


def test_counters_keep_their_whole_name_in_the_plain_format():
    lines = text(some()).splitlines()
    assert f"# HELP {c.RECEIVED.name} {c.RECEIVED.help}" in lines
    assert f"# TYPE {c.RECEIVED.name} counter" in lines
    assert f'{c.RECEIVED.name}{{model="m"}} 3.0' in lines


def test_a_metric_without_samples_is_omitted():
    assert text(Samples()) == ""
    assert text(Samples(), OPEN) == "# EOF\n"


def test_wrong_labels_raise():
    samples = Samples()
    with pytest.raises(ValueError, match="kvd_budget_bytes has the labels"):
        samples.put(c.BUDGET, 1, "m")
    with pytest.raises(ValueError, match="kvd_kv_pages has the labels"):
        samples.put(c.KV_PAGES, 1, "m")


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", PLAIN),
        ("*/*", PLAIN),
        ("text/html,*/*;q=0.8", PLAIN),
        ("text/plain;version=0.0.4", PLAIN),
        ("application/openmetrics-text", OPEN),
        ("application/openmetrics-text;version=0.0.1", PLAIN),
        (PROMETHEUS_2, f"{OPEN}; escaping=underscores"),
        (PROMETHEUS_3, f"{OPEN}; escaping=allow-utf-8"),
        ("application/openmetrics-text;version=new", PLAIN),
        ('application/openmetrics-text;version="1.0.0",text/plain', PLAIN),
        ("application/openmetrics-text;version=2.x\udcff", PLAIN),
    ],
)
def test_the_accept_header_selects_the_format(accept, kind):
    body, reported = encoded(some(), accept)
    assert reported == kind
    assert body.endswith(b"# EOF\n") == (kind != PLAIN)
