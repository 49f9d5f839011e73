"""Texts whose tokens are asked for: how much of them may wait, for a model or for its process.

They are held from the question to the answer, and counted as long; also where a process has one
whose client is gone. Does not know who answers, or when: that is the supervisor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors import mail
from protocol import worker as wire
from protocol.errors import Overloaded
from protocol.framing import encode_frame

if TYPE_CHECKING:
    from actors.mail import ClientMail, RegistryMail
    from actors.runtime.actor import Ref
    from protocol import messages

MOST_BYTES = 32 * 1024 * 1024
"""Four of the longest messages; what waits is the same text several times over."""


class TokenizeRequests:
    """Those of all clients."""

    def __init__(self, supervisor: Ref[RegistryMail], most_bytes: int = MOST_BYTES) -> None:
        self._supervisor = supervisor
        self.most_bytes = most_bytes
        self.bytes = 0
        """Of texts that wait, as a process gets them."""

    async def tokens(self, asked: messages.Tokenize, client: Ref[ClientMail]) -> wire.Tokenized:
        """Ask for the tokens; raises `Overloaded` where too much waits. One text always may."""
        command = wire.Tokenize(
            seq=0,
            prompt=asked.prompt,
            messages=asked.messages,
            limit=asked.limit,
            texts=asked.texts,
        )
        size = len(encode_frame(command))
        if self.bytes and self.bytes + size > self.most_bytes:
            raise Overloaded(
                f"texts of {self.bytes} bytes wait to be tokenized, and this one is another {size}",
                retry_after_s=1.0,
            )
        self.bytes += size
        try:
            return await self._supervisor.ask(mail.TokensWanted(asked.model, command, client))
        finally:
            self.bytes -= size
