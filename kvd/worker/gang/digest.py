"""A digest of rows' places in the cache, which must be equal on all ranks before each pass."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import xxhash

from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.rows import SequenceRow

_encode = msgspec.msgpack.Encoder().encode


def digest_of(cache: ModelCache, rows: Sequence[SequenceRow]) -> int:
    """Return a 64-bit digest of lengths, tails, precision levels and page ids of these rows."""
    digest = xxhash.xxh3_64()
    digest.update(_encode([row.length for row in rows]))
    for index, store in enumerate(cache.stores):
        own = [row.rows[index] for row in rows]
        places = [(row.slot, row.level, row.length, row.skipped, row.written_ahead) for row in own]
        digest.update(_encode((places, store.tails.count)))
        for locations in store.tables.locations_of(own):
            digest.update(_encode(len(locations)))
            digest.update(locations.tobytes())
    return digest.intdigest()
