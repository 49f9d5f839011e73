"""Tokens that end reasoning after `max_reasoning_tokens`: they are appended instead of drawn.

Their steps run as those of tokens that are known after a replay, so keys, values and further draws
are the same in an undisturbed run and after a worker's death.
"""

from __future__ import annotations

from kvd.worker.core.request import Completion, Request
from kvd.worker.sampling.logprobs import Scored
from kvd.worker.sampling.sampler import SampledToken
from kvd.worker.text.text import Text
from protocol.worker import Report, RowTokens


def forced_token(request: Request, token: int) -> SampledToken:
    """Return a token as if it had been drawn; it was certain, so its logprob is 0."""
    scored = None if request.submit.logprobs is None else Scored(token, 0.0)
    return SampledToken(token, trusted=True, scored=scored)


def push_forced(request: Request, completion: Completion, text: Text) -> list[Report]:
    """Append the forced tokens that a replayed completion lacks; return their reports.

    Its last token was sent, but not the tokens that follow it without a draw.
    """
    stream, reports = completion.stream, list[Report]()
    not_scored = request.submit.logprobs is None
    while stream.forced and len(completion.tokens) < request.max_new and not stream.stopped:
        token, index = stream.forced[0], len(completion.tokens)
        completion.tokens.append(token)
        new = completion.sent_text.remove_from(stream.push(token))
        parts = completion.sent_text.remove_parts(stream.take_parts())
        rid, choice = completion.key
        reports.append(
            RowTokens(
                rid=rid,
                index=index,
                tokens=[token],
                text=new,
                choice=choice,
                parts=parts,
                logprobs=None if not_scored else [text.token_logprob(token, 0.0)],
                level=request.choices.level,
            )
        )
    completion.known = len(completion.tokens)
    return reports
