"""Parses Markdown pages: blocks of code, commands, headings and links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def blocks(text: str) -> list[tuple[str, str]]:
    """Return language and content of each block of code."""
    return [(language, content) for _, language, content in BLOCK.findall(text)]


def prose(text: str) -> str:
    """Return a page without its blocks and its inline code."""
    return re.sub(r"`[^`\n]+`", "", BLOCK.sub("", text))


def commands_of(block: str) -> list[str]:
    """Return the commands of a block of shell. A command may have several lines."""
    found: list[str] = []
    open_lines: list[str] = []
    for line in block.splitlines():
        open_lines.append(line)
        if not line.endswith("\\") and _closed("\n".join(open_lines)):
            if text := "\n".join(open_lines).strip():
                found.append(text)
            open_lines = []
    assert not open_lines, f"a quote is not closed: {open_lines}"
    return [one for one in found if not one.startswith("#")]


def _closed(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.+?)\s*$", BLOCK.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = found.get(slug, -1) + 1
        found[slug] = count
        if count:
            found[f"{slug}-{count}"] = 0
    return set(found)


def links(text: str) -> Iterator[tuple[str, str]]:
    """Yield path and anchor of each link to a file in the repository."""
    for target in LINK.findall(re.sub(r"`[^`\n]+`", "``", BLOCK.sub("", text))):
        if "://" not in target and not target.startswith("mailto:"):
            path, _, anchor = target.partition("#")
            yield path, anchor
