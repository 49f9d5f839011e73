"""Write kvd.json, the Grafana dashboard: `python deploy/grafana/build.py`.

A panel is a line or two here, and forty of JSON there; tests hold the file to what this writes, and
every query to the metrics that a daemon really exports. Change this, not the file.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

HERE = 'instance=~"$instance"'
MODEL = f'{HERE}, model=~"$model"'
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
"""Columns of Grafana's grid."""

Json = dict[str, Any]
_ids = itertools.count(1)


# -- queries ----------------------------------------------------------------------------------


def rate(metric: str, by: str, where: str = MODEL, *more: str) -> str:
    """Return a counter's rise a second, summed."""
    kept = f" by ({by}) " if by else ""
    return f"sum{kept}(rate({metric}{{{', '.join([where, *more])}}}[$__rate_interval]))"


def total(metric: str, by: str, where: str = MODEL, *more: str) -> str:
    """Return a gauge's sum."""
    return f"sum by ({by}) ({metric}{{{', '.join([where, *more])}}})"


def quantile(share: float, metric: str, by: str = "", where: str = MODEL, *more: str) -> str:
    """Return a quantile of a histogram."""
    kept = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', kept, where, *more)})"


def quantiles(metric: str, where: str = MODEL, *more: str) -> list[Json]:
    """Return the queries of a latency panel."""
    return [
        query(quantile(share, metric, "", where, *more), f"p{round(share * 100)}")
        for share in (0.5, 0.9, 0.99)
    ]


def query(expr: str, legend: str, **more: Any) -> Json:
    """Return one query of a panel."""
    return {"datasource": SOURCE, "expr": expr, "legendFormat": legend, **more}


def now(expr: str) -> Json:
    """Return a query for the newest value alone."""
    return query(expr, "", instant=True, range=False)


# -- panels -----------------------------------------------------------------------------------


def panel(
    kind: str, title: str, targets: list[Json], width: int, says: str, height: int = 8, **more: Any
) -> Json:
    """Return a panel; `grid` gives it its place."""
    for letter, target in zip("ABCDEFGH", targets, strict=False):
        target["refId"] = letter
    return {
        "id": next(_ids),
        "type": kind,
        "title": title,
        "description": says,
        "datasource": SOURCE,
        "targets": targets,
        "gridPos": {"w": width, "h": height},
        **more,
    }


def lines(
    title: str,
    targets: list[Json],
    says: str,
    *,
    unit: str = "short",
    width: int = 12,
    stack: bool = False,
    bars: bool = False,
    above: tuple[str, ...] = (),
    most: float | None = None,
) -> Json:
    """Return a panel over time; the series named in `above` are lines over what is stacked."""
    custom: Json = {
        "drawStyle": "bars" if bars else "line",
        "lineWidth": 1,
        "fillOpacity": 70 if bars else 25 if stack else 8,
        "gradientMode": "none",
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stack else "none", "group": "A"},
    }
    defaults: Json = {"unit": unit, "min": 0, "custom": custom}
    if most is not None:
        defaults["max"] = most
    overrides = [
        {
            "matcher": {"id": "byName", "options": name},
            "properties": [
                {"id": "custom.stacking", "value": {"mode": "none"}},
                {"id": "custom.drawStyle", "value": "line"},
                {"id": "custom.fillOpacity", "value": 0},
                {"id": "custom.lineWidth", "value": 2},
                {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 6]}},
                {"id": "color", "value": {"mode": "fixed", "fixedColor": color}},
            ],
        }
        for name, color in zip(above, ("red", "orange"), strict=False)
    ]
    return panel(
        "timeseries",
        title,
        targets,
        width,
        says,
        fieldConfig={"defaults": defaults, "overrides": overrides},
        options={
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    )


def number(
    title: str,
    expr: str,
    says: str,
    *,
    unit: str = "short",
    steps: tuple[tuple[float, str], ...] = (),
) -> Json:
    """Return a single value, colored from these thresholds on."""
    thresholds: list[Json] = [{"color": "green", "value": None}]
    thresholds += [{"color": color, "value": value} for value, color in steps]
    defaults = {"unit": unit, "thresholds": {"mode": "absolute", "steps": thresholds}}
    return panel(
        "stat",
        title,
        [now(expr)],
        3,
        says,
        height=4,
        fieldConfig={"defaults": defaults | {"noValue": "-"}, "overrides": []},
        options={
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "none",
            "textMode": "auto",
        },
    )


def heat(title: str, metric: str, says: str) -> Json:
    """Return a histogram over time."""
    target = query(rate(f"{metric}_bucket", "le"), "{{le}}", format="heatmap")
    return panel(
        "heatmap",
        title,
        [target],
        12,
        says,
        options={
            "calculate": False,
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5},
            "filterValues": {"le": 1e-9},
            "tooltip": {"mode": "single", "yHistogram": True},
            "yAxis": {"axisPlacement": "left", "unit": "s"},
        },
    )


