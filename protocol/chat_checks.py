"""Checks of tools and grammars that types cannot express; both the socket and HTTP use them."""

from __future__ import annotations

from protocol.errors import InvalidRequest
from protocol.json_values import find_fault
from protocol.tools import MAX_GRAMMAR_CHARS, MAX_TOOLS, ChatOptions, Grammar

NAMED = "name:"
"""Prefix of a tool choice that names the tool."""


def check_chat(chat: ChatOptions, *, has_messages: bool, place: str = "chat.") -> None:
    """Raise `InvalidRequest` for options that contradict each other.

    ``place`` precedes the fields' names in the error.
    """
    if chat != ChatOptions() and not has_messages:
        raise InvalidRequest(f"{place.rstrip('.')} requires messages", field=place.rstrip("."))
    if len(chat.tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"{place}tools has {len(chat.tools)} tools; send at most {MAX_TOOLS}",
            field=f"{place}tools",
        )
    names: set[str] = set()
    for number, tool in enumerate(chat.tools):
        field = f"{place}tools[{number}]"
        if tool.name in names:
            raise InvalidRequest(
                f"{field}.name repeats {tool.name!r}; give each tool a name of its own",
                field=f"{field}.name",
            )
        names.add(tool.name)
        if fault := find_fault(tool.parameters):
            raise InvalidRequest(f"{field}.parameters {fault}", field=f"{field}.parameters")
        if tool.grammar is not None:
            check_grammar(tool.grammar, f"{field}.grammar")
    if fault := find_fault(chat.template):
        raise InvalidRequest(f"{place}template {fault}", field=f"{place}template")
    _check_choice(chat.tool_choice, names, f"{place}tool_choice")


def _check_choice(choice: str, names: set[str], field: str) -> None:
    if choice in ("auto", "none"):
        return
    if choice == "required":
        if not names:
            raise InvalidRequest(f"{field} is required, but the request has no tools", field=field)
        return
    if not choice.startswith(NAMED):
        raise InvalidRequest(
            f"{field} must be auto, none, required, or name: and a tool's name, not {choice[:40]}",
            field=field,
        )
    if choice.removeprefix(NAMED) not in names:
        known = ", ".join(sorted(names)[:20]) or "none"
        raise InvalidRequest(
            f"{field} names the tool {choice.removeprefix(NAMED)[:128]!r}, which tools does not "
            f"have; it has: {known}",
            field=field,
        )


def check_grammar(grammar: Grammar, field: str = "grammar") -> None:
    """Raise `InvalidRequest` for a grammar without a value, or with one that it does not take.

    HTTP builds grammars from other fields, so the types have not checked the value's length.
    """
    if len(grammar.value) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"{field} has {len(grammar.value)} characters; send at most {MAX_GRAMMAR_CHARS}",
            field=field,
        )
    if grammar.kind == "json_object":
        if grammar.value:
            raise InvalidRequest(
                f"{field}.value must be absent for json_object; use json_schema for a schema",
                field=f"{field}.value",
            )
    elif not grammar.value:
        raise InvalidRequest(f"{field}.value is missing for {grammar.kind}", field=f"{field}.value")
