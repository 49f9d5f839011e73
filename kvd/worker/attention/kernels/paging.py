"""The part of the split's kernel that goes from page to page."""

from __future__ import annotations

from kvd.worker.attention.kernels.language import Language
from kvd.worker.attention.kernels.shape import LANES, Shape
from kvd.worker.attention.kernels.text import Text
from kvd.worker.cache.scheme import PAGE_TOKENS

_LINE = 128
"""Bytes that memory gives at once."""


def begin_pages(text: Text, shape: Shape, language: Language) -> None:
    """Find the warp's first page, and ask for it: all that follows waits for that."""
    text.add("int level = -1, start = 0;\nsize_t page = 0;\nif (!is_tail && first + part < last) {")
    _find(text, "first + part", "level", "page", "start")
    _fetch_page(text, shape, language, "level", "page")
    text.add("}")


def look_ahead(text: Text, shape: Shape, language: Language) -> None:
    """Find the warp's next page, and ask for it while this one is attended to."""
    text.add("int next_level = -1, next_start = 0;\nsize_t next_page = 0;")
    text.add("if (!is_tail && item + PARTS < last) {")
    _find(text, "item + PARTS", "next_level", "next_page", "next_start")
    _fetch_page(text, shape, language, "next_level", "next_page")
    text.add("}")


def turn_page(text: Text) -> None:
    """Go on to the next page."""
    text.add("level = next_level;\npage = next_page;\nstart = next_start;")


def _find(text: Text, item: str, level: str, page: str, start: str) -> None:
    text.add(f"""
{level} = SAME(pages[({item}) * 3]);
{page} = size_t(SAME(pages[({item}) * 3 + 1])) * HEADS + head;
{start} = SAME(pages[({item}) * 3 + 2]);
""")


def _fetch_page(text: Text, shape: Shape, language: Language, which: str, page: str) -> None:
    """Ask for all of a page: one wait for memory, and not one for each batch of runs."""
    if not language.prefetch:
        return
    itemsize = shape.dtype.size
    for level, sides in enumerate(zip(shape.keys, shape.values, strict=True)):
        text.add(f"if ({which} == {level}) {{")
        dims = (shape.k_dim, shape.v_dim)
        for side, what, dim in zip(sides, ("key", "value"), dims, strict=True):
            elements = dim * PAGE_TOKENS
            if side.packed:
                scales = elements // side.group * itemsize
                _fetch(text, f"{what}_scales{level}", page, scales)
                _fetch(text, f"{what}_biases{level}", page, scales)
            size = elements * side.bits // 8 if side.packed else elements * itemsize
            _fetch(text, f"{what}s{level}", page, size)
        text.add("}")


def _fetch(text: Text, array: str, page: str, size: int) -> None:
    """Ask for a page's part of an array: each line is for one lane."""
    place = f"reinterpret_cast<const char*>({array}) + {page} * {size}"
    lines = -(-size // _LINE)
    for first in range(0, lines, LANES):
        ask = f"PREFETCH({place} + (lane + {first}) * {_LINE});"
        text.add(ask if lines - first >= LANES else f"if (lane < {lines - first}) {ask}")
