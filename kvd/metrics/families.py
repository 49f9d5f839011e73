"""Encodes samples in Prometheus's formats, in a thread."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import core
from prometheus_client.exposition import choose_encoder

from kvd.metrics.catalogue import everything
from kvd.metrics.samples import Buckets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client.registry import Collector

    from kvd.metrics.catalogue import Metric
    from kvd.metrics.samples import Labels, Samples, Value


class Scrape:
    """A collector for the samples of one scrape, in the order of the catalogue."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def collect(self) -> Iterator[core.Metric]:
        for metric in everything():
            if (series := self._samples.found.get(metric)) is not None:
                yield _histogram(metric, series) if metric.bounds else _simple(metric, series)


def encoded(samples: Samples, accept: str = "") -> tuple[bytes, str]:
    """Return a body and its content type for an HTTP ``Accept`` header."""
    registry = core.CollectorRegistry()  # the default registry has collectors for Python itself
    registry.register(Scrape(samples))
    encode, kind = _format(accept)
    return encode(registry), kind


def _format(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    """Choose an encoder; malformed headers get the plain text format."""
    try:
        return choose_encoder(accept if accept.isascii() else "")
    except TypeError:  # the header's version is not a number
        return choose_encoder("")


def _simple(metric: Metric, series: Mapping[Labels, Value]) -> core.Metric:
    name = metric.name
    kind = core.CounterMetricFamily if metric.kind == "counter" else core.GaugeMetricFamily
    family = kind(name, metric.help, labels=metric.labels)
    for values, value in series.items():
        assert not isinstance(value, Buckets), name
        family.add_metric(values, value)
    return family


def _histogram(metric: Metric, series: Mapping[Labels, Value]) -> core.Metric:
    family = core.HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    bounds = [*map(repr, metric.bounds), "+Inf"]
    for values, value in series.items():
        assert isinstance(value, Buckets), metric.name
        sums = zip(bounds, accumulate(value.counts), strict=True)
        family.add_metric(values, list(sums), value.total)
    return family
