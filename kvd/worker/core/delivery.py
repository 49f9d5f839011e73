"""Reports of prompts and completions, without what the client already has."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kvd.worker.core.request import Completion, Request
from kvd.worker.text.text import Text
from protocol.cache_outcome import EXCERPT_CHARS, Difference, RowCached
from protocol.types import TokenLogprob
from protocol.worker import Report, RowNote, RowPrompt, RowTokens

LOCATED_TOKENS = 256
"""Tokens computed again from which on the message with the difference is looked up. For a
prompt of 39K tokens that took 16 to 120 ms on a busy machine, and tokenizing it 216 ms."""
_EXCERPT_TOKENS = 16


def report_text(
    request: Request,
    completion: Completion,
    index: int,
    tokens: Sequence[int],
    text: str,
    logprobs: list[TokenLogprob] | None = None,
) -> list[Report]:
    """Return the reports of new tokens and of the text of the completion's stream.

    ``index``: tokens before these.
    """
    text = completion.sent_text.remove_from(text)
    parts = completion.sent_text.remove_parts(completion.stream.take_parts())
    notes = completion.stream.take_notes()
    reports: list[Report] = [RowNote(rid=request.rid, reason=note) for note in notes]
    if tokens or text or parts:
        reports.append(
            RowTokens(
                rid=request.rid,
                index=index,
                tokens=list(tokens),
                text=text,
                choice=completion.key[1],
                parts=parts,
                logprobs=logprobs,
                level=request.choices.level,
            )
        )
    return reports


def report_rest(request: Request, completion: Completion, *, ended: bool) -> list[Report]:
    """Return the reports of the text that was held back; ``ended``: see `TextStream.finish`."""
    text = completion.stream.finish(ended=ended)
    return report_text(request, completion, len(completion.tokens), (), text)


def report_prompt(request: Request, index: int, logprobs: list[TokenLogprob]) -> list[Report]:
    """Return the report of the logprobs of prompt tokens from ``index`` on.

    Those that were reported before are left out.
    """
    skipped = max(0, request.prompt_reported - index)
    if skipped >= len(logprobs):
        return []
    request.prompt_reported = index + len(logprobs)
    return [RowPrompt(rid=request.rid, index=index + skipped, logprobs=logprobs[skipped:])]


def report_cached(request: Request, held: int, text: Text) -> list[Report]:
    """Return the report of what the prefix cache did; set the usage, and forget the conversation.

    ``held``: tokens of the request's row when its prefill begins. Embeddings, and requests that
    another worker had, are not reported.
    """
    conversation, request.conversation = request.conversation, None
    request.choices.cached_tokens = held
    outcome = request.tracked.outcome(held)
    if outcome is None or request.submit.embed is not None or request.resumed_at is not None:
        return []
    if outcome.difference is not None and outcome.parts[-1].tokens >= LOCATED_TOKENS:
        token, lookup = outcome.difference.token, request.tracked.lookup
        cached = () if lookup is None else lookup.nearest.rest[:_EXCERPT_TOKENS]
        place = None
        if conversation is not None:
            place = text.place_of(conversation, request.prompt, token, cached)
        described = Difference(
            token,
            place,
            text.excerpt(request.prompt[max(0, token - _EXCERPT_TOKENS) : token])[-EXCERPT_CHARS:],
            text.excerpt(request.prompt[token : token + _EXCERPT_TOKENS])[:EXCERPT_CHARS],
            text.excerpt(cached)[:EXCERPT_CHARS],
        )
        outcome = replace(outcome, difference=described)
    return [RowCached(rid=request.rid, outcome=outcome)]
