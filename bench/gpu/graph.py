"""How many operations a step is, by the graph that MLX is given.

Counted are MLX's primitives, compiled ones as they were fused, and not the device's own launches: a
primitive may launch none (`VIEWS` do not), one, or a copy beside.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

VIEWS = frozenset({
    "AsStrided", "Broadcast", "BroadcastAxes", "Depends", "ExpandDims", "Flatten", "Slice", "Split",
    "Squeeze", "StopGradient", "Transpose", "Unflatten", "View",
})  # fmt: skip
"""Primitives that give other shapes to the bytes that are there; `Reshape` may copy, and counts."""
_NODE = re.compile(r'\[label ="(\w+)", shape=rectangle\]')


def primitives(outputs: Sequence[Any]) -> Counter[str]:
    """Count the primitives, by name, that are still to be evaluated for some arrays."""
    lazy = [array for array in outputs if isinstance(array, mx.array)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "graph.dot")
        mx.export_to_dot(str(file), *lazy)
        return Counter(_NODE.findall(file.read_text("utf-8")))


def computing(counts: Counter[str]) -> int:
    """Return how many of them are no mere views."""
    return sum(count for name, count in counts.items() if name not in VIEWS)
