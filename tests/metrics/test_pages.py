"""`docs/metrics.md`, the dashboard and the alerts are valid and use only exported metrics."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from pathlib import Path

import pytest

from kvd.cli.app import COMMANDS
from kvd.metrics import catalogue
from kvd.metrics.catalogue import Metric, everything
from tests.metrics.conftest import Promtool

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/kvd.rules.yml"
PAGE = ROOT / "docs/metrics.md"
DASHBOARD = ROOT / "deploy/grafana/kvd.json"


def dashboard() -> dict:
    return json.loads(DASHBOARD.read_text())


def queries(interval: str = "1m") -> list[str]:
    """Return every PromQL expression of the dashboard, as Grafana would send it."""
    found = [it["expr"] for it in dashboard()["annotations"]["list"]]
    found += [t["expr"] for panel in dashboard()["panels"] for t in panel.get("targets", [])]
    texts = []
    for expr in found:
        text = re.sub(r"\$(instance|model)\b", ".*", expr).replace("$__rate_interval", interval)
        assert "$" not in text, expr
        texts.append(text)
    return texts


def recipes() -> list[str]:
    """Return the PromQL expressions of `docs/metrics.md`."""
    (block,) = re.findall(r"```promql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [line for line in block.splitlines() if line and not line.startswith("#")]


def series(metric: Metric) -> set[str]:
    """Return the names of a metric's series."""
    if metric.kind == "histogram":
        return {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
    return {metric.name}


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\bkvd_[a-z0-9_]+", text))


KNOWN = {name for metric in everything() for name in series(metric)}
LABELS = {name: metric.labels for metric in everything() for name in series(metric)}


def test_every_metric_is_in_a_group_and_well_named():
    defined = [it for _, it in inspect.getmembers(catalogue) if isinstance(it, Metric)]
    assert sorted(it.name for it in defined) == sorted(it.name for it in everything())
    for metric in everything():
        assert re.fullmatch(r"kvd_[a-z0-9_]+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert (metric.kind == "histogram") == bool(metric.bounds), metric.name
        assert list(metric.bounds) == sorted(set(metric.bounds)), metric.name
        assert metric.help, metric.name
        assert metric.advice, metric.name
        assert not metric.help.endswith("."), metric.name


def test_the_page_names_only_existing_metrics():
    page = PAGE.read_text(encoding="utf-8")
    known = KNOWN | {metric.name for metric in everything()}
    stems = {name for name in names_in(page) if name.endswith("_")}
    assert names_in(page) - stems <= known
    for stem in stems:
        assert any(name.startswith(stem) for name in known), stem


def test_the_dashboard_is_what_its_script_writes():
    spec = importlib.util.spec_from_file_location("build", DASHBOARD.with_name("build.py"))
    assert spec is not None
    build = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(build)
    assert build.text() == DASHBOARD.read_text(encoding="utf-8"), "run deploy/grafana/build.py"


def test_the_dashboard_is_valid_for_grafana():
    page = dashboard()
    assert page["uid"] == "kvd"
    assert "id" not in page, "Grafana assigns an id at the import"
    ids = [panel["id"] for panel in page["panels"]]
    assert len(ids) == len(set(ids))
    places: set[tuple[int, int]] = set()
    for panel in page["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not places & cells, f"{panel['title']} overlaps another panel"
        places |= cells
        if panel["type"] == "row":
            continue
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert [t["refId"] for t in panel["targets"]] == list("ABCDEFGH"[: len(panel["targets"])])
    variables = [it["name"] for it in page["templating"]["list"]]
    assert variables == ["datasource", "instance", "model"]


def test_dashboard_page_and_alerts_use_only_exported_metrics():
    asked = set().union(*map(names_in, [*queries(), *recipes(), RULES.read_text()]))
    asked |= names_in(json.dumps(dashboard()["templating"]))
    assert asked <= KNOWN
    assert len(asked) > 30


@pytest.mark.parametrize("expr", [*queries(), *recipes()])
def test_queries_use_only_existing_labels(expr):
    """A query with an unknown label would silently select nothing."""
    for name, inside in re.findall(r"(kvd_[a-z0-9_]+)\{([^}]*)\}", expr):
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside):
            assert label in {*LABELS[name], "instance", "le"}, (name, label)


def test_prometheus_understands_every_query(promtool: Promtool, tmp_path: Path):
    asked = [*queries(), *recipes()]
    rules = [{"record": f"it:{at}", "expr": expr} for at, expr in enumerate(asked)]
    file = tmp_path / "queries.json"  # JSON is YAML, too
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = promtool("check", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


def test_the_configuration_and_the_alerts_are_valid(promtool: Promtool):
    done = promtool("check", "config", ROOT / "deploy/prometheus/prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    done = promtool("check", "rules", "--lint-fatal", RULES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_alerts_fire_when_they_should(promtool: Promtool):
    cases = ROOT / "deploy/prometheus/kvd.test.yml"
    done = promtool("test", "rules", cases)
    assert done.returncode == 0, done.stdout + done.stderr
    alerts = set(re.findall(r"- alert: (\w+)", RULES.read_text()))
    assert alerts == {name for name in alerts if name in cases.read_text()}, "alerts without a test"


def test_commands_that_alerts_name_exist():
    said = set(re.findall(r"`kvctl (\w+)", RULES.read_text()))
    assert said <= {it.name for it in COMMANDS}


def test_each_alert_says_what_it_means_and_what_to_do():
    blocks = RULES.read_text().split("- alert: ")[1:]
    for block in blocks:
        assert re.search(r"severity: (critical|warning)\n", block), block
        assert "summary: " in block, block
        assert "action: " in block, block
