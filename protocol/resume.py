"""Where a request continues after its worker's death."""

from __future__ import annotations

import msgspec

from protocol.messages import FinishReason


class ChoiceProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a choice was when its worker died; none of it is reported again."""

    tokens: list[int] = []
    """Tokens that were sent. The new worker feeds them to the model in the same chunks and steps as
    the old worker did."""
    text_bytes: int = 0
    """Bytes in UTF-8 of the text that was sent, which may lag behind the tokens."""
    reason: FinishReason | None = None
    """Why the choice ended, if that was reported; absent: it continues."""
    parts: int = 0
    """Parts of the text whose beginning was sent."""
