"""A command group that imports a command's module only when the command is used."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import rich_click as click


@dataclass(frozen=True)
class LazyCommand:
    """A command or a group of commands, and where it is defined."""

    name: str
    target: str
    """``module:attribute``."""
    panel: str
    """Section of the group's help page."""


class LazyGroup(click.RichGroup):
    """A group of `LazyCommand`; help lists them by panel."""

    def __init__(self, *args: Any, lazy_commands: Iterable[LazyCommand], **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._lazy = {command.name: command for command in lazy_commands}
        for panel, commands in groupby(self._lazy.values(), lambda command: command.panel):
            names = [command.name for command in commands]
            self.add_panel(click.RichCommandPanel(panel, commands=names))

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name not in self._lazy:
            return None
        module, _, attribute = self._lazy[cmd_name].target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command. For an unknown one suggest a name; click knows only those in use."""
        if args[0] not in self._lazy and not ctx.resilient_parsing:
            similar = difflib.get_close_matches(args[0], self._lazy)
            if similar:
                ctx.fail(f"No such command {args[0]!r}. Did you mean {similar[0]!r}?")
        return super().resolve_command(ctx, args)
