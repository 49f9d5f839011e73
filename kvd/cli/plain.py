"""Options of plain types are read here and not by pydantic, which typer would import for them.

Importing that takes a third of the time of a short command such as `kvctl status`. Whatever is not
plain is left to typer, and so is everything in a typer that works otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import typer

_KINDS = {str: "text", int: "whole number", float: "number", bool: "flag"}
_LEFT_TO_TYPER = ("parser", "click_type", "clamp", "path_type", "formats")


@dataclass(frozen=True)
class _Plain:
    """What typer asks for a value; in place of its ``RuntimeParam``."""

    kind: type
    least: float | None
    most: float | None

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value as its kind; a usage error for what is none, or out of range."""
        if value is None:
            return None
        try:
            found = self.kind(value)
        except ValueError:
            text = f"{value!r} is no {_KINDS[self.kind]}"
            raise typer.BadParameter(text, ctx=ctx, param=param) from None
        # NaN is in no range, as every comparison with it fails.
        if self.least is not None and not found >= self.least:
            raise typer.BadParameter(f"{found} is below {self.least:g}", ctx=ctx, param=param)
        if self.most is not None and not found <= self.most:
            raise typer.BadParameter(f"{found} is above {self.most:g}", ctx=ctx, param=param)
        return found


def read_plainly(params: list[Any]) -> list[Any]:
    """Return the parameters; those that are plain are read without pydantic from now on."""
    for one in params:
        descriptor = getattr(one, "type_descriptor", None)
        if descriptor is None or getattr(one, "_runtime_param", 0) is not None:
            continue
        info, kind = descriptor.parameter_info, descriptor.annotation
        special = any(getattr(info, name, None) for name in _LEFT_TO_TYPER)
        if kind in _KINDS and one.nargs == 1 and not one.multiple and not special:
            one._runtime_param = _Plain(kind, info.min, info.max)  # noqa: SLF001 - typer has no other place for it
    return params
