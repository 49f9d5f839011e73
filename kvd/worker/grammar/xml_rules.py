"""Rules for calls that are written as pairs of key and value.

A string is written without quotes, so it may contain its own closing tag. It ends where the parser
ends it (`kvd.worker.answer.xml_calls`): at the closing tag that another key, or the end of the
call, follows. Nothing else in it is constrained.
"""

from __future__ import annotations

from typing import Any

from kvd.worker.answer.forms import CallForm, Marker, XmlBody
from kvd.worker.answer.tools import parameters_of
from kvd.worker.answer.typed import types_of
from kvd.worker.grammar.lark_regex import in_lark
from kvd.worker.grammar.schemas import lenient, members
from kvd.worker.grammar.source import SPACE, Source, json_grammar, regex_of
from kvd.worker.grammar.tool_texts import ToolTexts
from protocol.tools import Tool

_ANY = "(?s:.*)"
_ANY_SPACE = r"[\s\x1c-\x1f]*"
"""Whitespace as Python's ``str.strip`` removes it."""
_TYPES = {"integer", "number", "boolean", "object", "array", "null", "string"}
_KEY = r'[^<>"\n=]+'
"""Names of arguments without a schema."""
_SHARED = ("$defs", "definitions")
"""Parts of a tool's schema that those of its arguments refer to."""


class XmlRules:
    """The calls of one answer."""

    def __init__(self, source: Source, form: CallForm, body: XmlBody, texts: ToolTexts) -> None:
        self._source = source
        self._body = body
        self._texts = texts
        self._close = body.after_value.strip()
        self._key = Marker(body.before_key.strip())
        self._end = Marker(body.end.strip()) if body.end.strip() else form.end
        self._known: dict[tuple[str | None, Marker], str] = {}

    def call(self, tool: Tool) -> str:
        """Return a call up to the form's `end`; with the closing marker if that is empty."""
        source, body = self._source, self._body
        parameters = parameters_of(tool)
        properties = members(parameters.get("properties"))
        required = parameters.get("required")
        names = set(required) if isinstance(required, list) else set[Any]()
        keys, may_end = "", True
        for key in reversed(properties):
            pair = self._pair(tool, key, keys, may_end=may_end)
            other = f" | {keys}" if keys and key not in names else ""
            keys = source.rule(f"{pair}{other}")
            may_end = may_end and key not in names
        if not properties:
            keys = self._any_pairs()
        first = [f"{source.marker(self._key)} {keys}"] if keys else []
        end = [source.marker(self._end)] if may_end else []
        name = source.literal((body.before_name + tool.name + body.after_name).rstrip())
        return source.rule(f"{name} {SPACE} ({' | '.join(first + end)})")

    def _any_pairs(self) -> str:
        """Return pairs with any keys."""
        name = f"r{len(self._source.rules)}"
        self._source.rules.append("")
        to_key, to_end = self._text(None, self._key), self._text(None, self._end)
        after = self._source.literal(self._body.after_key)
        pairs = [rf"/{_KEY}/ {after} ({to_key} {name} | {to_end})"]
        if self._body.after_json_key:
            after = self._source.literal(self._body.after_json_key)
            pairs.append(rf"/{_KEY}/ {after} {self._json({}, name, may_end=True)}")
        self._source.rules[int(name[1:])] = f"{name}: {' | '.join(pairs)}"
        return name

    def _pair(self, tool: Tool, key: str, keys: str, *, may_end: bool) -> str:
        """Return a pair and what follows it. ``keys``: the rule of the keys that may follow."""
        body, parameters = self._body, parameters_of(tool)
        schema = members(members(parameters.get("properties"))[key])
        shared = {name: parameters[name] for name in _SHARED if name in parameters}
        types = types_of(schema, parameters)
        if not types <= _TYPES:  # such as "any": llguidance refuses it, and nothing else is known
            types = set()
        marks = body.after_json_key
        is_json = bool(types) and "string" not in types
        options = []
        if not is_json:
            options.append((body.after_key, self._string(tool, schema, keys, may_end=may_end)))
        if is_json or (marks and types != {"string"}):
            value = self._json({**shared, **schema} if types else {}, keys, may_end=may_end)
            options.append((marks or body.after_key, value))
        literal = self._source.literal
        return " | ".join(f"{literal(key + after)} {value}" for after, value in options)

    def _json(self, schema: dict[str, Any], keys: str, *, may_end: bool) -> str:
        source = self._source
        value = source.nest(json_grammar(lenient(schema), "chat.tools"))
        options = [f"{source.marker(self._key)} {keys}"] if keys else []
        options += [source.marker(self._end)] if may_end else []
        close = source.literal(self._close)
        return f"{SPACE} {value} {SPACE} {close} {SPACE} ({' | '.join(options)})"

    def _string(self, tool: Tool, schema: dict[str, Any], keys: str, *, may_end: bool) -> str:
        regex = self._texts.regex(tool) or _listed(schema)
        options = [f"{self._text(regex, self._key)} {keys}"] if keys else []
        options += [self._text(regex, self._end)] if may_end else []
        return f"({' | '.join(options)})"

    def _text(self, regex: str | None, follow: Marker) -> str:
        """Return a string, its closing tag, and what follows it. ``regex``: of the string."""
        known = self._known.get((regex, follow))
        if known is None:
            known = self._known[regex, follow] = self._source.rule(self._new_text(regex, follow))
        return known

    def _new_text(self, regex: str | None, follow: Marker) -> str:
        source = self._source
        close = regex_of(self._close)
        text = _ANY
        if regex is not None:
            newline = r"\n" if self._body.after_value.startswith("\n") else ""
            text = f"(?:{in_lark(regex)}){newline}"
        if source.is_special(self._close):
            return f"/{text}/ {source.literal(self._close)} {SPACE} {source.marker(follow)}"
        plain = [one for one in (self._key, self._end) if not source.is_special(one.text)]
        ends = "|".join(regex_of(one.text) for one in plain)
        end = "" if follow not in plain else regex_of(follow.text)
        more = "(?s:.+)" if end else ""
        whole = f"/{text}{close}[ \\n\\r\\t]{{0,4}}{end}/"
        if plain:
            whole = source.terminal(
                f"{whole} & ~/{_ANY}{close}{_ANY_SPACE}(?:{ends}){more}{_ANY if not more else ''}/"
            )
        return whole if end else f"{whole} {source.marker(follow)}"


def _listed(schema: dict[str, Any]) -> str | None:
    """Return the expression of a schema that lists its texts."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        return None
    return "|".join(regex_of(one) for one in listed) or None
