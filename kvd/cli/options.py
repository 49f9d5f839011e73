"""Options of the KV cache, and option types, for both `kvd` and `kvctl`."""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import msgspec
import rich_click as click

from kvd.cli.common import Command, Decorator
from kvd.cli.ranges import Count
from kvd.config import budget
from kvd.config.kv import KVText
from kvd.host.units import parse_bytes, parse_duration, parse_keep_alive, parse_tokens
from protocol.fields import MAX_S
from protocol.kv import MIN_KV_SIZE, SCHEMES, KVSpec
from protocol.validation import describe_error

_FLOOR = re.compile(r"\s*(-?\d{1,9})\s*=(.*)")
_NO_SCHEMES = "none"


def parse_budget(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """Return the bytes of a budget; use as the option's callback."""
    try:
        return None if text is None else budget.parse_budget(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


class Duration(click.ParamType[float, Any]):
    """A duration in seconds, such as ``7d`` or ``12h``."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            seconds = value if isinstance(value, float) else parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if seconds > MAX_S:
            self.fail(f"{value!r} is too long.", param, ctx)
        return seconds


class KeepAlive(click.ParamType[float, Any]):
    """Seconds that a model stays loaded; negative: no limit."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            return parse_keep_alive(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Tokens(Count):
    """A number of tokens, such as ``4096`` or ``64k``."""

    name = "number of tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, str) and not value.startswith("-"):  # out of range, says click
            try:
                value = parse_tokens(value)
            except ValueError as error:
                self.fail(str(error), param, ctx)
        return super().convert(value, param, ctx)


class TokenList(click.ParamType[list[int], Any]):
    """Numbers of tokens, separated by commas."""

    name = "list of numbers of tokens"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        if isinstance(value, list):
            return value
        return [Tokens(1).convert(part, param, ctx) for part in value.split(",")]


class _KVOption(NamedTuple):
    flag: str
    metavar: str
    help: str
    type: type | click.ParamType[Any, Any] = str
    multiple: bool = False


_KV_OPTIONS = {
    "scheme": _KVOption(
        "--kv", "SCHEME", "Key and value bits, such as k8v4; 16 is dense (default: k8v8)."
    ),
    "group_size": _KVOption(
        "--kv-group-size", "32|64", "Elements that share a scale (default: 64).", int
    ),
    "value_group_size": _KVOption(
        "--kv-value-group-size",
        "32|64|128",
        "Group size of values, if it differs from that of keys.",
        int,
    ),
    "schemes": _KVOption(
        "--kv-schemes",
        "SCHEMES",
        f"Schemes that rows may step down to, or {_NO_SCHEMES} (default: {','.join(SCHEMES)}).",
    ),
    "floors": _KVOption(
        "--kv-floor",
        "LAYER=SCHEME",
        "Lowest scheme of a layer; -1 is the last layer; repeatable.",
        multiple=True,
    ),
    "quantized_kv_start": _KVOption(
        "--quantized-kv-start",
        "TOKENS",
        "Tokens before a row's cache is quantized (default: 0).",
        Tokens(),
    ),
    "max_kv_size": _KVOption(
        "--max-kv-size",
        "TOKENS",
        f"Tokens that attention reads at most, {MIN_KV_SIZE} or more (default: all).",
        Tokens(),
    ),
    "keep": _KVOption(
        "--kv-keep", "TOKENS", "First tokens that --max-kv-size never drops (default: 4).", Tokens()
    ),
    "prefix_cache": _KVOption(
        "--prefix-cache",
        "SIZE",
        "Memory for snapshots of prompts; 0: no prefix cache (default: a quarter of the budget).",
    ),
    "prefix_every": _KVOption(
        "--prefix-every",
        "TOKENS",
        "Tokens between snapshots of a prompt (default: 1024).",
        Tokens(),
    ),
}
"""By field of `KVSpec`."""
OPTIONS = {field: option.flag for field, option in _KV_OPTIONS.items()}
LEVELS = ("scheme", "group_size", "value_group_size", "schemes")
"""Fields that set a model's precision levels."""


def kv_options(*fields: str) -> Decorator:
    """Give a command the options of the KV cache, or only those of some fields.

    The command gets them as ``kv``: a `KVSpec`, or None if none of the options is given.
    """
    parameters = {field: f"kv_{field}" for field in fields or _KV_OPTIONS}

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapped(*args: Any, **arguments: Any) -> Any:
            given = {field: arguments.pop(name) for field, name in parameters.items()}
            return command(*args, kv=_spec(given), **arguments)

        for field, name in reversed(parameters.items()):
            attributes = _KV_OPTIONS[field]._asdict()
            click.option(attributes.pop("flag"), name, panel="KV cache", **attributes)(wrapped)
        return wrapped

    return decorate


def _spec(given: dict[str, Any]) -> KVSpec | None:
    settings = {field: value for field, value in given.items() if value not in {None, ()}}
    if not settings:
        return None
    if (text := settings.get("schemes")) is not None:
        settings["schemes"] = _schemes(text)
    if (texts := settings.get("floors")) is not None:
        settings["floors"] = _floors(texts)
    if (text := settings.get("prefix_cache")) is not None:
        settings["prefix_cache"] = _cache_size(text)
    try:
        return msgspec.convert(settings, KVText).spec
    except msgspec.ValidationError as error:
        field, text = describe_error(str(error), KVText)
        option = OPTIONS[field.partition("[")[0]]
        raise click.BadParameter(text.replace(field, option, 1)) from error


def _schemes(text: str) -> list[str]:
    if text.strip().lower() == _NO_SCHEMES:
        return []
    return [part.strip() for part in text.split(",")]


def _cache_size(text: str) -> int:
    try:
        return 0 if text.strip() == "0" else parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(f"{OPTIONS['prefix_cache']}: {error}") from error


def _floors(texts: tuple[str, ...]) -> dict[int, str]:
    floors: dict[int, str] = {}
    for text in texts:
        found = _FLOOR.fullmatch(text)
        if found is None or int(found[1]) in floors:
            wrong = "names a layer twice" if found else "is not LAYER=SCHEME, such as 0=k8v8"
            raise click.BadParameter(f"{OPTIONS['floors']} {wrong}: {text[:40]}")
        floors[int(found[1])] = found[2].strip()
    return floors
