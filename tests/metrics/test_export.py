"""Metrics of a real daemon over HTTP and the socket, as Prometheus's own tools read them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse

from kvd.host.home import Home
from kvd.metrics.catalogue import (
    ACCELERATOR_LIMIT,
    ATTENTION_CALL,
    DEVICE_BUDGET,
    DEVICE_GRANTED,
    HOST_BUDGET,
    HOST_GRANTED,
    RANK_FOOTPRINT,
    everything,
)
from tests.metrics.conftest import Promtool
from tests.metrics.prometheus import running
from tests.metrics.served import CONFIG, Served, value_in
from tests.metrics.test_pages import RULES, queries, recipes
from tests.process.helpers import Daemon, wait_for, write_config

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    root = Path(tempfile.mkdtemp(prefix="kvd-"))
    daemon = Daemon(write_config(Home(root / "h"), CONFIG), "--fake")
    try:
        daemon.start()
        it = Served(daemon)
        it.busy()
        yield it
    finally:
        daemon.end()
        shutil.rmtree(root, ignore_errors=True)


def families(text: str) -> set[str]:
    return set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))


def test_every_metric_of_the_page_is_exported_and_no_other(served: Served):
    several = (DEVICE_BUDGET, DEVICE_GRANTED, HOST_BUDGET, HOST_GRANTED, RANK_FOOTPRINT)
    absent = {it.name for it in (ACCELERATOR_LIMIT, ATTENTION_CALL, *several)}
    expected = {it.name for it in everything()} - absent
    assert families(served.settled()) - absent == expected


def test_promtool_finds_no_problem(served: Served, promtool: Promtool):
    done = promtool("check", "metrics", text=served.settled())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_metrics_show_what_the_daemon_did(served: Served):
    text = served.settled()
    for series, value in {
        'kvd_requests_received_total{model=""}': 1,
        'kvd_requests_failed_total{model="",code="unknown_model"}': 1,
        'kvd_requests_failed_total{model="two",code="context_too_long"}': 1,
        'kvd_requests_finished_total{model="one",reason="length"}': 2,
        'kvd_generation_tokens_total{model="one"}': 80,
        'kvd_time_to_first_token_seconds_count{model="one"}': 2,
        'kvd_inter_token_latency_seconds_count{model="one"}': 78,
        'kvd_e2e_request_latency_seconds_count{model="two"}': 1,
        'kvd_request_queue_time_seconds_count{model="two"}': 1,
        'kvd_worker_restarts_total{model="two",reason="killed"}': 1,
        'kvd_worker_restarts_total{model="two",reason="crashed"}': 0,
        'kvd_model_loads_total{model="two"}': 2,
        'kvd_model_loads_total{model="three"}': 1,
        'kvd_model_state{model="three",state="ready"}': 1,
        "kvd_budget_bytes": 190 * 2**20,
        "kvd_budget_violations_total": 0,
        "kvd_models_unloaded": 1,
        "kvd_draining": 0,
    }.items():
        assert value_in(text, series) == value, series
    evicted = [
        value_in(text, f'kvd_governor_actions_total{{model="{it}",kind="evict"}}')
        for it in ("one", "two")
    ]
    assert sorted(evicted) == [0, 1]
    assert value_in(text, 'kvd_prefix_cache_hit_tokens_total{model="one"}') >= 1024
    assert value_in(text, 'kvd_step_phase_seconds_count{model="one",phase="decode"}') > 0
    assert value_in(text, "kvd_granted_bytes") <= 190 * 2**20
    assert value_in(text, "kvd_process_footprint_bytes") > 2**20
    assert value_in(text, "kvd_event_loop_lag_seconds_count") > 0


def test_http_serves_the_same_metrics_in_the_requested_format(served: Served):
    url = f"http://{served.address}/metrics"
    plain = httpx.get(url)
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert families(plain.text) == families(served.text())

    wants = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    opened = httpx.get(url, headers={"Accept": wants})
    assert httpx.get(f"http://{served.address}/made/up").status_code == 404
    assert served.value('kvd_http_responses_total{path="/metrics",code="200"}') == 2
    assert served.value('kvd_http_responses_total{path="",code="404"}') == 1
    assert opened.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert {it.name for it in parse(opened.text)} == {
        name.removesuffix("_total") for name in families(plain.text)
    }


def test_counters_never_fall_when_workers_die(served: Served):
    def counters() -> dict[str, float]:
        found = {}
        for family in parse(
            httpx.get(
                f"http://{served.address}/metrics",
                headers={"Accept": "application/openmetrics-text"},
            ).text
        ):
            if family.type in {"counter", "histogram"}:
                for it in family.samples:
                    found[f"{it.name}{sorted(it.labels.items())}"] = it.value
        return found

    served.complete("three", "The last words of the first process.", 30)
    steps = 'kvd_worker_steps_total{model="three"}'
    before_steps = wait_for(
        "the worker reports its counters", lambda: served.value(steps) >= 30 and served.value(steps)
    )
    before = counters()
    first = served.daemon.worker_pid("three")
    os.kill(first, signal.SIGKILL)
    served.complete("three", "The first words of the second one.", 5)
    assert served.daemon.worker_pid("three") != first
    after = counters()

    fallen = {
        name: (value, after.get(name))
        for name, value in before.items()
        if after.get(name, -1) < value
    }
    assert not fallen
    wait_for("the second process adds its steps", lambda: served.value(steps) >= before_steps + 5)


def test_kvctl_prints_metrics(served: Served):
    done = served.daemon.kvctl("metrics", "restarts")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("# HELP kvd_worker_restarts_total ")
    assert families(done.stdout) == {"kvd_worker_restarts_total"}

    done = served.daemon.kvctl("metrics", "loads", "--json")
    found = {it["labels"]["model"]: it["value"] for it in json.loads(done.stdout)}
    assert found["one"] == 1
    assert found["two"] == 2

    done = served.daemon.kvctl("metrics", "no such thing")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no metric" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_prometheus_scrapes_the_daemon_and_every_panel_has_data(served: Served, tmp_path: Path):
    with running(tmp_path, served.address, RULES) as prometheus:
        scrapes = 'sum(count_over_time(up{{job="kvd"}}[1m])) >= {}'
        wait_for("a first scrape", lambda: prometheus.query(scrapes.format(1)))
        served.disturbed()
        wait_for("scrapes after the disturbances", lambda: prometheus.query(scrapes.format(4)))

        (up,) = prometheus.query('up{job="kvd"}')
        assert up["value"][1] == "1", "the scrape failed"
        (target,) = prometheus.ask("targets")["activeTargets"]
        assert (target["health"], target["lastError"]) == ("up", "")
        silent = queries("1m") + recipes()
        for _ in range(20):
            silent = [expr for expr in silent if not prometheus.query(expr)]
            if not silent:
                break
            served.complete("three", "What is shown while there is work. " * 20, 500)
        assert not silent
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        assert not [rule["name"] for rule in rules if rule["state"] == "firing"]
        assert not [rule for rule in rules if rule.get("lastError")]
