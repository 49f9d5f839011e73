"""The part of the split kernel that finds a warp's next page and prefetches pages."""

from __future__ import annotations

from kvd.worker.attention.kernels.shape import LANES, Shape
from kvd.worker.attention.kernels.text import Text
from kvd.worker.cache.scheme import PAGE_TOKENS

_LINE = 128
"""Bytes per cache line."""


def find_first_page(text: Text) -> None:
    """Add the code that finds the warp's first page; all reads of pages wait for it."""
    text.add("int level = -1, start = 0;\nsize_t page = 0;\nif (!is_tail && first + part < last) {")
    _find(text, "first + part", "level", "page", "start")
    text.add("}")


def find_next_page(text: Text) -> None:
    text.add("int next_level = -1, next_start = 0;\nsize_t next_page = 0;")
    text.add("if (!is_tail && item + PARTS < last) {")
    _find(text, "item + PARTS", "next_level", "next_page", "next_start")
    text.add("}")


def advance_page(text: Text) -> None:
    text.add("level = next_level;\npage = next_page;\nstart = next_start;")


def _find(text: Text, item: str, level: str, page: str, start: str) -> None:
    text.add(f"""
{level} = SAME(pages[({item}) * 3]);
{page} = size_t(SAME(pages[({item}) * 3 + 1])) * HEADS + head;
{start} = SAME(pages[({item}) * 3 + 2]);
""")


def prefetch_keys(text: Text, shape: Shape, level: str, page: str) -> None:
    """Prefetch a page's keys: one wait for memory instead of one per batch of runs."""
    _prefetch(text, shape, "key", level, page)


def prefetch_values(text: Text, shape: Shape, level: str, page: str) -> None:
    _prefetch(text, shape, "value", level, page)


def _prefetch(text: Text, shape: Shape, side_name: str, level: str, page: str) -> None:
    sides, dim = (shape.keys, shape.k_dim) if side_name == "key" else (shape.values, shape.v_dim)
    for number, side in enumerate(sides):
        elements = dim * PAGE_TOKENS
        scales = elements // side.group * shape.dtype.size
        text.add(f"if ({level} == {number}) {{")
        _prefetch_array(text, f"{side_name}_scales{number}", page, scales)
        _prefetch_array(text, f"{side_name}_biases{number}", page, scales)
        _prefetch_array(text, f"{side_name}s{number}", page, elements * side.bits // 8)
        text.add("}")


def _prefetch_array(text: Text, array: str, page: str, size: int) -> None:
    place = f"reinterpret_cast<const char*>({array}) + {page} * {size}"
    lines = -(-size // _LINE)
    for first in range(0, lines, LANES):
        prefetch = f"PREFETCH({place} + (lane + {first}) * {_LINE});"
        text.add(prefetch if lines - first >= LANES else f"if (lane < {lines - first}) {prefetch}")
