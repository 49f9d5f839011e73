"""The compared servers, and which traces they run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from kvd.bench.servers import Side, kvd_side, mlx_lm_side, url_side

DENSE, QUANTIZED = "kvd k16v16", "kvd k8v8"
PLAIN, PLAIN_8_BITS, AS_STARTED = "mlx-lm", "mlx-lm kv-bits 8", "mlx-lm no blas"
ONLY_STEADY = (PLAIN_8_BITS, AS_STARTED)
"""Sides that run only the trace ``steady``, because they are several times slower than the others.

No bar for another trace needs them.
"""


def make(
    model: str,
    folder: Path,
    blas: Path | None,
    urls: Sequence[str],
    prefix_cache: int | None = None,
) -> list[Side]:
    """Return all sides over one model folder; ``urls`` are ``NAME=http://…``.

    ``prefix_cache``: bytes of kvd's prefix cache; None: its default.
    """
    sides = [
        kvd_side(DENSE, "k16v16", model, folder / "dense", prefix_cache=prefix_cache),
        kvd_side(QUANTIZED, "k8v8", model, folder / "k8v8", prefix_cache=prefix_cache),
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


def choose(sides: Iterable[Side], wanted: Sequence[str]) -> list[Side]:
    """Return the sides that a name or pattern of ``wanted`` matches; all of them if it is empty.

    Raises ValueError for a pattern that matches no side.
    """
    every = list(sides)
    for pattern in wanted:
        if not any(fnmatchcase(side.name, pattern) for side in every):
            names = ", ".join(repr(side.name) for side in every)
            raise ValueError(f"unknown --sides {pattern!r}; the sides are {names}")
    if not wanted:
        return every
    return [side for side in every if any(fnmatchcase(side.name, one) for one in wanted)]


def takes_part(side: str, trace: str) -> bool:
    """Return whether a side runs a trace."""
    return trace == "steady" or side not in ONLY_STEADY
