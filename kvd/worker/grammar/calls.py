"""Rules for tool calls: the frame of the model's form, and arguments by the tools' schemas.

A custom tool's text matches the tool's grammar.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvd.worker.answer.forms import CallForm, HarmonyForm, JsonBody, NamedBody, XmlBody
from kvd.worker.grammar.schemas import arguments_of
from kvd.worker.grammar.source import FREE, SPACE, Source, quoted
from kvd.worker.grammar.tool_texts import ToolTexts
from kvd.worker.grammar.xml_rules import XmlRules
from protocol.tools import Tool

_GAP = r"/[ \n]{0,2}/"
_NUMBER = r'/"[0-9]{1,3}"/'


class CallRules:
    """The calls of one answer."""

    def __init__(
        self, source: Source, form: CallForm, tools: Sequence[Tool], texts: ToolTexts
    ) -> None:
        self._source = source
        self._form = form
        self._tools = tools
        self._texts = texts

    def calls(self, *, several: bool) -> str:
        """Return one call, or one and more."""
        opening = self._source.marker(self._form.opening) if self._form.opening else ""
        return f"{opening} {self.calls_after_opening(several=several)}"

    def calls_after_opening(self, *, several: bool) -> str:
        """Return the calls without the marker that begins the first one."""
        source, form = self._source, self._form
        body = self._body(several=several)
        ends_itself = isinstance(form.body, XmlBody) and not form.body.end.strip()
        end = source.marker(form.end) if form.end and not ends_itself else ""
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
                xml = XmlRules(self._source, self._form, body, self._texts)
                rules = [xml.call(tool) for tool in self._tools]
            case _:
                return FREE if self._form.end.token is not None else "/(?s:.+)/"
        one = self._source.rule(" | ".join(rules))
        if isinstance(body, JsonBody) and body.listed:
            more = f'({_GAP} "," {_GAP} {one})*' if several else ""
            return f'"[" {_GAP} {one} {more} {_GAP} "]"'
        return one

    def _json(self, tool: Tool, body: JsonBody) -> str:
        name, arguments = (json.dumps(key) for key in (body.name_key, body.arguments_key))
        own = arguments_of(self._source, tool, self._texts)
        number = f'{quoted(json.dumps(body.id_key))} {_GAP} ":" {_GAP} {_NUMBER} {_GAP} ","'
        pieces = [
            '"{"',
            *([f"({number} {_GAP})?"] if body.id_key else []),
            quoted(name),
            '":"',
            quoted(json.dumps(tool.name)),
            '","',
        ]
        pieces += [quoted(arguments), '":"', own, '"}"']
        return self._source.rule(f" {_GAP} ".join(pieces))

    def _named(self, tool: Tool, body: NamedBody) -> str:
        number = r"/:[0-9]{1,3}/" if body.numbered else ""
        literal = self._source.literal
        end = f"{SPACE} {literal(body.end.strip())}" if body.end else ""
        return self._source.rule(
            f"{literal(body.before_name + tool.name)} {number} {literal(body.after_name)}"
            f" {arguments_of(self._source, tool, self._texts)} {end}"
        )


def harmony_calls(
    source: Source, form: HarmonyForm, tools: Sequence[Tool], texts: ToolTexts
) -> str:
    """Return a call of gpt-oss without the token that ends it, which ends the answer."""
    head = f"{source.marker(form.channel)} {source.literal(form.calls)}"
    json_type = f'(" "? {source.marker(form.constrain)} "json")?'
    rules = [
        f"{head} {source.literal(form.recipient + tool.name)} {json_type}"
        f" {source.marker(form.message)} {arguments_of(source, tool, texts)}"
        for tool in tools
    ]
    return source.rule(" | ".join(rules))
