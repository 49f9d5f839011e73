"""Rules for tool calls: the frame of the model's form, and arguments by the tools' schemas.

Text that a form writes without quotes is free up to the text that ends it: only name and frame are
constrained.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvd.worker.answer.forms import CallForm, HarmonyForm, JsonBody, NamedBody, XmlBody
from kvd.worker.grammar.source import FREE, SPACE, Source, json_grammar, quoted, regex_of
from protocol.tools import Tool

_GAP = r"/[ \n]{0,2}/"


class CallRules:
    """The calls of one answer."""

    def __init__(self, source: Source, form: CallForm, tools: Sequence[Tool]) -> None:
        self._source = source
        self._form = form
        self._tools = tools

    def calls(self, *, several: bool) -> str:
        """Return one call, or one and more."""
        opening = self._source.marker(self._form.opening) if self._form.opening else ""
        return f"{opening} {self.calls_after_opening(several=several)}"

    def calls_after_opening(self, *, several: bool) -> str:
        """Return the calls without the marker that begins the first one."""
        source, form = self._source, self._form
        body = self._body(several=several)
        end = source.marker(form.end) if form.end else ""
        begin = source.marker(form.begin) if form.begin else ""
        tail = source.rule(f"{SPACE} {body} {SPACE} {end}")
        if isinstance(form.body, JsonBody) and form.body.listed:
            return tail
        between = form.between.strip()
        gap = f"{SPACE} {source.literal(between)} {SPACE}" if between else SPACE
        first = f"{SPACE} {begin} {tail}" if form.section is not None else tail
        more = source.rule(f"({gap} {begin} {tail})*") if several else ""
        close = ""
        if form.section is not None and form.section[1]:
            close = f"{SPACE} {source.marker(form.section[1])}"
        return f"{first} {more} {close}"

    def _body(self, *, several: bool) -> str:
        body = self._form.body
        rules: list[str]
        match body:
            case JsonBody():
                rules = [self._json(tool, body) for tool in self._tools]
            case NamedBody():
                rules = [self._named(tool, body) for tool in self._tools]
            case XmlBody():
                rules = [self._xml(tool, body) for tool in self._tools]
            case _:
                return FREE if self._form.end.token is not None else "/(?s:.+)/"
        one = self._source.rule(" | ".join(rules))
        if isinstance(body, JsonBody) and body.listed:
            more = f'({_GAP} "," {_GAP} {one})*' if several else ""
            return f'"[" {_GAP} {one} {more} {_GAP} "]"'
        return one

    def _json(self, tool: Tool, body: JsonBody) -> str:
        name, arguments = (json.dumps(key) for key in (body.name_key, body.arguments_key))
        own = arguments_of(self._source, tool)
        pieces = ['"{"', quoted(name), '":"', quoted(json.dumps(tool.name)), '","']
        pieces += [quoted(arguments), '":"', own, '"}"']
        return self._source.rule(f" {_GAP} ".join(pieces))

    def _named(self, tool: Tool, body: NamedBody) -> str:
        number = r"/:[0-9]{1,3}/" if body.numbered else ""
        literal = self._source.literal
        return self._source.rule(
            f"{literal(body.before_name + tool.name)} {number} {literal(body.after_name)}"
            f" {arguments_of(self._source, tool)}"
        )

    def _xml(self, tool: Tool, body: XmlBody) -> str:
        source = self._source
        properties = _object(tool.parameters.get("properties"))
        required = tool.parameters.get("required")
        pairs: list[str] = []
        for key, schema in properties.items():
            key_rule = f"{source.literal(body.before_key + key + body.after_key)}"
            pair = source.rule(f"{key_rule} {self._xml_value(schema, body)}")
            optional = "" if isinstance(required, list) and key in required else "?"
            pairs.append(f"({pair} {SPACE}){optional}")
        if not properties:
            key_rule = (
                f"{source.literal(body.before_key)} /[^<>\\n=]+/ {source.literal(body.after_key)}"
            )
            pairs.append(f"({key_rule} {self._until(body.after_value)} {SPACE})*")
        end = source.literal(body.end.strip()) if body.end.strip() else ""
        return source.rule(
            f"{source.literal((body.before_name + tool.name + body.after_name).rstrip())} {SPACE}"
            f" {' '.join(pairs)} {end}"
        )

    def _xml_value(self, schema: Any, body: XmlBody) -> str:
        """Return a value and the text after it: a string is raw, any other value JSON."""
        kinds = _object(schema).get("type")
        only = kinds if isinstance(kinds, list) else [kinds]
        types = ("integer", "number", "boolean", "object", "array", "null")
        if only and all(one in types for one in only):
            value = self._source.nest(json_grammar(lenient(_object(schema)), "chat.tools"))
            return f"{SPACE} {value} {SPACE} {self._source.literal(body.after_value.strip())}"
        return self._until(body.after_value)

    def _until(self, end: str) -> str:
        return self._source.rule(f"/(?s:.*){regex_of(end.strip())}/", lazy=True)

    @staticmethod
    def harmony(source: Source, form: HarmonyForm, tools: Sequence[Tool]) -> str:
        """Return a call of gpt-oss without the token that ends it, which ends the answer."""
        head = f"{source.marker(form.channel)} {source.literal(form.calls)}"
        json_type = f'(" "? {source.marker(form.constrain)} "json")?'
        rules = [
            f"{head} {source.literal(form.recipient + tool.name)} {json_type}"
            f" {source.marker(form.message)} {arguments_of(source, tool)}"
            for tool in tools
        ]
        return source.rule(" | ".join(rules))


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def lenient(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a tool's schema with unknown keywords ignored: clients' tools have any."""
    options = {"whitespace_pattern": r"( |\n[ \t]{0,40})", "lenient": True}
    return {**schema, "x-guidance": options}


def arguments_of(source: Source, tool: Tool) -> str:
    """Return the JSON object of a tool's arguments."""
    schema: dict[str, Any] = {"type": "object", **tool.parameters}
    if tool.grammar is not None:
        text: dict[str, Any] = {"type": "string"}
        if tool.grammar.kind == "regex":
            text["pattern"] = f"^(?:{tool.grammar.value})$"
        schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        schema["additionalProperties"] = False
    return source.nest(json_grammar(lenient(schema), "chat.tools"))
