"""From a body to the daemon's requests: decodes, checks what types cannot say, translates.

Whatever comes in, only errors of the protocol come out; those of a field name it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec.structs import asdict

from kvd.http.requests import (
    ABSENT,
    MOST_PROMPTS,
    MOST_TOKENS,
    UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
    Message,
)
from protocol.errors import EmptyPrompt, InvalidRequest
from protocol.messages import Generate
from protocol.types import ChatMessage, Sampling
from protocol.validation import explain

R = TypeVar("R", ChatRequest, CompletionRequest)

TEMPERATURE = 1.0
"""Where a request says none: OpenAI's. On kvd's own socket it is 0."""
_SEEDS = 2**63 - 1
_LONGEST_HARMLESS = 256
"""Bytes of the JSON of an unsupported field that asks for nothing."""


def read(body: bytes | bytearray, kind: type[R]) -> R:
    """Return the body as a request of this kind."""
    try:
        if not body.isascii():
            str(body, "utf-8")  # msgspec does not look into fields that it skips
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        field, text = explain(str(error), kind)
        raise InvalidRequest(text, field=field) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    _check(request)
    return request


def calls(request: ChatRequest | CompletionRequest) -> list[Generate]:
    """Return what the daemon is asked for: one thing for each prompt."""
    if isinstance(request, ChatRequest):
        return [_generate(request, messages=_turns(request.messages))]
    return [_generate(request, **prompt) for prompt in _prompts(request)]


def choices(request: ChatRequest | CompletionRequest) -> int:
    """Return how many completions each prompt gets."""
    return request.n or 1


def echoes(request: ChatRequest | CompletionRequest) -> bool:
    """Return whether the prompt is a part of its completions."""
    return isinstance(request, CompletionRequest) and bool(request.echo)


def is_prompt_only(request: ChatRequest | CompletionRequest) -> bool:
    """Return whether nothing is to be written: the worker writes a token then that is not told."""
    return _most_tokens(request)[0] == 0


# -- what types cannot say --------------------------------------------------------------------


def _check(request: ChatRequest | CompletionRequest) -> None:
    _check_supported(asdict(request), "")
    if request.stream_options is not None and not request.stream:
        raise _wrong("stream_options", "is only for streams (stream: true)")
    if is_prompt_only(request) and not echoes(request):
        raise _wrong("max_tokens", "must be at least 1, but with echo")
    if isinstance(request, ChatRequest):
        if request.top_logprobs and not request.logprobs:
            raise _wrong("top_logprobs", "needs logprobs: true")
        for number, message in enumerate(request.messages):
            if message.tool_calls is not ABSENT or message.function_call is not ABSENT:
                _check_supported(asdict(message), f"messages[{number}].")


def _check_supported(fields: dict[str, Any], place: str) -> None:
    for name in fields.keys() & UNSUPPORTED.keys():
        reason, harmless = UNSUPPORTED[name]
        if fields[name] is not ABSENT and not _is_one_of(fields[name], harmless):
            raise InvalidRequest(f"{place}{name} is not supported: {reason}", field=place + name)


def _is_one_of(said: msgspec.Raw, harmless: tuple[object, ...]) -> bool:
    """Return whether a field asks for nothing: null is as good as that."""
    if memoryview(said).nbytes > _LONGEST_HARMLESS:
        return False
    try:
        value = msgspec.json.decode(said)
    except ValueError:  # JSON by its form only, such as 1e999
        return False
    return value is None or value in harmless


def _wrong(field: str, text: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {text}", field=field)


# -- prompts ----------------------------------------------------------------------------------


def _turns(messages: list[Message]) -> list[ChatMessage]:
    return [
        ChatMessage("system" if m.role == "developer" else m.role, _text(m, f"messages[{i}]"))
        for i, m in enumerate(messages)
    ]


def _text(message: Message, place: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":
            return ""
        raise _wrong(f"{place}.content", "is missing")
    for number, part in enumerate(content):
        if part.type != "text":
            raise _wrong(f"{place}.content[{number}].type", "must be text: kvd reads text only")
        if part.text is None:
            raise _wrong(f"{place}.content[{number}].text", "is missing")
    return "\n".join(part.text or "" for part in content)


def _prompts(request: CompletionRequest) -> list[dict[str, Any]]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if len(set(map(type, prompt))) > 1:
        raise _wrong("prompt", "must hold texts, tokens or lists of tokens, and not a mixture")
    if not prompt:
        raise EmptyPrompt("prompt is empty; give at least one token", field="prompt")
    if isinstance(prompt[0], int):
        return [{"tokens": prompt}]
    if len(prompt) > MOST_PROMPTS:
        raise _wrong("prompt", f"must have at most {MOST_PROMPTS} prompts")
    if len(prompt) * (request.n or 1) > MOST_PROMPTS * 2:
        raise _wrong("n", f"times the number of prompts must be at most {MOST_PROMPTS * 2}")
    kind = "prompt" if isinstance(prompt[0], str) else "tokens"
    if sum(len(one) for one in prompt if isinstance(one, list)) > MOST_TOKENS:
        raise _wrong("prompt", f"must have at most {MOST_TOKENS} tokens in all")
    return [{kind: one} for one in prompt]


# -- the rest ---------------------------------------------------------------------------------


def _generate(request: ChatRequest | CompletionRequest, **prompt: Any) -> Generate:
    if not next(iter(prompt.values())):
        raise EmptyPrompt("prompt is empty; give at least one token", field="prompt")
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if "" in stop:
        raise _wrong("stop", "must not be empty")
    most, named = _most_tokens(request)
    least = request.min_tokens or 0
    if most is not None and least > most:
        raise _wrong("min_tokens", f"must be at most {named}, {most}")
    told, prompt_reported = _logprobs(request, prompt)
    return Generate(
        id="http",
        model=request.model,
        sampling=_sampling(request),
        max_tokens=1 if is_prompt_only(request) else most,
        n=request.n or 1,
        stop=stop,
        stop_tokens=request.stop_token_ids or [],
        ignore_eos=request.ignore_eos or False,
        min_tokens=least,
        logprobs=told,
        prompt_logprobs=prompt_reported,
        priority=request.priority or 0,
        deadline_s=request.deadline_s,
        prefix_salt=request.cache_salt,
        **prompt,
    )


def _most_tokens(request: ChatRequest | CompletionRequest) -> tuple[int | None, str]:
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens, "max_completion_tokens"
    return request.max_tokens, "max_tokens"


def _logprobs(
    request: ChatRequest | CompletionRequest, prompt: dict[str, Any]
) -> tuple[int | None, int | None]:
    """Return how many of the likeliest tokens are told, of the completion and of the prompt."""
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None, None
    told = request.logprobs
    # An echo of tokens needs their texts, which come with their logprobs.
    needs_prompt = request.echo and (told is not None or "tokens" in prompt)
    return told, (told or 0) if needs_prompt else None


def _sampling(request: ChatRequest | CompletionRequest) -> Sampling:
    temperature = TEMPERATURE if request.temperature is None else request.temperature
    top_p = 1.0 if request.top_p is None else request.top_p
    if top_p == 0.0:  # the likeliest token alone
        temperature, top_p = 0.0, 1.0
    penalty = request.repetition_penalty
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=max(0, request.top_k or 0),  # vLLM's -1 is all
        min_p=request.min_p or 0.0,
        seed=None if request.seed is None else request.seed & _SEEDS,
        logit_bias=request.logit_bias or {},
        repetition_penalty=1.0 if penalty is None else penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
    )
