"""Who waits for whom: prompts that begin alike are not read side by side.

A prompt's *path* names its beginnings: its first chunk, its first two, and so on, one name each, so
that two prompts have the same name where they are the same up to there. A row whose prompt has not
begun waits behind one that stands in front of it and is reading a chunk of both at the moment: it
will find that in the cache when it begins. ::

    in front   |--chunk---|--chunk---|=chunk now|-chunk-|
    waits      |--chunk---|--chunk---|--chunk---|-own-|
    does not   |--chunk---|--own--|                          its part is through, and in the cache

**Nobody waits for ever.** The first of a line waits for nobody, so somebody always reads; and a row
waits only for rows in front of it, whose chunks are in the bound of `kvd.worker.scheduling.prefill_order`
anyway. Who is paused, is parked or ends is waited for no longer.

Does not cover: what is in the cache (`kvd.worker.core.prompts`).
"""

from __future__ import annotations

from collections.abc import Iterable

from kvd.worker.scheduling.row import Row


def not_waiting(rows: Iterable[Row], chunk: int) -> list[Row]:
    """Return the rows whose prompt may go on, or begin; in the line's order."""
    line = sorted(rows, key=lambda row: row.place)
    reading: list[Row] = []
    free = []
    for row in line:
        if row.reads:
            reading.append(row)
        elif is_being_read(row, reading, chunk):
            continue
        free.append(row)
    return free


def is_being_read(row: Row, reading: Iterable[Row], chunk: int) -> bool:
    """Return whether one of these is about to read a chunk that is the row's too."""
    for other in reading:
        at = other.prefilled // chunk
        if at < min(len(other.path), len(row.path)) and other.path[at] == row.path[at]:
            return True
    return False
