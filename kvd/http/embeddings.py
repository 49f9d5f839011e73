"""``POST /v1/embeddings``: reads requests, runs one call per text, and writes the answer."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Raw

from kvd.http import errors, keep_alive
from kvd.http.keep_alive import KeepAlive
from kvd.http.requests import ABSENT, MOST_TOKENS, Tokens
from protocol import fields, messages
from protocol.embedding import Embed, vector_of
from protocol.errors import EmptyPrompt, InternalError, InvalidRequest
from protocol.fields import PositiveCount, TokenId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.http.backend import Backend
    from protocol.messages import Done, Event

MOST_TEXTS = 2048
"""Maximum texts of one request; OpenAI's limit."""
AT_ONCE = 64
"""Calls of one request that run at once: they fill a worker's passes, and leave its queue to
others."""
MOST_BYTES = 32 * 1024 * 1024
"""Maximum bytes of the vectors in an answer."""
_json = msgspec.json.Encoder()


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``POST /v1/embeddings``."""

    MOST_VALUES: ClassVar[int] = 2 * MOST_TOKENS
    REFUSES_TYPOS: ClassVar[bool] = True

    model: fields.Name
    input: str | Annotated[list[str | TokenId | Tokens], Meta(max_length=MOST_TOKENS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: PositiveCount | None = None
    user: Raw = ABSENT  # without effect

    # Extensions.
    priority: fields.Priority | None = None
    deadline_s: fields.DeadlineSeconds | None = None
    keep_alive: KeepAlive | None = None

    @property
    def calls(self) -> list[Embed]:
        """The daemon's requests, one per text; raises `InvalidRequest`."""
        return calls(
            self.model,
            self.input,
            "input",
            dimensions=self.dimensions,
            priority=self.priority or 0,
            deadline_s=self.deadline_s,
            keep_alive_s=keep_alive.seconds(self.keep_alive),
        )


def calls(
    model: str, texts: str | Sequence[str | int | list[int]], field: str, **options: Any
) -> list[Embed]:
    """Return one call per text; raises `InvalidRequest` that names the field."""
    if not isinstance(texts, str) and all(isinstance(one, int) for one in texts):
        items: list[Any] = [texts]
    else:
        items = [texts] if isinstance(texts, str) else list(texts)
    if len({type(item) for item in items}) > 1:
        raise _invalid(field, "must be a list of texts, tokens or token lists, not a mixture")
    if len(items) > MOST_TEXTS:
        raise _invalid(field, f"has {len(items)} texts; send at most {MOST_TEXTS} at once")
    if sum(len(item) for item in items if isinstance(item, list)) > MOST_TOKENS:
        raise _invalid(field, f"must contain at most {MOST_TOKENS} tokens in total")
    for number, item in enumerate(items):
        if not item:
            place = f"{field}[{number}]" if len(items) > 1 else field
            raise EmptyPrompt(f"{place} is empty; it needs at least one token", field=field)
    kind = "prompt" if isinstance(items[0], str) else "tokens"
    return [Embed(id="http", model=model, **{kind: item}, **options) for item in items]


def _invalid(field: str, text: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {text}", field=field)


@dataclass(frozen=True)
class Vectors:
    """The embeddings of several texts."""

    encoded: list[Raw]
    """Each vector as JSON."""
    prompt_tokens: int


async def embed(backend: Backend, requests: Sequence[Embed], *, as_base64: bool) -> Vectors:
    """Run these calls, at most `AT_ONCE` at once, and return their vectors in order.

    Raises the first error, and cancels the others. Vectors are encoded as they arrive, so that
    the event loop is not blocked for long.
    """
    places, size = asyncio.Semaphore(AT_ONCE), 0

    async def run(request: Embed) -> tuple[Raw, int]:
        nonlocal size
        async with places:
            done = await _call(backend, request)
        vector = _encoded(done, as_base64=as_base64)
        size += len(memoryview(vector))
        if size > MOST_BYTES:
            raise InvalidRequest(
                f"the vectors take more than {MOST_BYTES} bytes; send fewer texts at once, or"
                ' encoding_format: "base64"',
                field="input",
            )
        return vector, done.usage.prompt_tokens

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(request)) for request in requests]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    found = [task.result() for task in tasks]
    return Vectors([vector for vector, _ in found], sum(tokens for _, tokens in found))


async def _call(backend: Backend, request: Embed) -> Done:
    over: asyncio.Future[Done] = asyncio.get_running_loop().create_future()

    def deliver(event: Event) -> None:
        if over.done():
            return
        if isinstance(event, messages.Error):
            over.set_exception(_refusal(event))
        elif isinstance(event, messages.Done):
            over.set_result(event)

    call = backend.generate(request, deliver)
    try:
        return await over
    finally:
        call.cancel()


def _refusal(event: messages.Error) -> errors.Refusal:
    refusal = errors.of(event.error)
    if refusal.param == "prompt":
        refusal.param = "input"
    return refusal


def _encoded(done: Done, *, as_base64: bool) -> Raw:
    if done.embedding is None:
        raise InternalError("the worker ended the request without a vector")
    if as_base64:
        return Raw(b'"%b"' % base64.b64encode(done.embedding))
    return Raw(_json.encode(vector_of(done.embedding)))


def body(model: str, vectors: Vectors) -> bytes:
    """Return OpenAI's answer."""
    tokens = vectors.prompt_tokens
    return _json.encode(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": vector}
                for index, vector in enumerate(vectors.encoded)
            ],
            "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )
