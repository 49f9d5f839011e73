"""Models whose caches the state machine exercises: kinds, schemes, and ways of access."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.layout import Access, AttentionPart, Entry, Layout, StatePart
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from kvd.worker.cache.settings import CacheSettings

WINDOW, SINKS, CHUNKS = Kind(window=100), Kind(window=150, keep=20), Kind(chunk=128)
SCHEMES = (Scheme(8, 8), Scheme(8, 4), Scheme(4, 4))
STATE = StatePart(((1, 3), (1, 2, 4)), (mx.float32, mx.float32))


def attention(kind: Kind, heads: int, k_dim: int, v_dim: int) -> AttentionPart:
    return AttentionPart(kind, LayerGeometry(heads, k_dim, v_dim))


@dataclass(frozen=True)
class World:
    """A model's cache, and how the model uses it."""

    parts: tuple[tuple[AttentionPart | StatePart, ...], ...]
    settings: CacheSettings
    rectangles: tuple[Kind, ...] = ()
    batched: bool = True

    def cache(self) -> ModelCache:
        entries = tuple(Entry(parts, composed=len(parts) > 1) for parts in self.parts)
        return ModelCache(
            Layout(entries, mx.float32),
            self.settings,
            access=dict.fromkeys(self.rectangles, Access.RECTANGLES),
            batched=self.batched,
        )


def delicate(layers: int) -> list[Scheme | None]:
    return [SCHEMES[1], *[None] * (layers - 1)]


MIXES = (
    None,
    tuple(map(Scheme.parse, ("k8v4", "k6v3", "k5v4", "k8v2", "k3v6"))),
    tuple(map(Scheme.parse, ("k3v3", "k2v3", "k5v3", "k4v2", "k3v2"))),
)
"""Schemes by layer of each precision level, none above those of the level before it."""

WORLDS = {
    "pages of every kind": World(
        (
            (attention(FULL, 1, 8, 12),),
            (STATE,),
            (attention(WINDOW, 2, 8, 8), attention(FULL, 1, 16, 8)),
            (attention(SINKS, 1, 8, 8),),
            (attention(CHUNKS, 1, 12, 8),),
        ),
        CacheSettings(schemes=SCHEMES, mixes=MIXES, floors=delicate),
    ),
    "rectangles of every kind": World(
        (
            (attention(FULL, 1, 8, 0),),
            (attention(WINDOW, 2, 8, 8),),
            (attention(SINKS, 1, 8, 8), STATE),
            (attention(CHUNKS, 1, 8, 12),),
        ),
        CacheSettings(schemes=(Scheme(8, 8, 32, 32), Scheme(4, 4, 32, 32)), scratch=1 << 16),
        rectangles=(FULL, WINDOW, SINKS, CHUNKS),
    ),
    "one row a pass": World(
        (
            (attention(FULL, 1, 8, 12),),
            (STATE,),
            (STATE, attention(WINDOW, 1, 8, 8)),
            (attention(CHUNKS, 2, 8, 8),),
        ),
        CacheSettings(schemes=(Scheme(8, 4), Scheme(4, 4))),
        rectangles=(FULL, CHUNKS),
        batched=False,
    ),
    "max_kv_size with keep": World(
        ((attention(FULL, 1, 8, 32),), (attention(FULL, 2, 8, 8),)),
        CacheSettings(schemes=(Scheme(8, 4, 64, 32), Scheme(4, 4)), max_size=200, keep=70),
    ),
    "dense at first": World(
        ((attention(FULL, 1, 8, 8),), (attention(WINDOW, 1, 12, 8),)),
        CacheSettings(
            schemes=(Scheme(8, 4), Scheme(2, 2)), quantized_start=300, max_size=400, keep=3
        ),
    ),
}
