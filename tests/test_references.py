"""Files, modules and attributes that pages, docstrings and comments name exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.pages import BLOCK, ROOT

ROOTS = ("actors", "bench", "deploy", "kvd", "protocol", "tests", "tools")
SOURCES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(
        path
        for folder in ("docs", "deploy", "bench", "kvd")
        for path in (ROOT / folder).rglob("*.md")
    ),
    *(path for folder in ROOTS for path in (ROOT / folder).rglob("*.py")),
]
FILE = re.compile(r"`(?:(?:bench|tests)\.)?([\w./-]+\.py)`")
OTHER = re.compile(r"kvd\.(lock|log|rules|seed|service|sock|socket|state)\b")
"""Names of files and JSON keys that look like modules of kvd."""
MODULE = re.compile(rf"`((?:{'|'.join(ROOTS)})(?:\.\w+)+)(?:\(\))?`")


@cache
def files() -> list[str]:
    """Return all Python files, with a leading slash so that names match whole path components."""
    return [
        f"/{path.relative_to(ROOT)}" for folder in ROOTS for path in (ROOT / folder).rglob("*.py")
    ]


def is_known(dotted: str) -> bool:
    """Return whether this is a module, a package, or a name that its module's text contains."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        module = path.with_suffix(".py")
        if not module.exists():
            module = path / "__init__.py"
            if not module.exists() and not path.is_dir():
                continue
        text = module.read_text(encoding="utf-8") if module.exists() else ""
        return all(re.search(rf"\b{name}\b", text) for name in parts[length:])
    return False


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_refer_to_something_that_exists(source: Path):
    if not source.exists():
        pytest.skip("not written yet")
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".md":
        text = BLOCK.sub("", text)
    missing = [
        name for name in FILE.findall(text) if not any(f.endswith(f"/{name}") for f in files())
    ]
    missing += [name for name in MODULE.findall(text) if not (OTHER.match(name) or is_known(name))]

    assert not missing


def test_tests_that_the_page_on_http_names_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "http.md").read_text()))
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 30
    assert named <= set(re.findall(r"def (test_\w+)\(", text))
