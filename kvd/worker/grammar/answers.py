"""The grammar of a request's answer: reasoning, then text or calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from kvd.worker.answer.forms import AnswerForms, HarmonyForm, WholeBody, opened_by_prompt
from kvd.worker.grammar.calls import CallRules, harmony_calls
from kvd.worker.grammar.schemas import arguments_of
from kvd.worker.grammar.source import FREE, SPACE, Source, inner_grammar
from kvd.worker.grammar.tool_texts import ToolTexts
from protocol.tools import Tool
from protocol.worker import Submit


@dataclass(frozen=True)
class AnswerGrammar:
    """A grammar in llguidance's form."""

    text: str
    optional: bool = False
    """Whether the answer is only helped by it: without it, calls are checked once complete."""
    has_valid_calls: bool = False
    """Whether calls are valid as far as they were generated."""
    notes: tuple[str, ...] = ()
    """What of the request it does not enforce, with the reason."""
    weaker: AnswerGrammar | None = None
    """The grammar without those of custom tools' texts, for when this one cannot be compiled."""
    fields: tuple[str, ...] = ()
    """Where the request has the arguments' grammar of each tool that may be called."""
    parts: Callable[[], Iterator[str]] = lambda: iter(())
    """Returns these grammars, to find the one that cannot be compiled."""


@dataclass(frozen=True)
class AnswerContext:
    """What a grammar has to know about answers to messages."""

    forms: AnswerForms = field(default_factory=AnswerForms)
    special: Mapping[str, int] = field(default_factory=dict)
    """Special tokens and markers by their text."""
    prompt_end: str = ""
    """Text at the prompt's end, which may begin the answer's first part."""
    may_reason: bool = True
    """Whether the answer may begin reasoning that the prompt did not open."""


def has_grammar(request: Submit, context: AnswerContext) -> bool:
    """Return whether an answer must match a grammar."""
    return request.grammar is not None or bool(_tools(request, context.forms))


def write_grammar(request: Submit, context: AnswerContext, *, canonical: bool) -> AnswerGrammar:
    """Return the grammar that an answer must match (`has_grammar`).

    ``canonical``: see `kvd.worker.grammar.vocabulary.Vocabulary`. Raises `InvalidRequest` for a
    grammar or schema that cannot be one, or is beyond `kvd.worker.grammar.schema_limits`.
    """
    tools = _tools(request, context.forms)
    texts = ToolTexts()
    strict = _grammar(request, context, tools, texts, canonical=canonical)
    if not texts.found:
        return strict
    frames = ToolTexts(enforced=False)
    weaker = _grammar(request, context, tools, frames, canonical=canonical)
    return replace(strict, weaker=weaker)


def _grammar(
    request: Submit, context: AnswerContext, tools: list[Tool], texts: ToolTexts, *, canonical: bool
) -> AnswerGrammar:
    source = Source(context.special)
    text = None
    if request.grammar is not None:
        text = source.nest(inner_grammar(request.grammar))
    if context.forms.harmony is not None:
        start = _harmony(source, context, request, tools, text, texts)
        has_valid_calls = bool(tools)
    else:
        content = _content(source, request, context.forms, tools, text, texts)
        start = f"{_reasoning(source, context)} {content}"
        body = context.forms.call.body if context.forms.call is not None else None
        has_valid_calls = bool(tools) and not isinstance(body, WholeBody)
    return AnswerGrammar(
        source.text(start, canonical=canonical),
        text is None and _is_auto(request),
        has_valid_calls,
        tuple(texts.notes),
        fields=tuple(_field(request, tool) for tool in tools),
        parts=lambda: (_alone(tool, texts.enforced) for tool in tools),
    )


def _field(request: Submit, tool: Tool) -> str:
    part = "parameters" if tool.grammar is None else "grammar"
    return f"chat.tools[{request.chat.tools.index(tool)}].{part}"


def _alone(tool: Tool, enforced: bool) -> str:
    """Return the grammar of a tool's arguments."""
    source = Source({})
    arguments = arguments_of(source, tool, ToolTexts(enforced=enforced))
    return source.text(arguments, canonical=False)


def _is_auto(request: Submit) -> bool:
    return request.chat.tool_choice == "auto"


def _tools(request: Submit, forms: AnswerForms) -> list[Tool]:
    """Return the tools that the answer may call."""
    chat = request.chat
    if request.messages is None or chat.tool_choice == "none" or not forms.has_calls:
        return []
    name = chat.tool_choice.removeprefix("name:")
    if name == chat.tool_choice:
        return chat.tools
    return [tool for tool in chat.tools if tool.name == name]


def _reasoning(source: Source, context: AnswerContext) -> str:
    """Return reasoning and the space after it; empty if there is none."""
    form = context.forms.reasoning
    if form is None:
        return ""
    rest = f"{source.until(form.end)} {SPACE}"
    if opened_by_prompt(form, context.prompt_end):
        return rest
    if not context.may_reason:
        return ""
    return source.rule(f"({SPACE} {source.marker(form.begin)} {rest})?")


def _content(
    source: Source,
    request: Submit,
    forms: AnswerForms,
    tools: list[Tool],
    text: str | None,
    texts: ToolTexts,
) -> str:
    """Return what follows the reasoning. ``text``: the grammar of text."""
    if not tools or forms.call is None:
        return text or FREE
    rules = CallRules(source, forms.call, tools, texts)
    several = request.chat.parallel_tool_calls
    calls = rules.calls(several=several)
    if not _is_auto(request):
        return f"{SPACE} {calls}"
    if text is not None:
        return f"({text} | {calls})"
    opening = forms.call.opening
    if not opening:
        other = source.rule(r"/([^{\[\s](?s:.*))?/")
        return f"({other} | {calls})"
    rest = rules.calls_after_opening(several=several)
    return source.rule(f"{FREE} | {source.until(opening)} {rest}")


def _harmony(
    source: Source,
    context: AnswerContext,
    request: Submit,
    tools: list[Tool],
    text: str | None,
    texts: ToolTexts,
) -> str:
    """Return the messages of an answer of gpt-oss; the prompt ends with the first one's role."""
    form = context.forms.harmony
    assert form is not None
    opened = context.prompt_end.rpartition(form.start.text)[2]
    first = _harmony_message(source, form, opened)
    again = f"{source.marker(form.end)} {source.marker(form.start)} {source.literal(form.role)}"
    reasoning = source.rule(
        f"{first} {source.literal(form.reasoning)} {source.marker(form.message)} {FREE} {again}"
    )
    last: list[str] = []
    if text is not None or _is_auto(request) or not tools:
        channel = f"{source.marker(form.channel)} {source.literal(form.text)}"
        last.append(f"{channel} {source.marker(form.message)} {text or FREE}")
    if tools:
        last.append(harmony_calls(source, form, tools, texts))
    return f"{reasoning}* ({' | '.join(last)})"


def _harmony_message(source: Source, form: HarmonyForm, opened: str) -> str:
    return source.marker(form.channel) if not opened.endswith(form.channel.text) else ""
