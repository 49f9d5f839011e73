"""What a client gets when it attaches: with what it had, all of the request, and nothing twice."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.request_journal import SavedRequest
from kvd.client.exchange import CompletionRecord
from protocol import messages
from protocol import worker as wire
from protocol.errors import InvalidRequest
from protocol.parts import PartReader, PartStart
from protocol.types import ReceivedChoice, Sampling, TokenLogprob, Usage

TEXTS = ["a", "é", "", "日本", "🙂", "b c", ""]
BEGIN: dict[int, list[tuple[Literal["text", "reasoning", "call"], int]]] = {
    0: [("reasoning", 0)],
    2: [("text", 3)],
    3: [("reasoning", 6)],
    4: [("call", 9), ("call", 13)],
    6: [("call", 16)],
}
"""By position of the token: parts that begin with it, and where. One begins inside its text, one
has no text, and one begins with a token that has none."""
PIECES = [
    ("reasoning", "aé"),
    ("text", "日"),
    ("reasoning", "本"),
    *[("call", ""), ("call", "🙂"), ("call", ""), ("call", "b c"), ("call", "")],
]
SUBMIT = wire.Submit(rid="r", prompt="p", sampling=Sampling(seed=1), n=2, prompt_logprobs=0)
CLIENT = cast(Any, None)  # no message is sent


def logprob(number: int) -> TokenLogprob:
    return TokenLogprob(number, str(number), -1.0)


def units(choice: int) -> list[tuple[int, str, list[PartStart]]]:
    """Tokens of a choice, each with the text that it completes and the parts that it begins."""
    return [
        (10 * choice + at, text, [PartStart(start, kind) for kind, start in BEGIN.get(at, [])])
        for at, text in enumerate(TEXTS)
    ]


def reports(sizes: dict[int, list[int]], prompt: list[int]) -> list[wire.RowReport]:
    """Return a request's reports, with so many tokens in each."""
    found: list[wire.RowReport] = [wire.RowAccepted(rid="r", prompt_tokens=sum(prompt))]
    at = 0
    for size in prompt:
        logprobs = [logprob(one) for one in range(at, at + size)]
        found.append(wire.RowPrompt(rid="r", index=at, logprobs=logprobs))
        at += size
    for choice, parts in sizes.items():
        at = 0
        for size in parts:
            part = units(choice)[at : at + size]
            found.append(
                wire.RowTokens(
                    rid="r",
                    index=at,
                    tokens=[token for token, _, _ in part],
                    text="".join(text for _, text, _ in part),
                    choice=choice,
                    parts=[start for _, _, starts in part for start in starts],
                    logprobs=[logprob(token) for token, _, _ in part],
                )
            )
            at += size
        found.append(wire.ChoiceFinished(rid="r", choice=choice, reason="length"))
    found.append(wire.RowFinished(rid="r", reason="length", usage=Usage(6, 14)))
    return found


def parts(total: int) -> st.SearchStrategy[list[int]]:
    """Sums of positive parts that give the total."""
    cuts = st.sets(st.integers(1, total - 1))
    return cuts.map(lambda cut: [b - a for a, b in pairwise([0, *sorted(cut), total])])


RUNS = st.builds(reports, st.fixed_dictionaries({0: parts(7), 1: parts(7)}), parts(6))


def record_of(run: list[wire.RowReport], count: int) -> CompletionRecord:
    """Return what a client has after so many reports."""
    saved, record = SavedRequest("m", SUBMIT), CompletionRecord(2)
    for report in run[:count]:
        saved.apply_report(report)
    record.request = "r"
    for event in saved.missing_events(messages.Attach(id="a", request="r")):
        record._apply(event)
    return record


