"""Decodes a request, checks it, and translates it to the protocol."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw

from kvd.http import keep_alive, reading
from kvd.http.grammars import of_schema
from kvd.http.responses_api.items import Conversation, add_all
from kvd.http.responses_api.objects import Response
from kvd.http.responses_api.requests import ABSENT, REFUSED, ResponsesRequest
from kvd.http.responses_api.tools import read_choice, read_tools
from kvd.http.responses_api.wanted import Wanted
from protocol.chat_checks import check_chat, check_grammar
from protocol.errors import EmptyPrompt, InvalidRequest
from protocol.messages import Generate
from protocol.tools import ChatOptions, Grammar
from protocol.types import Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.http.responses_api.store import Store
    from kvd.http.unknown_fields import Ignore

PATH = "/v1/responses"

_NEUTRAL = (b"null", b"false")
_SEALED = "reasoning.encrypted_content"
_LOGPROBS = "message.output_text.logprobs"
_SEED_MASK = 2**63 - 1


def read(
    body: bytes | bytearray,
    store: Store,
    owner: str | None,
    created_at: int,
    ignore: Ignore | None = None,
) -> Wanted:
    """Read a request; raises `InvalidRequest`, also if the previous response is not stored."""
    request = reading.decode(body, ResponsesRequest, ignore)
    _check(request)
    own = _own_items(request)
    conversation = _conversation(request, own, store, owner)
    tools = read_tools([*(request.tools or []), *conversation.tools])
    choice, allowed = read_choice(request.tool_choice, tools)
    found = conversation.finish()
    if not found:
        raise EmptyPrompt("input is empty; it needs at least one message", field="input")
    reasoning = request.reasoning
    effort = None if reasoning is None else reasoning.effort
    chat = ChatOptions(
        tools=list(allowed.tools),
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning=False if effort == "none" else None,
        effort=None if effort == "none" else effort,
    )
    check_chat(chat, has_messages=True, place="")
    call = Generate(
        id="http",
        model=request.model,
        messages=found,
        chat=chat,
        grammar=_grammar(request),
        sampling=_sampling(request),
        max_tokens=request.max_output_tokens,
        logprobs=_logprobs(request),
        priority=request.priority or 0,
        deadline_s=request.deadline_s,
        prefix_salt=request.cache_salt,
        keep_alive_s=keep_alive.seconds(request.keep_alive),
    )
    return Wanted(
        call=call,
        response=_response(request, created_at),
        tools=tools,
        summary=reasoning is not None and reasoning.summary not in {None, "none"},
        sealed=_SEALED in (request.include or []),
        store=request.store is not False,
        stream=bool(request.stream),
        input=tuple(item.copy() for item in own) if request.store is not False else (),
        ignored={
            "item": conversation.ignored_items,
            "reasoning": conversation.foreign_reasoning,
            "tool": tools.ignored,
        },
    )


def _check(request: ResponsesRequest) -> None:
    for name, advice in REFUSED.items():
        value = getattr(request, name)
        if value is not ABSENT and bytes(value) not in _NEUTRAL:
            raise InvalidRequest(f"{name} is not supported; {advice}", field=name)
    if request.background and request.store is False:
        raise InvalidRequest(
            "background is true and store is false, but a background response is read from the "
            "store; leave store out",
            field="store",
        )


def _logprobs(request: ResponsesRequest) -> int | None:
    if request.top_logprobs or _LOGPROBS in (request.include or []):
        return request.top_logprobs or 0
    return None


def _own_items(request: ResponsesRequest) -> list[Raw]:
    if isinstance(request.input, str):
        message = {"role": "user", "content": request.input}
        return [Raw(msgspec.json.encode(message))] if request.input else []
    return request.input


def _conversation(
    request: ResponsesRequest, own: Sequence[Raw], store: Store, owner: str | None
) -> Conversation:
    conversation = Conversation(find=lambda item_id: store.item(item_id, owner))
    if isinstance(request.instructions, str):
        conversation.add_system(request.instructions)
    else:
        add_all(conversation, request.instructions or [], "instructions")
    if request.previous_response_id is not None:
        for earlier in store.history(request.previous_response_id, owner):
            add_all(conversation, earlier, "previous_response_id")
    add_all(conversation, own, "input")
    return conversation


def _grammar(request: ResponsesRequest) -> Grammar | None:
    wanted = None if request.text is None else request.text.format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar("json_object")
    if wanted.schema is None:
        raise InvalidRequest("text.format.schema is missing", field="text.format.schema")
    grammar = of_schema(wanted.schema, "text.format.schema")
    check_grammar(grammar, "text.format.schema")
    return grammar


def _sampling(request: ResponsesRequest) -> Sampling:
    temperature = reading.TEMPERATURE if request.temperature is None else request.temperature
    top_p = 1.0 if request.top_p is None else request.top_p
    if top_p == 0.0:  # only the most likely token
        temperature, top_p = 0.0, 1.0
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        seed=None if request.seed is None else request.seed & _SEED_MASK,
    )


def _kept(instructions: str | list[Raw] | None) -> str | list[Raw] | None:
    """Return instructions that do not keep the request's body in memory."""
    if isinstance(instructions, list):
        return [item.copy() for item in instructions]
    return instructions


def _response(request: ResponsesRequest, created_at: int) -> Response:
    reasoning = request.reasoning
    text: dict[str, Any] = {"format": {"type": "text"}}
    if request.text is not None and request.text.format is not None:
        text = {"format": request.text.format}
    return Response(
        id=f"resp_{secrets.token_hex(16)}",
        created_at=created_at,
        model=request.model,
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=_kept(request.instructions),
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning={
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        safety_identifier=request.safety_identifier,
        store=request.store is not False,
        temperature=reading.TEMPERATURE if request.temperature is None else request.temperature,
        text=text,
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=[tool.copy() for tool in request.tools or []],
        top_logprobs=request.top_logprobs or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        user=request.user,
    )
