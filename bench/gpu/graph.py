"""Counts the operations of a step in MLX's graph.

The counted operations are MLX's primitives; a fused compiled primitive counts once. The device may
launch no kernel for a primitive (`VIEWS`), one, or one and a copy.
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
"""Primitives that only change the shape of existing bytes; not `Reshape`, which may copy."""
_NODE = re.compile(r'\[label ="(\w+)", shape=rectangle\]')


def primitives(outputs: Sequence[Any]) -> Counter[str]:
    """Count by name the primitives that must still be evaluated for ``outputs``."""
    lazy = [array for array in outputs if isinstance(array, mx.array)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "graph.dot")
        mx.export_to_dot(str(file), *lazy)
        return Counter(_NODE.findall(file.read_text("utf-8")))


def computing(counts: Counter[str]) -> int:
    """Return how many of the counted primitives are not `VIEWS`."""
    return sum(count for name, count in counts.items() if name not in VIEWS)
