"""Writes docs/models.md: how kvd serves each model file of mlx-lm, and why.

``python -m tests.worker.architectures.table`` rewrites the page's tables. Tests compare the page
with what the probe finds.
"""

from __future__ import annotations

from kvd.worker.cache.settings import CacheSettings
from kvd.worker.serving import describe, probe
from kvd.worker.serving.probe import Served
from tests.pages import ROOT
from tests.worker.architectures.reference import TOKENS
from tests.worker.architectures.zoo import NOT_RUNNABLE, ZOO, build

PAGE = ROOT / "docs" / "models.md"
HEAD = "| model file | cache | served by | rows share a pass | why not pages, or not together |"
RULE = "|---|---|---|---|---|"


def line(name: str, served: Served) -> str:
    """Return a model's line of the table."""
    parts = describe.parts(served)
    # Without the sizes of windows, which are those of the tiny configuration.
    kinds = ", ".join(dict.fromkeys(part.kind.split(" ")[0] for part in parts))
    paths = ", ".join(dict.fromkeys(part.path for part in parts))
    together = "yes" if all(part.batched for part in parts) else "no"
    reasons = "; ".join(dict.fromkeys(part.reason for part in parts if part.reason))
    why = reasons.replace("|", "\\|")
    return f"| `{name}` | {kinds} | {paths} | {together} | {why} |"


def table() -> list[str]:
    """Return the lines of both tables."""
    lines = [HEAD, RULE]
    for name in ZOO:
        model, _ = build(name)
        lines.append(line(name, probe.serve(model, CacheSettings(scratch=1 << 26), TOKENS)))
    lines += ["", "## Not run here", "", "| model file | why |", "|---|---|"]
    lines += [f"| `{name}` | {why} |" for name, why in NOT_RUNNABLE.items()]
    return lines


def main() -> None:
    """Rewrite the page after its introduction."""
    text = PAGE.read_text()
    introduction = text[: text.index(HEAD)]
    PAGE.write_text(introduction + "\n".join(table()) + "\n")


if __name__ == "__main__":
    main()
