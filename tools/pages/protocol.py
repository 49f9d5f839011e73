"""The generated parts of docs/protocol.md: all messages and values with their fields."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import inspect as types

from protocol import messages as m
from protocol.embedding import Embed
from protocol.explain_messages import Explain, Explained, ExplainedRequests, ExplainRequest
from protocol.kv import KVSpec
from protocol.policy import ModelPolicy, PolicyChange
from protocol.prefix_messages import Cache, CacheDrop, CacheDropped, CacheReply
from protocol.types import Sampling
from tools.pages.fields import Field, fields, markdown, words
from tools.pages.markdown import table

PAGE = "protocol.md"

ANSWERS: dict[type[msgspec.Struct], tuple[type[msgspec.Struct], ...]] = {
    m.Hello: (m.HelloReply,),
    m.Status: (m.StatusReply,),
    m.Metrics: (m.MetricsReply,),
    m.Load: (m.Loading, m.Loaded),
    m.Unload: (m.Unloaded,),
    m.Pin: (m.Pinned,),
    m.Unpin: (m.Pinned,),
    m.Configure: (m.Configured,),
    m.Reload: (m.Configured,),
    m.Events: (m.EventRecord, m.EventsReply),
    Explain: (Explained,),
    ExplainRequest: (ExplainedRequests,),
    m.Tokenize: (m.Tokenized,),
    Cache: (CacheReply,),
    CacheDrop: (CacheDropped,),
    m.Generate: (
        m.Accepted,
        m.Queued,
        m.PrefillStarted,
        m.Paused,
        m.Resumed,
        m.PromptLogprobs,
        m.Tokens,
        m.ChoiceFinished,
        m.Done,
    ),
    m.Cancel: (m.Cancelled,),
    m.Drain: (m.Drained,),
    m.Shutdown: (m.ShutdownReply,),
}
ANSWERS[Embed] = (m.Accepted, m.Queued, m.Paused, m.Resumed, m.Done)
ANSWERS[m.Attach] = ANSWERS[m.Generate]
"""Events that answer a successful request, the final one last."""

OWN_TABLE = (m.Generate, m.Attach)
"""Requests that have their own section."""
ORDER = (
    "logit_bias",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "top_p",
    "min_p",
    "top_k",
    "temperature",
    "seed",
)
"""Sampling settings, in the order in which they are applied."""
ANCHORS: dict[type, str] = {
    Sampling: "generate-sampling",
    KVSpec: "load-kv",
    PolicyChange: "load-policy",
}
"""Values that have their own section."""
ASKED = ("field", "value", "default", "")
DESCRIBED = ("field", "value", "if missing", "")


def parts() -> dict[str, str]:
    """Return all generated parts by name."""
    by_name = {one.name: one for one in fields(Sampling)}
    assert sorted(by_name) == sorted(ORDER)
    return {
        "requests": _overview(),
        "request-fields": _request_fields(),
        "generate": table(ASKED, _rows(m.Generate)),
        "attach": table(ASKED, _rows(m.Attach)),
        "sampling": table(ASKED, [_row(by_name[name], asked=True) for name in ORDER]),
        "kv": table(ASKED, _rows(KVSpec)),
        "policy": table(ASKED, _rows(ModelPolicy)),
        "request-values": "\n\n".join(_value(one) for one in _within(m.Request.__args__)),
        "events": _events(),
        "values": "\n\n".join(_value(one, asked=False) for one in _described_values()),
    }


def tag(kind: type[msgspec.Struct]) -> str:
    """Return a message's name on the wire."""
    return str(kind.__struct_config__.tag)


def _overview() -> str:
    rows = [
        (f"`{tag(kind)}`", markdown(kind.__doc__ or ""), _answers(kind))
        for kind in m.Request.__args__
    ]
    return table(("op", "", "events, the last one in bold"), rows)


def _answers(kind: type[msgspec.Struct]) -> str:
    *before, last = ANSWERS[kind]
    names = [f"`{tag(one)}`" for one in before]
    return ", ".join([*names, f"**`{tag(last)}`**"])


def _request_fields() -> str:
    """Return one table of all requests, except those in `OWN_TABLE`."""
    rows: list[tuple[str, ...]] = []
    for kind in m.Request.__args__:
        if kind not in OWN_TABLE:
            names = [f"`{tag(kind)}`", *[""] * len(fields(kind))]
            rows += [(name, *row) for name, row in zip(names, _rows(kind), strict=False)]
    return table(("op", *ASKED), rows)


def _events() -> str:
    """Return one table of all events, each followed by its fields."""
    rows: list[tuple[str, ...]] = []
    for kind in m.Event.__args__:
        rows.append((f"**`{tag(kind)}`**", "", "", "", markdown(kind.__doc__ or "")))
        rows += [("", *row) for row in _rows(kind, asked=False)]
    return table(("event", *DESCRIBED), rows)


def _rows(kind: type[msgspec.Struct], *, asked: bool = True) -> list[tuple[str, ...]]:
    return [_row(one, asked=asked) for one in fields(kind) if one.name not in {"id", "v"}]


def _row(field: Field, *, asked: bool) -> tuple[str, ...]:
    return (f"`{field.name}`", _kind(field.kind), _default(field, asked=asked), field.text)


def _kind(kind: types.Type) -> str:
    text = words(kind)
    for struct in _structs(kind):
        anchor = ANCHORS.get(struct, struct.__name__.lower())
        text = re.sub(rf"\b{struct.__name__}\b", f"[{struct.__name__}](#{anchor})", text)
    return text


def _default(field: Field, *, asked: bool) -> str:
    if field.required:
        return "*required*" if asked else ""
    if field.default is None:
        return "" if asked else "`null`"
    if isinstance(field.default, msgspec.Struct):
        return "" if asked else "as if all its fields were missing"
    return f"`{json.dumps(field.default)}`"


def _structs(kind: Any) -> list[type[msgspec.Struct]]:
    """Return the structs that a type refers to directly."""
    match kind:
        case types.StructType(cls=struct):
            return [struct]
        case types.UnionType(types=kinds):
            return [struct for one in kinds for struct in _structs(one)]
        case types.ListType(item_type=item) | types.VarTupleType(item_type=item):
            return _structs(item)
        case types.DictType(value_type=value):
            return _structs(value)
    return []


def _within(kinds: Iterable[type[msgspec.Struct]]) -> list[type[msgspec.Struct]]:
    """Return the structs inside messages that have no section elsewhere, in order."""
    found: list[type[msgspec.Struct]] = []
    due = list(kinds)
    while due:
        for struct in _structs(types.type_info(due.pop(0))):
            due += [one for field in fields(struct) for one in _structs(field.kind)]
            if struct not in {*found, *ANCHORS, *m.Request.__args__, *m.Event.__args__}:
                found.append(struct)
    return found


def _described_values() -> list[type[msgspec.Struct]]:
    asked = _within(m.Request.__args__)
    return [one for one in _within(m.Event.__args__) if one not in asked]


def _value(kind: type[msgspec.Struct], *, asked: bool = True) -> str:
    text = markdown(kind.__doc__ or "")
    rows = _rows(kind, asked=asked)
    return f"### {kind.__name__}\n\n{text}\n\n{table(ASKED if asked else DESCRIBED, rows)}"
