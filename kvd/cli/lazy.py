"""Commands that are imported when they are called: what a command needs, no other one waits for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import typer
from typer.main import get_command

from kvd.cli.usage import Command, Group


@dataclass(frozen=True)
class Lazy:
    """A command, or a group of commands, and where it is."""

    name: str
    target: str
    """``module:attribute`` of a function with typer's annotations, or of a `typer.Typer`."""
    panel: str
    """The part of the help page that it stands in."""

    def load(self) -> Any:
        """Import it and return it as click knows it."""
        module, _, attribute = self.target.partition(":")
        found: Callable[..., Any] | typer.Typer = getattr(
            importlib.import_module(module), attribute
        )
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False)
            alone.command(self.name, cls=Command)(found)
            found = alone
        found._add_completion = False  # noqa: SLF001 - its options belong to the program's page
        command: Any = get_command(found)
        command.name, command.rich_help_panel = self.name, self.panel
        return command


class _Commands(MutableMapping[str, Any]):
    """By name; each is imported when it is looked up."""

    def __init__(self, commands: tuple[Lazy, ...]) -> None:
        self._known = {one.name: one for one in commands}
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._known[name].load()
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known | self._loaded)

    def __len__(self) -> int:
        return len(self._known | self._loaded)

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._loaded  # `Mapping` would load it

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]


def lazy_group(commands: tuple[Lazy, ...]) -> type[Group]:
    """Return the class of a group that has these commands."""

    class LazyGroup(Group):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            self.commands = _Commands(commands)

        def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - click's signature
            return list(self.commands)

    return LazyGroup
