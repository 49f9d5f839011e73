"""How pages are stored and what they cost: the arithmetic that daemon and workers share.

The worker's modules take it from here; `protocol.pages` says how it is counted.
"""

from __future__ import annotations

from protocol.pages import (
    PAGE_TOKENS,
    LayerGeometry,
    Packing,
    floors_of,
    full_pages,
    schemes_of,
)
from protocol.schemes import BITS, Scheme

__all__ = [
    "BITS",
    "PAGE_TOKENS",
    "LayerGeometry",
    "Packing",
    "Scheme",
    "floors_of",
    "full_pages",
    "schemes_of",
]
