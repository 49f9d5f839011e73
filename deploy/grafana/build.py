"""Writes kvd.json, the Grafana dashboard: `python deploy/grafana/build.py`.

Tests compare the file with this script, and every query with the exported metrics.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    timeseries,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

INSTANCE = 'instance=~"$instance"'
MODEL = f'{INSTANCE}, model=~"$model"'
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
Query = prometheus.Dataquery
Panel = Builder[models.Panel]


# -- queries ----------------------------------------------------------------------------------


def rate(metric: str, by: str = "", where: str = MODEL) -> str:
    """Return the sum of a counter's rates per second."""
    group = f" by ({by}) " if by else ""
    return f"sum{group}(rate({metric}{{{where}}}[$__rate_interval]))"


def increase(metric: str, by: str = "") -> str:
    """Return the sum of a counter's increases per interval."""
    group = f" by ({by}) " if by else ""
    return f"sum{group}(increase({metric}{{{MODEL}}}[$__rate_interval]))"


def total(metric: str, by: str, where: str = MODEL) -> str:
    """Return the sum of a gauge."""
    return f"sum by ({by}) ({metric}{{{where}}})"


def quantile(share: float, metric: str, where: str = MODEL, by: str = "le") -> str:
    """Return a quantile of a histogram."""
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', by, where)})"


def query(expr: str, legend: str) -> Query:
    return Query().datasource(SOURCE).expr(expr).legend_format(legend)


def quantiles(metric: str, where: str = MODEL) -> list[Query]:
    """Return the queries of a latency panel."""
    return [
        query(quantile(share, metric, where), f"p{round(share * 100)}")
        for share in (0.5, 0.9, 0.99)
    ]


# -- panels -----------------------------------------------------------------------------------


