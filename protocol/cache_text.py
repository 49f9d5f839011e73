"""Sentences about what the prefix cache did for a prompt, for the event log and `kvctl explain`.

They contain positions, roles and counts, and nothing of the prompt's text.
"""

from __future__ import annotations

from datetime import datetime

from protocol.cache_outcome import (
    CacheOutcome,
    CachePart,
    CacheReason,
    Difference,
    Eviction,
    EvictionCause,
    PromptPlace,
    UnreadCause,
)

_UNREAD: dict[UnreadCause, str] = {
    "slower": "prefill was estimated to be faster",
    "slow": "the read took longer than prefill",
    "hangs": "the disk does not answer",
    "damaged": "the file is damaged or missing",
    "failed": "the file could not be read",
    "memory": "the memory for reading was not granted",
    "reclaim": "memory was reclaimed meanwhile",
}
_EVICTED: dict[EvictionCause, str] = {
    "full": "the prefix cache was full",
    "rows": "requests of the same model needed the memory",
    "reclaim": "another model or a lower budget needed the memory",
    "precision": "rows were stepped down",
    "untrusted": "a request with the same beginning returned bad logits",
    "failure": "a step failed",
}
_PLAIN: dict[CacheReason, str] = {
    "memory": "found in memory",
    "disk": "read from disk",
    "new": "computed: after the end of the nearest cached prompt",
    "empty": "computed: no cached prompt of the same salt begins like this",
    "lowered": "computed: the request runs at a lower precision level than cached prompts",
    "scored": "computed: prompt_logprobs needs every token",
    "off": "computed: the model has no prefix cache",
}
_ADVICE: dict[CacheReason, str] = {
    "differs": "Move what changes between requests, such as times and counters, to the end.",
    "evicted": "Raise prefix_cache or the budget, or configure [prefix_store].",
    "between": "A smaller prefix_every leaves more checkpoints.",
}


def sentence(outcome: CacheOutcome, part: CachePart) -> str:
    """Return what happened to one part of a prompt, without its number of tokens."""
    if part.reason == "differs" and outcome.difference is not None:
        return f"computed: {_differs(outcome.difference)}"
    if part.reason == "evicted" and outcome.eviction is not None:
        return f"computed: {_evicted(outcome.eviction)}"
    if part.reason == "unread" and outcome.unread is not None:
        return f"computed: on disk, but not read, because {_UNREAD[outcome.unread]}"
    if part.reason == "end":
        return (
            f"computed: after the last whole chunk of {outcome.chunk:,} tokens; only whole chunks"
            " are cached"
        )
    if part.reason == "between":
        return (
            "computed: the same as in a cached prompt, but no checkpoint is there"
            f" (they end at multiples of {outcome.chunk:,} tokens)"
        )
    return _PLAIN.get(part.reason, f"computed: {part.reason}")


def summary(outcome: CacheOutcome) -> str:
    """Return one line: how much was computed, and the part that explains most of it."""
    computed, total = outcome.computed_tokens, outcome.prompt_tokens
    head = f"{computed:,} of {total:,} prompt tokens were computed"
    missed = [part for part in outcome.parts if sentence(outcome, part).startswith("computed: ")]
    if not missed:
        return head
    largest = max(missed, key=lambda part: part.tokens)
    return f"{head}; {largest.tokens:,} of them: {sentence(outcome, largest)[len('computed: ') :]}"


def advice(outcome: CacheOutcome) -> str:
    """Return what a user can change; empty if nothing was missed that could have been reused."""
    known = [part for part in outcome.parts if part.reason in _ADVICE and part.tokens]
    if not known:
        return ""
    return _ADVICE[max(known, key=lambda part: part.tokens).reason]


def place_text(place: PromptPlace) -> str:
    """Return a place such as ``message 3 of 17 (user)``."""
    if place.kind == "message":
        return f"message {place.number} of {place.of} ({place.role})"
    if place.kind == "tools":
        return f"the tools, at tool {place.number} of {place.of}"
    return "the chat template's own text"


def _differs(difference: Difference) -> str:
    where = "" if difference.place is None else f", in {place_text(difference.place)}"
    return f"differs from the nearest cached prompt at token {difference.token:,}{where}"


def _evicted(eviction: Eviction) -> str:
    until = datetime.fromtimestamp(eviction.at).astimezone().strftime("%H:%M:%S")
    why = _EVICTED[eviction.cause]
    if eviction.cause == "reclaim" and eviction.requester:
        why = f"{eviction.requester} needed the memory"
    return f"was in memory until {until} and was evicted, because {why}"
