"""Reports of prompts and completions, without what the client already has."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.worker.core.request import Completion, Request
from protocol.types import TokenLogprob
from protocol.worker import Report, RowNote, RowPrompt, RowTokens


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
