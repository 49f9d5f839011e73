"""Sets a completion to what an earlier worker has sent of it (`kvd.worker.core.replay`)."""

from __future__ import annotations

from array import array

from kvd.worker.core.forced import push_forced
from kvd.worker.core.replay import SentText, finish_replayed
from kvd.worker.core.request import Completion, Request
from kvd.worker.text.text import Text
from protocol.resume import ChoiceProgress
from protocol.worker import Report


def restore_progress(
    request: Request, completion: Completion, resumed: ChoiceProgress, text: Text
) -> list[Report]:
    """Set a completion's tokens and text to what its client has; remove it if it has ended."""
    stream = completion.stream
    completion.tokens = array("i", resumed.tokens)
    completion.known = len(resumed.tokens)
    pushed = "".join([stream.push(token) for token in resumed.tokens])
    if completion.matcher is not None:
        for token in resumed.tokens:
            completion.matcher.push(token)
    parts = stream.take_parts()
    sent = completion.sent_text = SentText(
        resumed.text_bytes - len(pushed.encode()), resumed.parts - len(parts)
    )
    stream.take_notes()
    forced = push_forced(request, completion, text)
    reason = resumed.reason
    if reason is None:  # the last token may have ended it without a report
        is_full = len(completion.tokens) == request.max_new
        reason = completion.reason if stream.stopped or is_full else None
    if reason is None:
        return forced
    request.completions.remove(completion)
    rest = stream.finish(ended=completion.complete) if not stream.stopped else ""
    rest = sent.remove_from(rest)
    parts = sent.remove_parts(stream.take_parts())
    choice = completion.key[1]
    request.choices.reasoning_tokens += stream.reasoning_tokens
    request.choices.stop_text = stream.stop_text
    return forced + finish_replayed(
        request.choices, choice, resumed, reason, stopped=stream.stopped, rest=rest, parts=parts
    )