def lines(
    title: str,
    queries: list[Query],
    description: str,
    *,
    unit: str = "short",
    stack: bool = False,
    bars: bool = False,
    limits: tuple[str, ...] = (),
    maximum: float | None = None,
) -> Panel:
    """Return a panel over time; the series in ``limits`` are dashed lines over stacked ones."""
    style, stacking = kinds.GraphDrawStyle, kinds.StackingMode
    panel = (
        timeseries.Panel()
        .unit(unit)
        .min(0)
        .draw_style(style.BARS if bars else style.LINE)
        .line_width(1)
        .fill_opacity(70 if bars else 25 if stack else 8)
        .show_points(kinds.VisibilityMode.NEVER)
        .stacking(
            common.StackingConfig().mode(stacking.NORMAL if stack else stacking.NONE).group("A")
        )
        .legend(
            common.VizLegendOptions()
            .display_mode(kinds.LegendDisplayMode.LIST)
            .placement(kinds.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(kinds.TooltipDisplayMode.MULTI)
            .sort(kinds.SortOrder.DESCENDING)
        )
    )
    if maximum is not None:
        panel.max(maximum)
    for name, color in zip(limits, ("red", "orange"), strict=False):
        properties = {
            "custom.stacking": {"mode": "none"},
            "custom.drawStyle": "line",
            "custom.fillOpacity": 0,
            "custom.lineWidth": 2,
            "custom.lineStyle": {"fill": "dash", "dash": [8, 6]},
            "color": {"mode": "fixed", "fixedColor": color},
        }
        panel.override_by_name(
            name, [models.DynamicConfigValue(key, value) for key, value in properties.items()]
        )
    return placed(panel, title, queries, description)


def number(
    title: str,
    expr: str,
    description: str,
    *,
    unit: str = "short",
    steps: tuple[tuple[float, str], ...] = (),
) -> Panel:
    """Return a single value, colored by thresholds."""
    thresholds = [models.Threshold(None, "green"), *(models.Threshold(*step) for step in steps)]
    panel = (
        stat.Panel()
        .unit(unit)
        .no_value("-")
        .thresholds(
            dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(thresholds)
        )
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .color_mode(kinds.BigValueColorMode.VALUE)
        .graph_mode(kinds.BigValueGraphMode.NONE)
    )
    return placed(panel, title, [query(expr, "").instant()], description, width=3, height=4)


def heat(title: str, metric: str, description: str) -> Panel:
    """Return a histogram over time."""
    colors = (
        heatmap.HeatmapColorOptions()
        .mode(HeatmapColorMode.SCHEME)
        .scheme("Oranges")
        .steps(64)
        .exponent(0.5)
    )
    panel = (
        heatmap.Panel()
        .calculate(False)
        .cell_gap(1)
        .color(colors)
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .show_tooltip()
        .show_y_histogram()
        .y_axis(heatmap.YAxisConfig().axis_placement(kinds.AxisPlacement.LEFT).unit("s"))
    )
    buckets = query(rate(f"{metric}_bucket", "le"), "{{le}}").format(PromQueryFormat.HEATMAP)
    return placed(panel, title, [buckets], description)


STATES = {
    "ready": "green", "loading": "blue", "spawning": "blue", "draining": "yellow",
    "stopping": "yellow", "stopped": "text", "backoff": "orange", "failed": "red",
}  # fmt: skip


def timeline(title: str, description: str) -> Panel:
    """Return the states of models over time; the query returns a state's position in `STATES`."""
    expr = " + ".join(
        f'max by (model) (kvd_model_state{{{MODEL}, state="{state}"}}) * {position}'
        for position, state in enumerate(STATES, 1)
    )
    texts = {
        str(position): models.ValueMappingResult(text=state, color=color, index=position)
        for position, (state, color) in enumerate(STATES.items(), 1)
    }
    panel = (
        statetimeline.Panel()
        .fill_opacity(70)
        .line_width(0)
        .mappings([models.ValueMap(options=texts)])
        .merge_values(True)
        .show_value(kinds.VisibilityMode.AUTO)
        .row_height(0.9)
    )
    return placed(panel, title, [query(expr, "{{model}}")], description)


def placed(
    panel: Any, title: str, queries: list[Query], description: str, width: int = 12, height: int = 8
) -> Panel:
    for letter, one_query in zip("ABCDEFGH", queries, strict=False):
        panel.with_target(one_query.ref_id(letter))
    size = panel.title(title).description(description).datasource(SOURCE).span(width)
    placed_panel: Panel = size.height(height)
    return placed_panel


# -- rows -------------------------------------------------------------------------------------


def overview() -> list[Panel]:
    requests = f"sum(kvd_requests{{{MODEL}, state=%s}})"
    return [
        number(
            "Models ready", f'sum(kvd_model_state{{{MODEL}, state="ready"}})', "Loaded and serving"
        ),
        number(
            "Memory granted",
            f"sum(kvd_granted_bytes{{{INSTANCE}}}) / sum(kvd_budget_bytes{{{INSTANCE}}})",
            "Sum of all grants as a share of the budget",
            unit="percentunit",
            steps=((0.9, "yellow"), (1.0001, "red")),
        ),
        number("Running", requests % '"running"', "Requests that prefill or decode"),
        number(
            "Waiting",
            requests % '"waiting"',
            "Requests that wait for their model, for memory or for a row",
            steps=((1, "yellow"), (32, "red")),
        ),
        number(
            "Paused",
            requests % '"paused"',
            "Requests that are preempted, or wait for their worker to restart",
            steps=((1, "yellow"),),
        ),
        number("Tokens", rate("kvd_generation_tokens_total"), "Generated tokens per second"),
        number(
            "First token, p95",
            quantile(0.95, "kvd_time_to_first_token_seconds"),
            "Time until the first token of an answer",
            unit="s",
            steps=((2, "yellow"), (10, "red")),
        ),
        number(
            "Failing",
            rate("kvd_requests_failed_total", "", f'{MODEL}, code!="unknown_model"'),
            "Requests per second that end with an error",
            unit="reqps",
            steps=((0.001, "yellow"), (0.1, "red")),
        ),
    ]


def memory() -> list[Panel]:
    budget = f"sum(kvd_budget_bytes{{{INSTANCE}}})"
    used = total("kvd_kv_pages", "model", f'{MODEL}, state="used"')
    return [
        lines(
            "Memory by kind",
            [
                query(total("kvd_model_memory_bytes", "kind"), "{{kind}}"),
                query(budget, "budget"),
                query(f"sum(kvd_granted_bytes{{{INSTANCE}}})", "granted"),
            ],
            "Memory that workers hold or have reserved, with the grants and the budget",
            unit="bytes",
            stack=True,
            limits=("budget", "granted"),
        ),
        lines(
            "Grants by model",
            [
                query(total("kvd_model_granted_bytes", "model"), "{{model}}"),
                query(budget, "budget"),
            ],
            "The budget's distribution over models",
            unit="bytes",
            stack=True,
            limits=("budget",),
        ),
        lines(
            "KV pages by precision level",
            [query(total("kvd_kv_level_bytes", "level"), "{{level}}")],
            "Pages below the highest level belong to requests that were stepped down",
            unit="bytes",
            stack=True,
        ),
        lines(
            "Reclaimable memory",
            [query(total("kvd_reclaimable_bytes", "method"), "{{method}}")],
            "By reclaim method, the cheapest first: spare, prefixes, precision, preempt",
            unit="bytes",
            stack=True,
        ),
        lines(
            "Footprint of the processes",
            [
                query(total("kvd_model_footprint_bytes", "model"), "{{model}}"),
                query(f"sum(kvd_process_footprint_bytes{{{INSTANCE}}})", "daemon"),
                query(f"sum(kvd_host_memory_available_bytes{{{INSTANCE}}})", "available"),
            ],
            "Memory as the system counts it, and the machine's available memory",
            unit="bytes",
            stack=True,
            limits=("available",),
        ),
        lines(
            "KV pages used",
            [query(f"{used} / ({total('kvd_kv_pages', 'model')} > 0)", "{{model}}")],
            "Share of the pages in each model's pools",
            unit="percentunit",
            maximum=1,
        ),
    ]


def latencies() -> list[Panel]:
    first, gap = "kvd_time_to_first_token_seconds", "kvd_inter_token_latency_seconds"
    queue, whole = "kvd_request_queue_time_seconds", "kvd_e2e_request_latency_seconds"
    return [
        lines("Time to first token", quantiles(first), "From a request's arrival", unit="s"),
        lines("Between tokens", quantiles(gap), "Smoothness of streams", unit="s"),
        heat("Time to first token, distribution", first, "Requests by time"),
        heat(
            "Between tokens, distribution",
            gap,
            "A second band shows prompts of other requests, or preemptions",
        ),
        lines(
            "In the queue",
            quantiles(queue),
            "From arrival until a request is admitted, including loads of its model",
            unit="s",
        ),
        lines(
            "Whole requests",
            quantiles(whole),
            "From arrival to the end, for requests without an error",
            unit="s",
        ),
    ]


def throughput() -> list[Panel]:
    hits = rate("kvd_prefix_cache_hit_tokens_total", "model")
    queried = rate("kvd_prefix_cache_query_tokens_total", "model")
    generated = rate("kvd_generation_tokens_total", "model")
    steps_taken = rate("kvd_worker_steps_total", "model")
    return [
        lines(
            "Generated tokens per second",
            [query(generated, "{{model}}")],
            "Tokens sent to clients",
            stack=True,
        ),
        lines(
            "Prompt tokens per second",
            [
                query(rate("kvd_prompt_tokens_computed_total"), "prefilled"),
                query(rate("kvd_prefix_cache_hit_tokens_total"), "prefix cache"),
            ],
            "Tokens that were prefilled, and tokens found in the prefix cache",
            stack=True,
        ),
        lines(
            "Requests",
            [query(total("kvd_requests", "state"), "{{state}}")],
            "Requests in the daemon, by state",
            stack=True,
        ),
        lines(
            "Finished requests per second",
            [
                query(rate("kvd_requests_finished_total", "reason"), "{{reason}}"),
                query(rate("kvd_requests_failed_total", "code") + " > 0", "{{code}}"),
            ],
            "By finish reason (stop, length, cancelled) or error code",
            unit="reqps",
            stack=True,
        ),
        lines(
            "Prefix cache hit ratio",
            [query(f"{hits} / ({queried} > 0)", "{{model}}")],
            "Share of the looked-up tokens that were found",
            unit="percentunit",
            maximum=1,
        ),
        lines(
            "Tokens per step",
            [query(f"{generated} / ({steps_taken} > 0)", "{{model}}")],
            "The batch size that memory and load allow",
        ),
    ]


def prefix_store() -> list[Panel]:
    saved = rate("kvd_prefix_store_saved_seconds_total", "model")
    today = f"kvd_prefix_store_written_today_bytes{{{INSTANCE}}}"
    return [
        lines(
            "Stored prefixes",
            [
                query(f"sum(kvd_prefix_store_bytes{{{INSTANCE}}})", "stored"),
                query(f"sum(kvd_prefix_store_limit_bytes{{{INSTANCE}}})", "limit"),
            ],
            "Bytes on disk, of all models together",
            unit="bytes",
            stack=True,
            limits=("limit",),
        ),
        lines(
            "Prompt tokens from disk per second",
            [query(rate("kvd_prefix_store_hit_tokens_total", "model"), "{{model}}")],
            "Tokens that were read and not prefilled",
            stack=True,
        ),
        lines(
            "Prefill saved",
            [query(saved, "{{model}}")],
            "Seconds of prefill per second, less those of reading",
            unit="s",
            stack=True,
        ),
        lines(
            "Read and written per second",
            [
                query(rate("kvd_prefix_store_read_bytes_total"), "read"),
                query(rate("kvd_prefix_store_written_bytes_total"), "written"),
            ],
            "What is written and never read only wears the disk",
            unit="Bps",
        ),
        lines(
            "Refused and evicted",
            [
                query(increase("kvd_prefix_store_refused_total", "reason"), "{{reason}}"),
                query(
                    f"sum(increase(kvd_prefix_store_evictions_total{{{INSTANCE}}}[$__rate_interval]))",
                    "evicted",
                ),
            ],
            "Segments that were not written, by reason, and segments deleted for others",
            bars=True,
        ),
        lines(
            "Written today",
            [
                query(today, "{{instance}}"),
                query(f"sum(kvd_prefix_store_daily_limit_bytes{{{INSTANCE}}})", "limit"),
            ],
            "Wear of the day (UTC), and prefix_store.daily_writes",
            unit="bytes",
            stack=True,
            limits=("limit",),
        ),
    ]


def governor() -> list[Panel]:
    restarts = increase("kvd_worker_restarts_total", "model, reason")
    return [
        lines(
            "Governor's actions",
            [query(increase("kvd_governor_actions_total", "kind") + " > 0", "{{kind}}")],
            "kvctl events lists each action with its reason and its numbers",
            stack=True,
            bars=True,
        ),
        lines(
            "Paused and resumed",
            [
                query(increase("kvd_requests_paused_total", "reason"), "paused: {{reason}}"),
                query(increase("kvd_requests_resumed_total"), "resumed"),
            ],
            "Requests that were preempted or lost their worker, and requests that resumed",
            bars=True,
        ),
        timeline("State of models", "Unloaded models have no state"),
        lines(
            "Loads and unloaded models",
            [
                query(increase("kvd_model_loads_total", "model") + " > 0", "load of {{model}}"),
                query(f"sum(kvd_models_unloaded{{{INSTANCE}}})", "unloaded"),
            ],
            "Repeated loads mean that models displace each other in the budget",
            bars=True,
            limits=("unloaded",),
        ),
        lines(
            "Precision level of new requests",
            [query(f"max by (model) (kvd_kv_start_level{{{MODEL}}})", "{{model}}")],
            "0 is the highest precision; above 0, memory is short",
        ),
        lines(
            "Worker restarts",
            [query(f"{restarts} > 0", "{{model}}: {{reason}}")],
            "Lost processes; their requests continue in the next process",
            stack=True,
            bars=True,
        ),
    ]


def steps() -> list[Panel]:
    phase = "kvd_step_phase_seconds"
    decode = f'{MODEL}, phase="decode"'
    return [
        lines(
            "Time by phase",
            [query(rate(f"{phase}_sum", "phase"), "{{phase}}")],
            "Seconds per second, all workers together; the rest is waiting",
            unit="s",
            stack=True,
        ),
        lines(
            "Decode steps",
            [
                query(quantile(0.5, phase, decode, "le, model"), "{{model}} p50"),
                query(quantile(0.99, phase, decode, "le, model"), "{{model}} p99"),
            ],
            "Time per decode step",
            unit="s",
        ),
    ]


def daemon() -> list[Panel]:
    cpu = rate("kvd_process_cpu_seconds_total", "instance", INSTANCE)
    files = f"kvd_process_open_fds{{{INSTANCE}}} / kvd_process_max_fds{{{INSTANCE}}}"
    return [
        lines(
            "Event-loop lag",
            quantiles("kvd_event_loop_lag_seconds", INSTANCE),
            "Above 50 ms, all streams are late",
            unit="s",
        ),
        lines(
            "HTTP responses per second",
            [query(rate("kvd_http_responses_total", "code", INSTANCE), "{{code}}")],
            "401 and 403: refused clients. 429 and 503: overload",
            unit="reqps",
            stack=True,
        ),
        lines(
            "The daemon's CPU and files",
            [query(cpu, "{{instance}}: cores"), query(files, "{{instance}}: share of files")],
            "The daemon can use one core",
            unit="percentunit",
        ),
    ]


ROWS = {
    "": overview,
    "Memory": memory,
    "Latency": latencies,
    "Throughput": throughput,
    "Prefix store": prefix_store,
    "Governor and models": governor,
    "Steps": steps,
    "Daemon": daemon,
}


# -- the dashboard ----------------------------------------------------------------------------


def variable(name: str, label: str, values: str) -> dashboard.QueryVariable:
    """Return a filter by the values of a label."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query({"query": values, "refId": name})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


EVENTS = "evict|requeue|reclaim_precision|reclaim_preempt|load_refused|quarantine|violation|budget"
ANNOTATIONS = {
    "Governor": {
        "expr": f'increase(kvd_governor_actions_total{{{MODEL}, kind=~"{EVENTS}"}}[1m]) > 0',
        "iconColor": "orange",
        "titleFormat": "{{kind}}",
        "textFormat": "{{model}}",
    },
    "Restarts": {
        "expr": f"increase(kvd_worker_restarts_total{{{MODEL}}}[1m]) > 0",
        "iconColor": "red",
        "titleFormat": "worker restarted",
        "textFormat": "{{model}}: {{reason}}",
    },
}
"""Marks over all panels. The SDK lacks Prometheus's own fields, so they are added to its output."""


def build() -> models.Dashboard:
    page = (
        dashboard.Dashboard("kvd")
        .uid("kvd")
        .description("Memory, requests and models under one budget")
        .tags(["kvd", "llm"])
        .version(1)
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
        .with_variable(variable("instance", "Instance", "label_values(kvd_build_info, instance)"))
        .with_variable(
            variable("model", "Model", f"label_values(kvd_model_state{{{INSTANCE}}}, model)")
        )
    )
    for name in ANNOTATIONS:
        page.annotation(dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(True))
    for title, panels in ROWS.items():
        if title:
            page.with_row(dashboard.Row(title))
        for panel in panels():
            page.with_panel(panel)
    result = page.build()
    for number_of_panel, panel_model in enumerate(result.panels or [], 1):
        panel_model.id_val = number_of_panel
    return result


def text() -> str:
    """Return the content of kvd.json."""
    page = json.loads(JSONEncoder().encode(build()))
    for annotation in page["annotations"]["list"]:
        annotation.update(ANNOTATIONS[annotation["name"]], step="60s", tagKeys="kind,reason")
    return json.dumps(page, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("kvd.json").write_text(text(), encoding="utf-8")
