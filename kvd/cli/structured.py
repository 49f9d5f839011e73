"""Options of `kvctl generate` that read files: grammars, JSON schemas and tools."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec
import rich_click as click

from kvd.cli.common import Decorator, option, option_group
from protocol.tools import Grammar, Tool

_option = functools.partial(option, panel="Structured output and tools")


class _File(click.ParamType[Any, Any]):
    """A file that is read and checked at once."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.read(Path(value).expanduser().read_text(encoding="utf-8"))
        except OSError as error:
            self.fail(f"cannot read {value}: {error.strerror}", param, ctx)
        except ValueError as error:
            self.fail(f"{value} {error}", param, ctx)

    def read(self, text: str) -> Any:
        """Return the content; raises `ValueError`."""
        raise NotImplementedError


class _GrammarFile(_File):
    def read(self, text: str) -> Grammar:
        return Grammar("lark", text)


class _SchemaFile(_File):
    def read(self, text: str) -> Grammar:
        if not isinstance(_decoded(text), dict):
            raise ValueError("is no JSON schema: it must be an object")  # noqa: TRY004
        return Grammar("json_schema", text)


class _ToolsFile(_File):
    def read(self, text: str) -> list[Tool]:
        tools = _decoded(text)
        if not isinstance(tools, list):
            raise ValueError("has no list of tools")  # noqa: TRY004
        plain = [one.get("function", one) if isinstance(one, dict) else one for one in tools]
        try:
            return msgspec.convert(plain, list[Tool])
        except msgspec.ValidationError as error:
            raise ValueError(f"has an invalid tool: {error}") from None


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None


def structured_options() -> Decorator:
    """Give a command the options ``grammar``, ``json_schema`` and ``tools``."""
    return option_group(
        _option(
            "--grammar",
            "FILE",
            "The answer matches this Lark grammar, in llguidance's form.",
            type=_GrammarFile(),
        ),
        _option("--json-schema", "FILE", "The answer is JSON of this schema.", type=_SchemaFile()),
        _option(
            "--tools",
            "FILE",
            "Tools that the model may call, as a JSON list in OpenAI's form. The prompt is then a "
            "message of the user, with the chat template.",
            type=_ToolsFile(),
        ),
    )
