"""What the prefix cache did for a prompt: which of its tokens were computed again, and why."""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.fields import Count
from protocol.worker_base import RowReportBase

CacheReason = Literal[
    "memory", "disk",
    "new", "end", "differs", "between", "evicted", "unread", "empty", "lowered", "scored", "off",
]  # fmt: skip
"""What became of a part of a prompt. The first two were not computed again:

* ``memory``: found in a checkpoint in memory;
* ``disk``: read from the prefix store;
* ``new``: comes after the end of the nearest cached prompt;
* ``end``: comes after the prompt's last whole chunk, where no prompt has a checkpoint;
* ``differs``: begins with the first token that differs from the nearest cached prompt;
* ``between``: equals the nearest cached prompt, but no checkpoint is at its end;
* ``evicted``: a checkpoint at its end was dropped before;
* ``unread``: a segment at its end is in the prefix store, and was not read;
* ``empty``: no cached prompt has the same salt and the same first token;
* ``lowered``: the request runs below precision level 0, and checkpoints are of level 0;
* ``scored``: logprobs of the prompt were requested, and a checkpoint has none;
* ``off``: the model has no prefix cache.
"""
REUSED: tuple[CacheReason, ...] = ("memory", "disk")
EvictionCause = Literal["full", "rows", "reclaim", "precision", "untrusted", "failure"]
"""Why a checkpoint was dropped:

* ``full``: the prefix cache was at its limit, or a more valuable checkpoint took its place;
* ``rows``: requests of the same model needed the memory;
* ``reclaim``: the daemon reclaimed the memory;
* ``precision``: its pages were stepped down;
* ``untrusted``: a request on its path returned bad logits;
* ``failure``: a step failed, and its results could not be trusted.
"""
UnreadCause = Literal["slower", "slow", "hangs", "damaged", "failed", "memory", "reclaim"]
"""Why a segment was not read:

* ``slower``: prefill was estimated to take less time;
* ``slow``: the read took longer than prefill was estimated to take;
* ``hangs``: the disk does not answer;
* ``damaged``: its file is missing or damaged;
* ``failed``: its file could not be read;
* ``memory``: the memory for reading was not granted;
* ``reclaim``: the read ended because memory was reclaimed.
"""


class CachePart(msgspec.Struct, frozen=True):
    """Consecutive tokens of a prompt with the same fate."""

    reason: CacheReason
    tokens: Count


class PromptPlace(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of a conversation that a token of its prompt belongs to."""

    kind: Literal["message", "tools", "template"]
    """``template``: text of the chat template itself, before or after all messages."""
    number: Count = 0
    """Number of the message or tool, from 1."""
    of: Count = 0
    """Number of all messages or tools."""
    role: str = ""
    """Role of the message."""


class Difference(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a prompt differs from the nearest cached one.

    The texts have at most `EXCERPT_CHARS` characters. Only the protocol's socket shows them.
    """

    token: Count
    """Position of the first token that differs."""
    place: PromptPlace | None = None
    """Absent: the prompt is not a conversation, too few tokens follow, or it is not known."""
    before: str = ""
    """Text before it, in both prompts."""
    here: str = ""
    """Text from it on, in this prompt."""
    cached: str = ""
    """Text from it on, in the cached prompt."""


EXCERPT_CHARS = 40


class Eviction(msgspec.Struct, frozen=True, omit_defaults=True):
    """A checkpoint on the prompt's path that was dropped before."""

    tokens: Count
    """Tokens of the prompt that it held."""
    at: float
    """When it was dropped, in seconds since 1970."""
    cause: EvictionCause
    requester: str = ""
    """Model that needed the memory; for ``reclaim``, if it is known."""


class CacheOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the prefix cache did for one prompt."""

    parts: list[CachePart]
    """The prompt's tokens from the first to the last."""
    chunk: Count = 0
    """Tokens of a prefill chunk: checkpoints end at multiples of it."""
    difference: Difference | None = None
    """For ``differs``."""
    eviction: Eviction | None = None
    """For ``evicted``."""
    unread: UnreadCause | None = None
    """For ``unread``."""

    @property
    def prompt_tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    @property
    def reused_tokens(self) -> int:
        return sum(part.tokens for part in self.parts if part.reason in REUSED)

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.reused_tokens


class RequestOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request and what the prefix cache did for its prompt."""

    request: str
    """The daemon's name of the request."""
    client_id: str
    """The client's own id; over HTTP the id in the answer's header ``x-request-id``."""
    model: str
    at: float
    """When its prefill began, in seconds since 1970."""
    outcome: CacheOutcome


class RowCached(RowReportBase, tag="cached", frozen=True, kw_only=True):
    """The prompt's prefill begins; sent once for a request, before its first tokens."""

    outcome: CacheOutcome