STATES = {
    "ready": "green", "loading": "blue", "spawning": "blue", "draining": "yellow",
    "stopping": "yellow", "stopped": "text", "backoff": "orange", "failed": "red",
}  # fmt: skip


def timeline(title: str, says: str) -> Json:
    """Return the states of models over time."""
    worth = " + ".join(
        f'max by (model) (kvd_model_state{{{MODEL}, state="{state}"}}) * {number}'
        for number, state in enumerate(STATES, 1)
    )
    mapped = {
        str(number): {"text": state, "color": color, "index": number}
        for number, (state, color) in enumerate(STATES.items(), 1)
    }
    return panel(
        "state-timeline",
        title,
        [query(worth, "{{model}}")],
        12,
        says,
        fieldConfig={
            "defaults": {
                "custom": {"fillOpacity": 70, "lineWidth": 0},
                "mappings": [{"type": "value", "options": mapped}],
            },
            "overrides": [],
        },
        options={"mergeValues": True, "showValue": "auto", "rowHeight": 0.9},
    )


# -- the page ---------------------------------------------------------------------------------


def overview() -> list[Json]:
    """Return what to look at first."""
    first = "kvd_time_to_first_token_seconds"
    failing = rate("kvd_requests_failed_total", "", MODEL, 'code!="unknown_model"')
    return [
        number(
            "Models ready", f'sum(kvd_model_state{{{MODEL}, state="ready"}})', "Loaded and serving"
        ),
        number(
            "Memory granted",
            f"sum(kvd_granted_bytes{{{HERE}}}) / sum(kvd_budget_bytes{{{HERE}}})",
            "Of the budget: what workers may hold",
            unit="percentunit",
            steps=((0.9, "yellow"), (1.0001, "red")),
        ),
        number(
            "Running", f'sum(kvd_requests{{{MODEL}, state="running"}})', "Requests that make tokens"
        ),
        number(
            "Waiting",
            f'sum(kvd_requests{{{MODEL}, state="waiting"}})',
            "Requests that wait for their model, for memory or for a place",
            steps=((1, "yellow"), (32, "red")),
        ),
        number(
            "Paused",
            f'sum(kvd_requests{{{MODEL}, state="paused"}})',
            "Requests that gave their memory to others, or wait for a worker to come back",
            steps=((1, "yellow"),),
        ),
        number(
            "Tokens",
            rate("kvd_generation_tokens_total", ""),
            "Generated, a second",
        ),
        number(
            "First token, p95",
            quantile(0.95, first),
            "Until the first token of an answer",
            unit="s",
            steps=((2, "yellow"), (10, "red")),
        ),
        number(
            "Failing",
            failing,
            "Requests that end with an error, a second",
            unit="reqps",
            steps=((0.001, "yellow"), (0.1, "red")),
        ),
    ]


def memory() -> list[Json]:
    """Return who has the budget, and what for."""
    budget = query(f"sum(kvd_budget_bytes{{{HERE}}})", "budget")
    used = total("kvd_kv_pages", "model", MODEL, 'state="used"')
    return [
        lines(
            "Memory by kind",
            [
                query(total("kvd_model_memory_bytes", "kind"), "{{kind}}"),
                budget,
                query(f"sum(kvd_granted_bytes{{{HERE}}})", "granted"),
            ],
            "What workers hold or have reserved, below what they may and what there is",
            unit="bytes",
            stack=True,
            above=("budget", "granted"),
        ),
        lines(
            "Grants by model",
            [query(total("kvd_model_granted_bytes", "model"), "{{model}}"), budget],
            "Who may hold how much of the budget",
            unit="bytes",
            stack=True,
            above=("budget",),
        ),
        lines(
            "KV pages by level",
            [query(total("kvd_kv_level_bytes", "level"), "{{level}}")],
            "Below the top: requests were stepped down to make room",
            unit="bytes",
            stack=True,
        ),
        lines(
            "What could be given back",
            [query(total("kvd_reclaimable_bytes", "means"), "{{means}}")],
            "By means, the cheapest first: spare, prefixes, a lower level, parking",
            unit="bytes",
            stack=True,
        ),
        lines(
            "Footprint of the processes",
            [
                query(total("kvd_model_footprint_bytes", "model"), "{{model}}"),
                query(f"sum(kvd_process_footprint_bytes{{{HERE}}})", "daemon"),
                query(f"sum(kvd_host_memory_available_bytes{{{HERE}}})", "left on the machine"),
            ],
            "As the system counts it, and what it has left",
            unit="bytes",
            stack=True,
            above=("left on the machine",),
        ),
        lines(
            "KV pages used",
            [
                query(
                    f"{used} / ({total('kvd_kv_pages', 'model')} > 0)",
                    "{{model}}",
                )
            ],
            "Of those in the pools of each model",
            unit="percentunit",
            most=1,
        ),
    ]


