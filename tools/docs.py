"""Writes the generated parts of README and docs/: ``python -m tools.docs``, or ``make docs``.

With ``--check`` it writes nothing, prints the outdated pages, and exits with 1 if there are any.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tools import cli_page
from tools.pages import comparison, configuration, llama, metrics, picture, protocol
from tools.pages.markdown import filled

ROOT = Path(__file__).parent.parent


def _parts(of: Callable[[], Mapping[str, str]]) -> Callable[[str], str]:
    return lambda page: filled(page, of())


PAGES: dict[str, Callable[[str], str]] = {
    comparison.README: _parts(comparison.readme_parts),
    comparison.PAGE: _parts(lambda: comparison.parts() | llama.parts()),
    picture.PAGE: lambda _: picture.svg(),
    f"docs/{configuration.PAGE}": _parts(configuration.parts),
    f"docs/{protocol.PAGE}": _parts(protocol.parts),
    f"docs/{metrics.PAGE}": _parts(metrics.parts),
    f"docs/{cli_page.PAGE.name}": lambda _: cli_page.written(),
}
"""Functions from the current text of a page to its new text, by the page's path."""


def stale() -> dict[Path, str]:
    """Return the new texts of the pages that are outdated."""
    found = {}
    for name, write in PAGES.items():
        path = ROOT / name
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        after = write(before)
        if after != before:
            found[path] = after
    return found


def main(arguments: list[str]) -> int:
    """Write the outdated pages, or only print their names with ``--check``."""
    check = "--check" in arguments
    found = stale()
    for path, text in found.items():
        print(f"{path.relative_to(ROOT)} {'is not current' if check else 'written'}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return int(check and bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
