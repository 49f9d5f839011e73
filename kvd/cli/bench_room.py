"""Which traces `kvctl bench` can run without taking memory from other models. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvd.bench.traces import Trace
from kvd.cli.explain import describe_step
from kvd.host.units import format_bytes
from protocol.forecast import Forecast

_HARMLESS = "spare"
"""The reclaim method that costs no model anything."""

Explain = Callable[[int, int], Forecast]
"""Returns the forecast for a number of rows with so many tokens each."""


def obstacles(traces: Iterable[Trace], explain: Explain, *, make_room: bool) -> dict[str, str]:
    """Return the names of traces that cannot run, each with the reason.

    ``make_room``: whether the daemon may take memory from other models and cached prompts.
    """
    found = {trace.name: _obstacle(trace, explain, make_room=make_room) for trace in traces}
    return {name: reason for name, reason in found.items() if reason}


def rows(trace: Trace) -> tuple[int, int]:
    """Return how many requests a trace runs at once, and their mean tokens, rounded up."""
    count = len(trace.asks)
    return min(count, trace.concurrency or count), -(
        -(trace.prompt_tokens + trace.output_tokens) // count
    )


def _obstacle(trace: Trace, explain: Explain, *, make_room: bool) -> str:
    longest = trace.longest
    if (context := explain(1, longest).context) < longest:
        return f"a request has {longest:,} tokens, and the model's context {context:,}"
    forecast = explain(*rows(trace))
    if forecast.verdict in {"waits", "never"}:
        missing = format_bytes(forecast.shortfall_bytes or forecast.missing_bytes)
        return f"{missing} of the budget of {format_bytes(forecast.budget_bytes)} are missing"
    harm = [describe_step(step) for step in forecast.steps if step.method != _HARMLESS]
    if harm and not make_room:
        return f"kvd would first {', then '.join(harm)}; --make-room allows that"
    return ""
