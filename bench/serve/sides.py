"""The compared servers, their traces, and the limits for ratios."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.serve.bars import Bar
from kvd.bench.servers import Side, kvd_side, mlx_lm_side, url_side

DENSE, QUANTIZED = "kvd k16v16", "kvd k8v8"
PLAIN, PLAIN_8_BITS, AS_STARTED = "mlx-lm", "mlx-lm kv-bits 8", "mlx-lm no blas"
ONLY_STEADY = (PLAIN_8_BITS, AS_STARTED)
"""Sides that run only the trace ``steady``, because they are several times slower than the others.

No bar for another trace needs them.
"""


def make(model: str, folder: Path, blas: Path | None, urls: Sequence[str]) -> list[Side]:
    """Return all sides over one model folder; ``urls`` are ``NAME=http://…``."""
    sides = [
        kvd_side(DENSE, "k16v16", model, folder / "dense"),
        kvd_side(QUANTIZED, "k8v8", model, folder / "k8v8"),
        mlx_lm_side(PLAIN, model, blas=blas),
        mlx_lm_side(PLAIN_8_BITS, model, blas=blas, options=("--kv-bits", "8")),
    ]
    if blas is not None:
        sides.append(mlx_lm_side(AS_STARTED, model, blas=None))
    return sides + [_of_url(text) for text in urls]


def _of_url(text: str) -> Side:
    name, found, url = text.partition("=")
    if not found or not url.startswith(("http://", "https://")):
        raise ValueError(f"--url must be NAME=http://host:port, not {text!r}")
    return url_side(name, url)


def takes_part(side: str, trace: str) -> bool:
    """Return whether a side runs a trace."""
    return trace == "steady" or side not in ONLY_STEADY


def bars(traces: Sequence[str]) -> list[Bar]:
    """Return the bars for these traces."""
    found = [
        Bar("dense pages, throughput", "steady", "tok_s", DENSE, PLAIN, 2.2, at_least=True),
        Bar("K8V8, throughput", "steady", "tok_s", QUANTIZED, PLAIN, 1.6, at_least=True),
        Bar("K8V8 against 8 bits", "steady", "tok_s", QUANTIZED, PLAIN_8_BITS, 3.5, at_least=True),
        Bar("each as started", "steady", "tok_s", QUANTIZED, AS_STARTED, 4.0, at_least=True),
    ]
    for ours in (DENSE, QUANTIZED):
        found += [
            Bar("inter-token p99 while a long prompt comes", "long", "during_p99",
                ours, PLAIN, 0.33, at_least=False),
            Bar("first token p50, shared prompt", "shared", "ttft_p50",
                ours, PLAIN, 1.0, at_least=False),
        ]  # fmt: skip
        found += [
            Bar("peak memory", trace, "peak_bytes", ours, PLAIN, 1.0, at_least=False)
            for trace in traces
        ]
    return [bar for bar in found if bar.trace in traces]
