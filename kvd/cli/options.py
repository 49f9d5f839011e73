"""Options that `kvd` and `kvctl` share: the version, and all that there is about the KV cache.

`takes_kv` gives them to a command, so that ``kvd serve`` and ``kvctl load`` never differ.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection
from typing import Annotated, Any

import msgspec
import typer

import kvd
from kvd.config.kv import KVText
from kvd.host.units import parse_bytes
from protocol.types import MIN_KV_SIZE, SCHEMES, KVSpec
from protocol.validation import explain

_PANEL = "KV cache"
_FLOOR = re.compile(r"\s*(-?\d{1,9})\s*=(.*)")
_NO_LADDER = "none"
OPTIONS = {
    "scheme": "--kv",
    "group_size": "--kv-group-size",
    "value_group_size": "--kv-value-group-size",
    "schemes": "--kv-schemes",
    "floors": "--kv-floor",
    "quantized_kv_start": "--quantized-kv-start",
    "max_kv_size": "--max-kv-size",
    "keep": "--kv-keep",
    "prefix_cache": "--prefix-cache",
    "prefix_every": "--prefix-every",
}
"""By field."""
LEVELS = ("scheme", "group_size", "value_group_size", "schemes")
"""Those fields that say which schemes a model's pages may have."""


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(kvd.__version__)
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version", metavar="", callback=_say_version, is_eager=True, help="Print the version."
    ),
]


def _kv(
    *,
    kv: Annotated[
        str | None,
        typer.Option(
            OPTIONS["scheme"],
            metavar="SCHEME",
            rich_help_panel=_PANEL,
            help="Bits of keys and values, such as k8v4; 16 is dense (default: k8v8).",
        ),
    ] = None,
    kv_group_size: Annotated[
        int | None,
        typer.Option(
            OPTIONS["group_size"],
            metavar="32|64",
            rich_help_panel=_PANEL,
            help="Elements that share a scale (default: 64).",
        ),
    ] = None,
    kv_value_group_size: Annotated[
        int | None,
        typer.Option(
            OPTIONS["value_group_size"],
            metavar="32|64|128",
            rich_help_panel=_PANEL,
            help="The same of values alone (default: as of keys).",
        ),
    ] = None,
    kv_schemes: Annotated[
        str | None,
        typer.Option(
            OPTIONS["schemes"],
            metavar="SCHEMES",
            rich_help_panel=_PANEL,
            help=f"What rows may step down to, or {_NO_LADDER} (default: {','.join(SCHEMES)}).",
        ),
    ] = None,
    kv_floor: Annotated[
        list[str] | None,
        typer.Option(
            OPTIONS["floors"],
            metavar="LAYER=SCHEME",
            rich_help_panel=_PANEL,
            help="A layer does not go below this; -1 is the last one; may be repeated.",
        ),
    ] = None,
    quantized_kv_start: Annotated[
        int | None,
        typer.Option(
            OPTIONS["quantized_kv_start"],
            metavar="TOKENS",
            rich_help_panel=_PANEL,
            help="Rows stay dense until they have so many (default: 0).",
        ),
    ] = None,
    max_kv_size: Annotated[
        int | None,
        typer.Option(
            OPTIONS["max_kv_size"],
            metavar="TOKENS",
            rich_help_panel=_PANEL,
            help=f"Attend to so many at most, {MIN_KV_SIZE} or more (default: all).",
        ),
    ] = None,
    kv_keep: Annotated[
        int | None,
        typer.Option(
            OPTIONS["keep"],
            metavar="TOKENS",
            rich_help_panel=_PANEL,
            help="The first ones, which --max-kv-size lets stay (default: 4).",
        ),
    ] = None,
    prefix_cache: Annotated[
        str | None,
        typer.Option(
            OPTIONS["prefix_cache"],
            metavar="SIZE",
            rich_help_panel=_PANEL,
            help="For prompts that begin alike; 0 keeps nothing (default: 256MiB).",
        ),
    ] = None,
    prefix_every: Annotated[
        int | None,
        typer.Option(
            OPTIONS["prefix_every"],
            metavar="TOKENS",
            rich_help_panel=_PANEL,
            help="Between places to go on from inside a prompt (default: 1024).",
        ),
    ] = None,
) -> KVSpec | None:
    """Return the settings that the options say, None if there are none of them."""
    said: dict[str, object] = {
        "scheme": kv,
        "group_size": kv_group_size,
        "value_group_size": kv_value_group_size,
        "schemes": None if kv_schemes is None else _schemes(kv_schemes),
        "floors": _floors(kv_floor) if kv_floor else None,
        "quantized_kv_start": quantized_kv_start,
        "max_kv_size": max_kv_size,
        "keep": kv_keep,
        "prefix_cache": None if prefix_cache is None else _size(prefix_cache),
        "prefix_every": prefix_every,
    }
    said = {field: value for field, value in said.items() if value is not None}
    if not said:
        return None
    try:
        return msgspec.convert(said, KVText).spec
    except msgspec.ValidationError as error:
        field, text = explain(str(error), KVText)
        option = OPTIONS[field.partition("[")[0]]
        raise typer.BadParameter(text.replace(field, option, 1)) from error


def _schemes(text: str) -> list[str]:
    return [] if text.strip().lower() == _NO_LADDER else [part.strip() for part in text.split(",")]


def _size(text: str) -> int:
    try:
        return 0 if text.strip() == "0" else parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(f"{OPTIONS['prefix_cache']}: {error}") from error


def _floors(texts: list[str]) -> dict[int, str]:
    floors: dict[int, str] = {}
    for text in texts:
        found = _FLOOR.fullmatch(text)
        if found is None or int(found[1]) in floors:
            option = OPTIONS["floors"]
            wrong = "names a layer twice" if found else "is no LAYER=SCHEME, such as 0=k8v8"
            raise typer.BadParameter(f"{option} {wrong}: {text[:40]}")
        floors[int(found[1])] = found[2].strip()
    return floors


def takes_kv(
    command: Callable[..., None], *, only: Collection[str] = tuple(OPTIONS)
) -> Callable[..., None]:
    """Give a command the options of the KV cache in place of its ``kv``, or ``only`` some fields'.

    The command gets that as a `KVSpec`, or None if none of the options was given.
    """
    wanted = {OPTIONS[field].lstrip("-").replace("-", "_") for field in only}
    options = {
        name: option
        for name, option in inspect.signature(_kv, eval_str=True).parameters.items()
        if name in wanted
    }

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:
        said = {name: arguments.pop(name) for name in options}
        command(**arguments, kv=_kv(**said))

    signature = inspect.signature(command, eval_str=True)
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        parameters += options.values() if parameter.name == "kv" else [parameter]
    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return wrapped