def lacking(run: list[wire.RowReport], saved: SavedRequest) -> list[wire.RowReport]:
    """Return what a worker reports that resumes the saved request; its reports begin elsewhere."""
    found: list[wire.RowReport] = [run[0]]
    for report in run[1:]:
        match report:
            case wire.RowPrompt(index=index, logprobs=logprobs):
                known = max(0, len(saved.prompt_logprobs) - index)
                if logprobs[known:]:
                    found.append(
                        wire.RowPrompt(rid="r", index=index + known, logprobs=logprobs[known:])
                    )
            case wire.RowTokens(choice=choice, index=index, tokens=tokens):
                known = max(0, len(saved.choices[choice].tokens) - index)
                if tokens[known:]:
                    rest = units(choice)[index + known : index + len(tokens)]
                    found.append(
                        wire.RowTokens(
                            rid="r",
                            index=index + known,
                            tokens=tokens[known:],
                            text="".join(text for _, text, _ in rest),
                            choice=choice,
                            parts=[start for _, _, starts in rest for start in starts],
                            logprobs=(report.logprobs or [])[known:],
                        )
                    )
            case wire.ChoiceFinished(choice=choice) if saved.choices[choice].reason is not None:
                pass
            case _:
                found.append(report)
    return found


@given(first=RUNS, again=RUNS, data=st.data())
def test_a_client_behind_or_ahead_of_the_journal_ends_with_the_whole_request(
    first: list[wire.RowReport], again: list[wire.RowReport], data: st.DataObject
) -> None:
    written = data.draw(st.integers(0, len(first) - 1), "records in the journal")
    had = data.draw(st.integers(0, len(first) - 1), "reports that the client had")
    saved = SavedRequest("m", SUBMIT)
    for report in first[:written]:
        saved.apply_report(report)
    client = record_of(first, had)

    request = client.attach_request("a")
    state = saved.to_state(request, CLIENT, None)
    events = saved.missing_events(request)
    for report in lacking(again, saved):
        if (event := state.apply_report(report)) is not None:
            events.append(event)

    for event in events:
        if isinstance(event, messages.Tokens):
            assert event.index == len(client.choices[event.choice].tokens)
            assert event.tokens or event.text
            assert len(event.logprobs or ()) == len(event.tokens)
        if isinstance(event, messages.PromptLogprobs):
            assert event.index == len(client.prompt_logprobs)
        client._apply(event)
    assert client.choices == record_of(first, len(first)).choices
    assert client.prompt_logprobs == [logprob(one) for one in range(6)]
    assert (client.reason, client.usage) == ("length", Usage(6, 14))
    # The next worker, if this one dies, resumes from everything reported.
    assert [(one.tokens, one.parts) for one in state.to_submit().resume] == [
        (choice.tokens, len(choice.parts)) for choice in client.choices
    ]
    for choice in client.choices:
        pieces = PartReader().split(choice.text, choice.parts)
        assert [(one.part.kind, one.text) for one in pieces] == PIECES


def test_text_that_ends_inside_a_character_is_refused_at_the_end() -> None:
    run = reports({0: [7], 1: [7]}, [6])
    saved = SavedRequest("m", SUBMIT)
    received = [ReceivedChoice(2, 2), ReceivedChoice()]
    state = saved.to_state(messages.Attach(id="a", request="r", received=received), CLIENT, None)
    *_, last = [state.apply_report(report) for report in run]
    assert isinstance(last, messages.Error)
    assert last.error.code == InvalidRequest.code
    assert "text_bytes 2 ends inside a character of choice 0" in last.error.message
    saved.choices[0].text = "aé"
    with pytest.raises(InvalidRequest, match="inside a character"):
        saved.missing_events(messages.Attach(id="a", request="r", received=received))


def test_parts_that_the_choice_does_not_have_are_refused() -> None:
    saved = SavedRequest("m", SUBMIT)
    run = reports({0: [7], 1: [7]}, [6])
    for report in run:
        saved.apply_report(report)
    received = [ReceivedChoice(7, 16, 6), ReceivedChoice(7, 16, 7)]
    with pytest.raises(InvalidRequest, match="choice 1 has 6 parts, but received says 7"):
        saved.to_state(messages.Attach(id="a", request="r", received=received), CLIENT, None)
