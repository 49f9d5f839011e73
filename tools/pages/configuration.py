"""The generated parts of docs/configuration.md: a table for each struct, and an example file."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from typing import Any

import msgspec

from actors.machines.watchdog import WatchdogTimeouts
from kvd.config.config import Config, ModelEntry, PrefixStoreSettings
from kvd.config.http import HttpSettings
from kvd.config.kv import KVText
from kvd.config.settings import may_change_live
from tools.pages.fields import Field, fields, words
from tools.pages.markdown import table

PAGE = "configuration.md"
LINKS: dict[type, str] = {
    ModelEntry: "[tables](#models)",
    KVText: "a [table](#modelskv)",
    WatchdogTimeouts: "[table](#watchdog)",
    HttpSettings: "[table](#http)",
    PrefixStoreSettings: "[table](#prefix_store)",
}


@dataclass(frozen=True)
class Section:
    """A table of config.toml, and the text above its keys."""

    title: str
    prefix: str
    """Prefix of the keys, as in `kvctl config`."""
    struct: type[msgspec.Struct]
    intro: str


FILE = Section(
    "The file itself",
    "",
    Config,
    "*Takes effect* is explained [below](#changes-while-it-runs).",
)
MODELS = Section(
    "`[[models]]`",
    "models[x].",
    ModelEntry,
    'One table per model, or `models = ["demo", …]` without further settings. How several models '
    "share the budget: [tuning.md](tuning.md#several-models-one-budget).",
)
KV = Section(
    "`[models.kv]`",
    "models[x].kv.",
    KVText,
    "The KV cache of the model above. Benefits and costs: [tuning.md](tuning.md).",
)
HTTP = Section(
    "`[http]`",
    "http.",
    HttpSettings,
    "OpenAI's API, health and metrics: [http.md](http.md), [security.md](security.md).",
)
WATCHDOG = Section(
    "`[watchdog]`",
    "watchdog.",
    WatchdogTimeouts,
    "Seconds without a report after which a worker is ended, by phase. Its requests continue in "
    "the next process. The defaults suit large models without an accelerator; lower them to "
    "detect hangs sooner.",
)
PREFIX_STORE = Section(
    "`[prefix_store]`",
    "prefix_store.",
    PrefixStoreSettings,
    "Prefixes of prompts on disk, which outlive their worker: "
    "[operations.md](operations.md#prefixes-on-disk). A store that is turned on at run time "
    "serves models that are loaded afterwards.",
)
SECTIONS = (FILE, MODELS, KV, PREFIX_STORE, HTTP, WATCHDOG)


def parts() -> dict[str, str]:
    """Return all generated parts by name."""
    return {"settings": "\n\n".join(map(_section, SECTIONS)), "example": _example()}


def _section(section: Section) -> str:
    rows = [
        (f"`{one.name}`", _kind(one), _default(one), _takes_effect(section, one), one.text)
        for one in fields(section.struct)
    ]
    head = ("key", "value", "default", "takes effect", "")
    return f"### {section.title}\n\n{section.intro}\n\n{table(head, rows)}"


def _takes_effect(section: Section, field: Field) -> str:
    if isinstance(field.default, msgspec.Struct):
        return ""  # the struct's own table has this for each key
    if may_change_live(section.prefix + field.name):
        return "now"
    return "next load" if section in {MODELS, KV} else "next start"


def _kind(field: Field) -> str:
    text = words(field.kind)
    for struct, link in LINKS.items():
        text = text.replace(struct.__name__, link)
    return text


def _default(field: Field) -> str:
    if field.required:
        return "*required*"
    if field.default is None or isinstance(field.default, msgspec.Struct):
        return ""
    return f"`{_toml(field.default)}`"


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(one)}' for key, one in value.items())}}}"
    return json.dumps(value)


FILLED = {
    "budget": '"8GiB"',
    "prefill_chunk": "256",
    "source": '"mlx-community/Qwen3-0.6B-4bit"',
    "alias": '"qwen"',
    "idle_ttl_s": "900",
    "max_context": "16384",
    "ranks": "1",
    "max_kv_size": "8192",
    "prefix_cache": "4294967296",
    "group_size": "64",
    "value_group_size": "64",
    "port": "11711",
}
"""Values in the example file for keys without a default."""


def _example() -> str:
    """Return a file with all tables and keys; keys that may be left out are commented out."""
    return "```toml\n" + "\n".join(map(_lines, SECTIONS)) + "```"


def _lines(section: Section) -> str:
    lines = [section.title.strip("`")] if section.prefix else []
    for one in fields(section.struct):
        if isinstance(one.default, msgspec.Struct) or one.name in {"models", "kv"}:
            continue
        text = one.text.replace("\\|", "|")
        lines += textwrap.wrap(text, 94, initial_indent="# ", subsequent_indent="# ")
        value = FILLED[one.name] if one.default is None else _toml(one.default)
        lines.append(f"{'' if one.required else '#'}{one.name} = {value}\n")
    return "\n".join(lines)


def uncommented(example: str) -> str:
    """Return the example with every key uncommented."""
    return "\n".join(
        line.removeprefix("#") if line.startswith("#") and not line.startswith("# ") else line
        for line in example.splitlines()
        if not line.startswith("```")
    )