def latencies() -> list[Json]:
    """Return how long people wait."""
    first, gap = "kvd_time_to_first_token_seconds", "kvd_inter_token_latency_seconds"
    return [
        lines("Time to first token", quantiles(first), "What people feel first", unit="s"),
        lines("Between tokens", quantiles(gap), "How fluently text comes", unit="s"),
        heat("Time to first token, all of it", first, "Each column: how many took how long"),
        heat("Between tokens, all of it", gap, "A second band: prompts of others, or parking"),
        lines(
            "In the queue",
            quantiles("kvd_request_queue_time_seconds"),
            "Until a request has memory and a place; loads of its model are in it",
            unit="s",
        ),
        lines(
            "Whole requests",
            quantiles("kvd_e2e_request_latency_seconds"),
            "From arrival to the end, of those that ended well",
            unit="s",
        ),
    ]


def throughput() -> list[Json]:
    """Return what comes and what goes."""
    hits = rate("kvd_prefix_cache_hit_tokens_total", "model")
    asked = rate("kvd_prefix_cache_query_tokens_total", "model")
    generated = rate("kvd_generation_tokens_total", "model")
    return [
        lines(
            "Tokens generated, a second",
            [query(generated, "{{model}}")],
            "What went to clients",
            stack=True,
        ),
        lines(
            "Prompt tokens, a second",
            [
                query(rate("kvd_prompt_tokens_computed_total", ""), "read"),
                query(rate("kvd_prefix_cache_hit_tokens_total", ""), "found in the cache"),
            ],
            "What was read, and what need not be",
            stack=True,
        ),
        lines(
            "Requests",
            [query(total("kvd_requests", "state"), "{{state}}")],
            "What the requests do that the daemon holds",
            stack=True,
        ),
        lines(
            "Requests over, a second",
            [
                query(rate("kvd_requests_finished_total", "reason"), "{{reason}}"),
                query(rate("kvd_requests_failed_total", "code") + " > 0", "{{code}}"),
            ],
            "How they ended: stop, length and cancelled, or the code of an error",
            unit="reqps",
            stack=True,
        ),
        lines(
            "Prompts found in the cache",
            [query(f"{hits} / ({asked} > 0)", "{{model}}")],
            "Tokens that need not be read again, of those looked up",
            unit="percentunit",
            most=1,
        ),
        lines(
            "Tokens in a step",
            [query(f"{generated} / ({rate('kvd_worker_steps_total', 'model')} > 0)", "{{model}}")],
            "How many requests share one: the batch that memory and load allow",
        ),
    ]


def governor() -> list[Json]:
    """Return what was done to make room."""
    done = f"sum by (kind) (increase(kvd_governor_actions_total{{{MODEL}}}[$__rate_interval])) > 0"
    paused = f"sum by (reason) (increase(kvd_requests_paused_total{{{MODEL}}}[$__rate_interval]))"
    resumed = f"sum(increase(kvd_requests_resumed_total{{{MODEL}}}[$__rate_interval]))"
    loads = f"sum by (model) (increase(kvd_model_loads_total{{{MODEL}}}[$__rate_interval])) > 0"
    return [
        lines(
            "Governor's actions",
            [query(done, "{{kind}}")],
            "kvctl events has each of them, with its reason and its numbers",
            stack=True,
            bars=True,
        ),
        lines(
            "Parked and resumed",
            [query(paused, "paused: {{reason}}"), query(resumed, "resumed")],
            "Requests that gave way, and those that went on",
            bars=True,
        ),
        timeline("State of models", "Models that are asleep are not here"),
        lines(
            "Loads, and models asleep",
            [
                query(loads, "load of {{model}}"),
                query(f"sum(kvd_models_unloaded{{{HERE}}})", "asleep"),
            ],
            "Loads again and again: models push each other out of the budget",
            bars=True,
            above=("asleep",),
        ),
        lines(
            "Level of new requests",
            [query(f"max by (model) (kvd_kv_start_level{{{MODEL}}})", "{{model}}")],
            "0 is the top of the ladder; above it memory is short",
        ),
        lines(
            "Worker restarts",
            [
                query(
                    "sum by (model, reason) "
                    f"(increase(kvd_worker_restarts_total{{{MODEL}}}[$__rate_interval])) > 0",
                    "{{model}}: {{reason}}",
                )
            ],
            "Processes that were lost; their requests go on in the next one",
            stack=True,
            bars=True,
        ),
    ]


