"""Fails on wording that slows a reader down: ``python -m tools.check_wording PATH...``.

Reads docstrings, comments and Markdown, and the identifiers of Python files. Each rule is narrow
enough to hold everywhere, so a hit is always a line to rewrite. `docs/glossary.md` has the terms to
use instead; CONTRIBUTING.md has the rules of style that no pattern can check.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import keyword
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAX_WORDS = 38
"""Words in a sentence. The aim is 25; lists of names and numbers may need more."""

PROSE_RULES = {
    "name the subject, code is not a person": (
        r"\b(nobody|somebody|everybody|whoever|those who|they who|others who)\b"
    ),
    "say what happens: returns, sends, reports": (
        r"\b(is told|are told|was told|were told|it says|is said|was said|has said)\b"
    ),
    "use standard word order and current words": (
        r"\b(but for|in the place of|of late|anew|thereof|wherein|no more than that|by and by)\b"
    ),
    "start with a noun phrase or a verb": r"^(Of|Same as|The same|As for|Such as|Whose|Who)\b",
    "use the term in docs/glossary.md": (
        r"\b(farewells?|berths?|estates?|parking lot|turns? a page|thaw(s|ed)?|wishes|wisher)\b"
    ),
}
"""Advice for a hit, and its pattern; case is ignored, except at the start of a sentence."""

PRIVATE_WORDS = frozenset(
    {
        "asleep", "berth", "berths", "desk", "dismiss", "door", "doors", "estate", "farewell",
        "farewells", "frozen", "hands", "hire", "house", "ladder", "lot", "moments", "park",
        "parked", "parking", "rung", "rungs", "seat", "seats", "tenant", "tenants", "thaw",
        "thawed", "told", "turns", "unpark", "unsaid", "untold", "wish", "wisher", "wishes",
    }
)  # fmt: skip
"""Parts of identifiers for which the glossary has a term."""

KEYWORD_ARGUMENTS = frozenset({"frozen"})
"""Python's own: ``msgspec.Struct, frozen=True``."""

_PATTERNS = {advice: re.compile(text, re.IGNORECASE) for advice, text in PROSE_RULES.items()}
_FRAGMENT = "start with a noun phrase or a verb"
_PATTERNS[_FRAGMENT] = re.compile(PROSE_RULES[_FRAGMENT])
_SENTENCE_END = re.compile(r"(?<=[.:;?!])\s+")
_CODE = re.compile(r"``[^`]*``|`[^`]*`|\[[^\]]*\]\([^)]*\)")


class Hit(NamedTuple):
    """One line to rewrite."""

    path: Path
    line: int
    advice: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.advice}: {self.text[:100]}"


class Block(NamedTuple):
    """A paragraph: its first line's number, and its lines."""

    line: int
    lines: list[str]


def python_blocks(source: str) -> Iterator[Block]:
    """Yield the paragraphs of all docstrings, attribute descriptions and comments."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                lines = inspect.cleandoc(statement.value.value).splitlines()
                yield from paragraphs(lines, statement.lineno)
    comment: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("#!", "# noqa", "# type:")):
            continue
        if token.start[0] != last + 1 and comment:
            yield Block(first, comment)
            comment = []
        first = token.start[0] if not comment else first
        last = token.start[0]
        comment.append(token.string.lstrip("# "))
    if comment:
        yield Block(first, comment)


def markdown_blocks(source: str) -> Iterator[Block]:
    """Yield the paragraphs of a page, without code, tables and headings."""
    kept, fenced = [], False
    for line in source.splitlines():
        is_fence = line.lstrip().startswith("```")
        fenced ^= is_fence
        skip = fenced or is_fence or line.lstrip().startswith(("|", "#", "<", "!["))
        kept.append("" if skip else re.sub(r"^\s*([-*]|\d+\.) ", "", line))
    yield from paragraphs(kept, 1)


def paragraphs(lines: list[str], first: int) -> Iterator[Block]:
    """Yield runs of lines without an empty line between them; indented code is left out."""
    block: list[str] = []
    start = first
    for number, line in enumerate([*lines, ""], first):
        if line.strip() and not line.startswith(" " * 4):
            start = start if block else number
            block.append(line.strip())
        elif block:
            yield Block(start, block)
            block = []


def prose_hits(path: Path, block: Block) -> Iterator[Hit]:
    """Yield the hits of a paragraph."""
    previous = ""
    for number, raw in enumerate(block.lines, block.line):
        text = _CODE.sub("CODE", raw)
        starts = not previous or previous.endswith((".", ":", ";", "?", "!"))
        for advice, pattern in _PATTERNS.items():
            if (starts or advice != _FRAGMENT) and pattern.search(text):
                yield Hit(path, number, advice, raw)
        previous = text
    for sentence in _SENTENCE_END.split(_CODE.sub("CODE", " ".join(block.lines))):
        count = len(re.findall(r"[A-Za-z]{2,}", sentence))
        if count > MAX_WORDS:
            yield Hit(path, block.line, f"{count} words in one sentence", sentence)


def name_hits(path: Path, source: str) -> Iterator[Hit]:
    """Yield identifiers that contain a private word."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for token, following in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
        if token.type != tokenize.NAME or keyword.iskeyword(token.string):
            continue
        if token.string in KEYWORD_ARGUMENTS and following.string == "=":
            continue
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", token.string).lower()
        if found := PRIVATE_WORDS & set(snake.split("_")):
            word = ", ".join(sorted(found))
            yield Hit(path, token.start[0], f"private word in a name: {word}", token.string)


def check(path: Path) -> list[Hit]:
    """Return the hits of a file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return [hit for block in markdown_blocks(source) for hit in prose_hits(path, block)]
    hits = [hit for block in python_blocks(source) for hit in prose_hits(path, block)]
    return [*hits, *name_hits(path, source)]


def files_of(paths: list[Path]) -> list[Path]:
    """Return the Python files and pages below these paths."""
    found = [
        file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*")))
    ]
    return [file for file in found if file.suffix in {".py", ".md"}]


def main() -> int:
    """Print the hits; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path)
    hits = [hit for file in files_of(parser.parse_args().paths) for hit in check(file)]
    for hit in sorted(set(hits), key=lambda hit: (str(hit.path), hit.line)):
        print(hit)
    print(f"{len(set(hits))} lines to rewrite" if hits else "wording: nothing to rewrite")
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main())
