"""Bounds the bytes of texts that wait to be tokenized, for all clients together.

A text counts from its request until the reply, even if its client disconnects meanwhile.
"""

from __future__ import annotations

from actors import mail
from actors.runtime.actor import Ref
from protocol import errors, messages
from protocol import worker as wire
from protocol.errors import Overloaded
from protocol.framing import encode_frame

MAX_WAITING_BYTES = 32 * 1024 * 1024
"""Bytes of four client messages of the maximum size. A waiting text exists in several copies."""


class TokenizeRequests:
    """The tokenize requests of all clients."""

    def __init__(
        self, registry: Ref[mail.RegistryMail], max_bytes: int = MAX_WAITING_BYTES
    ) -> None:
        self._registry = registry
        self.max_bytes = max_bytes
        self.bytes = 0
        """Bytes of waiting texts, encoded for a worker."""

    async def tokenize(
        self, request: messages.Tokenize, client: Ref[mail.ClientMail] | None = None
    ) -> messages.Tokenized:
        """Tokenize a text; the text of a ``client`` that disconnects is dropped.

        Raises `Overloaded` if other texts of too many bytes wait, and the worker's errors.
        """
        command = wire.Tokenize(
            seq=0,
            prompt=request.prompt,
            messages=request.messages,
            chat=request.chat,
            limit=request.limit,
            texts=request.texts,
        )
        size = len(encode_frame(command))
        if self.bytes and self.bytes + size > self.max_bytes:
            raise Overloaded(
                f"texts of {self.bytes} bytes wait to be tokenized; this one of {size} bytes would "
                f"exceed the limit of {self.max_bytes}; send it again later",
                retry_after_s=1.0,
            )
        self.bytes += size
        try:
            report = await self._registry.ask(mail.TokenizeText(request.model, command, client))
        finally:
            self.bytes -= size
        if report.error is not None:
            raise errors.from_info(report.error)
        return messages.Tokenized(
            id=request.id, count=report.count, tokens=report.tokens, texts=report.texts
        )
