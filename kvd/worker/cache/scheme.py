"""KV schemes, page geometry and page sizes, imported from `protocol` for the worker's modules.

`protocol` defines them, because the daemon's forecasts use the same arithmetic.
"""

from __future__ import annotations

from protocol.kv import floors_of, schemes_of
from protocol.pages import PAGE_TOKENS, LayerGeometry, Packing, full_pages
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
