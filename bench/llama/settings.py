"""The settings of llama-server that are compared; the best one differs from trace to trace."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from itertools import product
from pathlib import Path

from kvd.bench.servers import Side, llama_side
from kvd.bench.traces import Trace

PREFIX = "llama "
QUANTIZED = "llama q8_0 fa"
"""The setting whose memory is compared with quantized pages."""

_ATTENTION = {
    "f16": ("--flash-attn", "off"),
    "f16 fa": ("--flash-attn", "on"),
    # Quantized values need flash attention.
    "q8_0 fa": ("--flash-attn", "on", "--cache-type-k", "q8_0", "--cache-type-v", "q8_0"),
}
_BATCHES = {"": (), " ub256": ("--batch-size", "256", "--ubatch-size", "256")}
SETTINGS: dict[str, tuple[str, ...]] = {
    PREFIX + name + suffix: attention + batch
    for (name, attention), (suffix, batch) in product(_ATTENTION.items(), _BATCHES.items())
}
"""Options by the name of the side: KV cache type, flash attention and batch size."""

_COMMON = ("--no-webui", "--cache-ram", "0", "--samplers", "top_k", "--top-k", "1")
"""Options for less work: no page, no cache of prompts beside the slots, greedy sampling."""
_SLOTS = 8
"""Requests at once, as in most traces."""
_MARGIN, _STEP = 64, 256
"""Context tokens beyond the longest request, and their granularity in llama.cpp's cache."""


def sides(program: Path, model: Path, traces: Iterable[Trace]) -> list[Side]:
    """Return a side for every setting.

    ``model`` is a GGUF file without an end of text. The cache of a llama-server has a fixed size,
    so the context of a slot is that of the longest request of all traces.
    """
    longest = max(trace.longest for trace in traces) + _MARGIN
    context = -(-longest // _STEP) * _STEP
    common = (*_COMMON, "--threads", str(os.cpu_count() or 1))
    return [
        llama_side(
            name,
            str(program),
            model,
            slots=_SLOTS,
            context=context,
            options=(*common, *options),
            endless=True,
        )
        for name, options in SETTINGS.items()
    ]


def version(program: Path) -> str:
    """Return the server's own description of its version; raises ValueError if it does not run."""
    try:
        done = subprocess.run(
            [str(program), "--version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(
            f"--llama {program} does not run ({error}); bench/llama/build.sh builds llama-server"
        ) from None
    return " ".join((done.stdout + done.stderr).split())
