"""Describes schemes that differ between layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def layer_schemes(mix: Sequence[str]) -> str:
    """Return the schemes with their number of layers, the most frequent first.

    For example ``20 k5v3, 3 k6v3, k8v4``.
    """
    counts = Counter(mix).most_common()
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in counts)
