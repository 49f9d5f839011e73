"""Decodes request bodies, checks what types cannot express, and translates to the protocol."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec.structs import asdict

from kvd.http import keep_alive
from kvd.http.chat_api.conversation import chat_messages
from kvd.http.chat_api.options import chat_options
from kvd.http.grammars import grammar_of
from kvd.http.json_size import MOST_VALUES, check_size
from kvd.http.requests import (
    ABSENT,
    MOST_PROMPTS,
    MOST_TOKENS,
    UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
)
from kvd.http.unknown_fields import Ignore, unknown_fields
from protocol.errors import EmptyPrompt, InvalidRequest
from protocol.messages import Generate
from protocol.types import Sampling
from protocol.validation import describe_error

D = TypeVar("D")
R = TypeVar("R", ChatRequest, CompletionRequest)

TEMPERATURE = 1.0
"""OpenAI's default. On kvd's own socket the default is 0."""
_SEED_MASK = 2**63 - 1
_LONGEST_NEUTRAL = 256
"""Limit for the JSON of an unsupported field, in bytes, above which it is not decoded."""


def read(body: bytes | bytearray, kind: type[R], ignore: Ignore | None = None) -> R:
    """Return a checked request; raises `InvalidRequest`."""
    request = decode(body, kind, ignore)
    _check(request)
    return request


def decode(body: bytes | bytearray, kind: type[D], ignore: Ignore | None = None) -> D:
    """Return a body as a struct; raises `InvalidRequest` with the field.

    ``ignore`` is called with the names of unknown fields, which are ignored unless the struct
    forbids them. A struct with lists of tokens has the limit `MOST_VALUES` of its own.
    """
    check_size(body, getattr(kind, "MOST_VALUES", MOST_VALUES))
    try:
        if not body.isascii():
            str(body, "utf-8")  # msgspec does not validate the fields that it skips
        unknown = unknown_fields(body, kind)
        if unknown and ignore is not None:
            ignore(unknown)
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        field, text = describe_error(str(error), kind)
        raise InvalidRequest(text, field=field) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None


def calls(request: ChatRequest | CompletionRequest) -> list[Generate]:
    """Return the daemon's requests, one per prompt."""
    if isinstance(request, ChatRequest):
        messages, chat = chat_messages(request.messages), chat_options(request)
        return [_generate(request, messages=messages, chat=chat)]
    return [_generate(request, **prompt) for prompt in _prompts(request)]


def echoes(request: ChatRequest | CompletionRequest) -> bool:
    return isinstance(request, CompletionRequest) and bool(request.echo)


def hides_reasoning(request: ChatRequest | CompletionRequest) -> bool:
    """Return whether the answer leaves out the reasoning."""
    if isinstance(request, CompletionRequest):
        return False
    excludes = request.reasoning is not None and request.reasoning.exclude
    return bool(excludes) or request.include_reasoning is False


def is_prompt_only(request: ChatRequest | CompletionRequest) -> bool:
    """Return whether the answer has no new tokens; the worker then generates a hidden one."""
    return _token_limit(request)[0] == 0


def _check(request: ChatRequest | CompletionRequest) -> None:
    _check_supported(asdict(request))
    if request.stream_options is not None and not request.stream:
        raise _invalid("stream_options", "requires stream: true")
    if is_prompt_only(request) and not echoes(request):
        raise _invalid("max_tokens", "must be at least 1, except with echo")
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise _invalid("top_logprobs", "requires logprobs: true")


def _check_supported(fields: dict[str, Any]) -> None:
    for name in fields.keys() & UNSUPPORTED.keys():
        reason, neutral = UNSUPPORTED[name]
        if fields[name] is not ABSENT and not _is_one_of(fields[name], neutral):
            raise InvalidRequest(f"{name} is not supported: {reason}", field=name)


def _is_one_of(encoded: msgspec.Raw, neutral: tuple[object, ...]) -> bool:
    """Return whether a field has a neutral value; null always is one."""
    if memoryview(encoded).nbytes > _LONGEST_NEUTRAL:
        return False
    try:
        value = msgspec.json.decode(encoded)
    except ValueError:  # valid syntax, but no value, such as 1e999
        return False
    return value is None or value in neutral


def _invalid(field: str, text: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {text}", field=field)


def _prompts(request: CompletionRequest) -> list[dict[str, Any]]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if len(set(map(type, prompt))) > 1:
        raise _invalid("prompt", "must be a list of texts, tokens or token lists, not a mixture")
    if not prompt:
        raise EmptyPrompt("prompt is empty; it needs at least one token", field="prompt")
    if isinstance(prompt[0], int):
        return [{"tokens": prompt}]
    if len(prompt) > MOST_PROMPTS:
        raise _invalid("prompt", f"must contain at most {MOST_PROMPTS} prompts")
    if len(prompt) * (request.n or 1) > MOST_PROMPTS * 2:
        raise _invalid("n", f"times the number of prompts must be at most {MOST_PROMPTS * 2}")
    kind = "prompt" if isinstance(prompt[0], str) else "tokens"
    if sum(len(item) for item in prompt if isinstance(item, list)) > MOST_TOKENS:
        raise _invalid("prompt", f"must contain at most {MOST_TOKENS} tokens in total")
    return [{kind: item} for item in prompt]


def _generate(request: ChatRequest | CompletionRequest, **prompt: Any) -> Generate:
    if not next(iter(prompt.values())):
        raise EmptyPrompt("prompt is empty; it needs at least one token", field="prompt")
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if "" in stop:
        raise _invalid("stop", "must not be empty")
    max_tokens, field = _token_limit(request)
    min_tokens = request.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise _invalid("min_tokens", f"must be at most {field}, {max_tokens}")
    logprobs, prompt_logprobs = _logprobs(request, prompt)
    return Generate(
        id="http",
        model=request.model,
        grammar=grammar_of(request),
        sampling=_sampling(request),
        max_tokens=1 if is_prompt_only(request) else max_tokens,
        n=request.n or 1,
        stop=stop,
        stop_tokens=request.stop_token_ids or [],
        ignore_eos=request.ignore_eos or False,
        min_tokens=min_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        priority=request.priority or 0,
        deadline_s=request.deadline_s,
        prefix_salt=request.cache_salt,
        keep_alive_s=keep_alive.seconds(request.keep_alive),
        **prompt,
    )


def _token_limit(request: ChatRequest | CompletionRequest) -> tuple[int | None, str]:
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens, "max_completion_tokens"
    return request.max_tokens, "max_tokens"


def _logprobs(
    request: ChatRequest | CompletionRequest, prompt: dict[str, Any]
) -> tuple[int | None, int | None]:
    """Return the number of top tokens to report for the completion and for the prompt."""
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None, None
    count = request.logprobs
    # The echo of a prompt given as tokens takes their texts from the logprobs.
    needs_prompt = request.echo and (count is not None or "tokens" in prompt)
    return count, (count or 0) if needs_prompt else None


def _sampling(request: ChatRequest | CompletionRequest) -> Sampling:
    temperature = TEMPERATURE if request.temperature is None else request.temperature
    top_p = 1.0 if request.top_p is None else request.top_p
    if top_p == 0.0:  # only the most likely token
        temperature, top_p = 0.0, 1.0
    penalty = request.repetition_penalty
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=max(0, request.top_k or 0),  # vLLM's -1 means all tokens
        min_p=request.min_p or 0.0,
        seed=None if request.seed is None else request.seed & _SEED_MASK,
        logit_bias=request.logit_bias or {},
        repetition_penalty=1.0 if penalty is None else penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
    )
