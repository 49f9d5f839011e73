"""Samples as text: Prometheus's exposition format 0.0.4, and OpenMetrics 1.0.

Written by kvd itself: what the scrape of five models takes is time that the event loop has for
nothing else, and prometheus-client takes ten times as long for it (docs/metrics.md). Tests read it
with its parsers, with promtool and with Prometheus.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from kvd.metrics.catalogue import everything
from kvd.metrics.samples import Buckets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.metrics.catalogue import Metric
    from kvd.metrics.samples import Labels, Samples

PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPEN = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def write(samples: Samples, *, openmetrics: bool = False) -> str:
    """Return all samples, in the order of the catalogue."""
    lines: list[str] = []
    for metric in everything():
        if metric in samples.found:
            lines += _family(metric, samples, openmetrics=openmetrics)
    if openmetrics:
        lines.append("# EOF")
    return "\n".join(lines) + "\n"


def _family(metric: Metric, samples: Samples, *, openmetrics: bool) -> Iterator[str]:
    name = metric.name
    family = name.removesuffix("_total") if openmetrics and metric.kind == "counter" else name
    yield f"# HELP {family} {_escape(metric.help)}"
    yield f"# TYPE {family} {metric.kind}"
    for labels, value in samples.found[metric].items():
        inside = _labels(metric, labels)
        if isinstance(value, Buckets):
            yield from _histogram(metric, inside, value)
        else:
            yield f"{name}{{{inside}}} {value!r}" if inside else f"{name} {value!r}"


def _histogram(metric: Metric, inside: str, value: Buckets) -> Iterator[str]:
    name, before = metric.name, f"{inside}," if inside else ""
    *sums, count = accumulate(value.counts)
    for bound, so_far in zip(metric.bounds, sums, strict=True):
        yield f'{name}_bucket{{{before}le="{bound!r}"}} {so_far}'
    yield f'{name}_bucket{{{before}le="+Inf"}} {count}'
    around = f"{{{inside}}}" if inside else ""
    yield f"{name}_sum{around} {value.total!r}"
    yield f"{name}_count{around} {count}"


def _labels(metric: Metric, values: Labels) -> str:
    pairs = zip(metric.labels, values, strict=True)
    return ",".join(f'{name}="{_escape(value)}"' for name, value in pairs)


def _escape(text: str) -> str:
    """Write what may stand neither in a label nor in a line of help; quotes in labels alone."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