def steps() -> list[Json]:
    """Return what workers spend their time on."""
    decode = 'phase="decode"'
    return [
        lines(
            "Time by phase",
            [query(rate("kvd_step_phase_seconds_sum", "phase"), "{{phase}}")],
            "Seconds a second, of all workers together; the rest is waiting",
            unit="s",
            stack=True,
        ),
        lines(
            "Decode steps",
            [
                query(quantile(share, "kvd_step_phase_seconds", "model", MODEL, decode), legend)
                for share, legend in ((0.5, "{{model}} p50"), (0.99, "{{model}} p99"))
            ],
            "How long one takes",
            unit="s",
        ),
    ]


def daemon() -> list[Json]:
    """Return how the daemon itself is."""
    lag = "kvd_event_loop_lag_seconds"
    cpu = f"sum by (instance) (rate(kvd_process_cpu_seconds_total{{{HERE}}}[$__rate_interval]))"
    files = f"kvd_process_open_fds{{{HERE}}} / kvd_process_max_fds{{{HERE}}}"
    return [
        lines("Event-loop lag", quantiles(lag, HERE), "Above 50 ms all streams are late", unit="s"),
        lines(
            "Answers of HTTP, a second",
            [query(rate("kvd_http_responses_total", "code", HERE), "{{code}}")],
            "401 and 403: not allowed; 429 and 503: sent away",
            unit="reqps",
            stack=True,
        ),
        lines(
            "The daemon's own CPU and files",
            [query(cpu, "{{instance}}: cores"), query(files, "{{instance}}: share of files")],
            "One core is all that it can use",
            unit="percentunit",
        ),
    ]


def grid() -> list[Json]:
    """Return all panels, each in its place."""
    rows = {
        "": overview(),
        "Memory": memory(),
        "Latency": latencies(),
        "Throughput": throughput(),
        "Governor and models": governor(),
        "Steps": steps(),
        "Daemon": daemon(),
    }
    placed, y = [], 0
    for title, panels in rows.items():
        if title:
            at = {"x": 0, "y": y, "w": WIDTH, "h": 1}
            row = {"id": next(_ids), "type": "row", "title": title, "collapsed": False}
            placed.append(row | {"gridPos": at, "panels": []})
            y += 1
        x = 0
        for one in panels:
            place = one["gridPos"]
            if x + place["w"] > WIDTH:
                x, y = 0, y + place["h"]
            place |= {"x": x, "y": y}
            x += place["w"]
            placed.append(one)
        y += panels[-1]["gridPos"]["h"]
    return placed


def variable(name: str, label: str, asked: str) -> Json:
    """Return a choice above the panels: some values of a label, or all."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "definition": asked,
        "query": {"query": asked, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def annotation(name: str, expr: str, color: str, title: str, text: str) -> Json:
    """Return marks over all panels."""
    return {
        "name": name,
        "datasource": SOURCE,
        "enable": True,
        "iconColor": color,
        "expr": expr,
        "step": "60s",
        "titleFormat": title,
        "textFormat": text,
        "tagKeys": "kind,reason",
    }


def dashboard() -> Json:
    """Return all of it."""
    source = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
    }
    kinds = (
        "evict|requeue|reclaim_precision|reclaim_preempt|load_refused|quarantine|violation|budget"
    )
    done = f'increase(kvd_governor_actions_total{{{MODEL}, kind=~"{kinds}"}}[1m]) > 0'
    lost = f"increase(kvd_worker_restarts_total{{{MODEL}}}[1m]) > 0"
    return {
        "uid": "kvd",
        "title": "kvd",
        "description": "Models under one memory budget: who has it, who waits, and what was done",
        "tags": ["kvd", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [],
        "templating": {
            "list": [
                source,
                variable("instance", "Instance", "label_values(kvd_build_info, instance)"),
                variable("model", "Model", f"label_values(kvd_model_state{{{HERE}}}, model)"),
            ]
        },
        "annotations": {
            "list": [
                annotation("Governor", done, "orange", "{{kind}}", "{{model}}"),
                annotation("Restarts", lost, "red", "worker restarted", "{{model}}: {{reason}}"),
            ]
        },
        "panels": grid(),
    }


def text() -> str:
    """Return the file."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("kvd.json").write_text(text(), encoding="utf-8")
