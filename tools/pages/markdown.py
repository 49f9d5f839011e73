"""Markdown tables, and the generated parts of pages, which are between two comments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

PART = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells hold no line breaks."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + "".join(f"{cell} | " if cell else "| " for cell in cells)[:-1] for cells in lines
    )


def filled(page: str, parts: Mapping[str, str]) -> str:
    """Return the page with new generated parts; raises ValueError if the names do not match."""
    named = [name for _, name, _ in PART.findall(page)]
    if sorted(named) != sorted(parts):
        raise ValueError(f"the page has the generated parts {named}, but {list(parts)} are given")
    return PART.sub(lambda found: f"{found[1]}\n{parts[found[2]]}\n\n{found[3]}", page)
