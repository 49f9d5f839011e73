"""Help pages of `kvd` and `kvctl`: flags take no ``<bool>``, arguments stand without braces."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from kvd.cli.plain import read_plainly


def _plain(pieces: list[str]) -> list[str]:
    return [piece.replace("{", "").replace("}", "") for piece in pieces]


def _bare(option: Any) -> Any:
    if option is not None:
        option.metavar = ""
    return option


class Command(TyperCommand):
    """A command with such a page."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options and arguments."""
        return read_plainly(super().get_params(ctx))

    def get_help_option(self, ctx: Any) -> Any:
        """Return ``--help``, which is a flag."""
        return _bare(super().get_help_option(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line."""
        return _plain(super().collect_usage_pieces(ctx))


class Group(TyperGroup):
    """A group with such a page."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options; those of completion are flags as well."""
        found = read_plainly(super().get_params(ctx))
        return [_bare(one) if getattr(one, "is_flag", False) else one for one in found]

    def get_help_option(self, ctx: Any) -> Any:
        """Return ``--help``, which is a flag."""
        return _bare(super().get_help_option(ctx))
