"""Tokens that end reasoning after `max_reasoning_tokens`: they are appended instead of drawn.

Their steps run as those of tokens that are known after a replay, so keys, values and further draws
are the same in an undisturbed run and after a worker's death.
"""

from __future__ import annotations

from kvd.worker.core.delivery import report_text
from kvd.worker.core.request import Completion, Request
from kvd.worker.sampling.logprobs import Scored
from kvd.worker.sampling.sampler import SampledToken, Sampler
from kvd.worker.text.text import Text
from protocol.worker import Report


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
        if completion.matcher is not None:
            completion.matcher.push(token)
        logprobs = None if not_scored else [text.token_logprob(token, 0.0)]
        reports += report_text(request, completion, index, [token], stream.push(token), logprobs)
    completion.known = len(completion.tokens)
    return reports


def restart_sampling(sampler: Sampler, request: Request, completion: Completion) -> None:
    """Count a completion's tokens again, after a dropped one was counted."""
    if completion.row is not None:
        sampler.restart(completion.key, request.prompt, completion.tokens)
