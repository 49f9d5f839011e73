"""Requests survive a restart of the daemon; clients attach to them, or they expire."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest

from actors.request_journal import (
    Record,
    ReportReceived,
    RequestDropped,
    RequestReceived,
    SavedRequest,
)
from actors.saved_requests import SavedRequests
from actors.status import KnownModel
from actors.system import Settings
from protocol import errors, messages
from protocol.types import ReceivedChoice, Sampling, Usage
from protocol.worker import ChoiceFinished, RowAccepted, RowFinished, RowReport, RowTokens, Submit
from tests.sim import fakes
from tests.sim.fakes import SLOW
from tests.sim.loop import run, simulated, until
from tests.sim.world import SimClient, world

SEED = 4
expected = partial(fakes.expected, seed=SEED)


class MemoryJournal:
    """A journal in a list; `saved` reads it as the journal on disk is read."""

    full = False

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.records = list(records)

    def write(self, record: Record) -> bool:
        if not self.full:
            self.records.append(record)
        return not self.full

    def saved(self) -> dict[str, SavedRequest]:
        found: dict[str, SavedRequest] = {}
        for record in self.records:
            match record:
                case RequestReceived(rid=rid, model=model, submit=submit):
                    found[rid] = SavedRequest(model, submit, submit.deadline_s)
                case ReportReceived(rid=rid, report=report):
                    found[rid].apply_report(report)
                case RequestDropped(rid=rid):
                    found.pop(rid, None)
        return found


async def _started(client: SimClient, tokens: int, **fields: object) -> tuple[str, str]:
    """Start a request and wait until the client has this many tokens of it.

    Returns the request's id on the connection, and the name by which clients attach to it.
    """
    key = client.generate(sampling=Sampling(seed=SEED), **fields)
    await until(lambda: client.count(key) == tokens)
    [accepted] = [one for one in client.events[key] if type(one) is messages.Accepted]
    return key, accepted.request


async def _interrupted(journal: MemoryJournal, tokens: int, **fields: object) -> str:
    """Serve a request until it has this many tokens, then end the daemon as if it had died.

    Returns the name by which clients attach to the request.
    """
    async with world({"demo": [SLOW]}, saved_requests=SavedRequests(journal)) as w:
        client = w.client()
        _, name = await _started(client, tokens, **fields)
        kept = list(journal.records)
        client.disconnect()
    journal.records[:] = kept  # records after the death were never written
    return name


def interrupted(tokens: int, **fields: object) -> tuple[MemoryJournal, str]:
    journal = MemoryJournal()
    return journal, run(_interrupted(journal, tokens, **fields))


def attach(client: SimClient, name: str, *received: tuple[int, int]) -> str:
    return client.start(
        messages.Attach, request=name, received=[ReceivedChoice(*one) for one in received]
    )


async def _fetched(journal: MemoryJournal, name: str) -> tuple[Any, list[int]]:
    """Attach in the next daemon; return the request's last event and its tokens."""
    async with world(saved_requests=SavedRequests(journal, journal.saved())) as w:
        client = w.client()
        key = attach(client, name)
        return await client.end(key), client.tokens(key)


def text_of(client: SimClient, key: str) -> str:
    return "".join(one.text for one in client.events[key] if isinstance(one, messages.Tokens))


@pytest.mark.parametrize("had", [0, 2, 5])
def test_attach_sends_the_missing_events_and_continues(had: int) -> None:
    journal, name = interrupted(5, max_tokens=9)
    right = expected(9)
    text = "".join(f"{one} " for one in right[:had])

    @simulated
    async def scene() -> None:
        async with world(saved_requests=SavedRequests(journal, journal.saved())) as w:
            client = w.client()
            key = attach(client, name, (had, len(text)))
            assert (await client.end(key)).reason == "length"
            first, *events = client.events[key]
            assert isinstance(first, messages.Accepted)
            assert (first.request, first.seed) == (name, SEED)
            tokens = [one for one in events if isinstance(one, messages.Tokens)]
            assert tokens[0].index == had
            assert [one for event in tokens for one in event.tokens] == right[had:]
            assert text + text_of(client, key) == "".join(f"{one} " for one in right)
            assert {type(one) for one in events} == {messages.Tokens, messages.Done}
            (submit,) = [one for one in w.spawn.last("demo").commands if isinstance(one, Submit)]
            assert submit.levels_reported == [0]
        assert journal.saved()[name].end is not None  # kept until the request is dropped

    scene()


@pytest.mark.parametrize(("saved", "had"), [(5, 6), (5, 8), (1, 9), (0, 3)])
def test_a_client_ahead_of_the_journal_gets_only_what_it_lacks(saved: int, had: int) -> None:
    journal, name = interrupted(max(saved, 1), max_tokens=9)
    if not saved:  # only the request itself was written
        del journal.records[1:]
    text = "".join(f"{one} " for one in expected(9))
    known = len("".join(f"{one} " for one in expected(had)))

    @simulated
    async def scene() -> None:
        async with world(saved_requests=SavedRequests(journal, journal.saved())) as w:
            client = w.client()
            key = attach(client, name, (had, known))
            assert (await client.end(key)).reason == "length"
            first, *events = client.events[key]
            assert isinstance(first, messages.Accepted)
            assert first.request == name
            tokens = [one for one in events if isinstance(one, messages.Tokens)]
            assert [one.index for one in tokens] == list(range(had, 9))
            assert [one for event in tokens for one in event.tokens] == expected(9)[had:]
            assert text_of(client, key) == text[known:]
        assert journal.saved()[name].choices[0].tokens == expected(9)

    scene()


@pytest.mark.parametrize(
    ("received", "reason"),
    [
        ((10, 9), "choice 0 has 9 tokens and 34 bytes of text, but received says 10 and 9"),
        ((9, 99), "choice 0 has 9 tokens and 34 bytes of text, but received says 9 and 99"),
    ],
)
def test_a_client_cannot_have_more_than_the_request_ever_has(
    received: tuple[int, int], reason: str
) -> None:
    journal, name = interrupted(5, max_tokens=9)

    @simulated
    async def scene() -> None:
        wrong = [ReceivedChoice(*received)]
        for _ in range(2):  # found at the end first, and at once when the journal has the end
            async with world(saved_requests=SavedRequests(journal, journal.saved())) as w:
                with pytest.raises(errors.InvalidRequest, match=reason):
                    await w.client().ask(messages.Attach, request=name, received=wrong)
            assert journal.saved()[name].end is not None

    scene()


def test_the_end_can_be_fetched_again() -> None:
    """A client that attaches may lose its connection, or the daemon, before it has the end."""
    journal, name = interrupted(9, max_tokens=10)
    [last] = [one for one in journal.records if isinstance(one, ReportReceived)][-1:]

    @simulated
    async def scene() -> None:
        async with world(saved_requests=SavedRequests(journal, journal.saved())) as w:
            client = w.client()
            assert (await client.end(attach(client, name))).reason == "length"
        had = (10, len("".join(f"{one} " for one in expected(10))))
        for _ in range(2):
            late = SavedRequests(journal, journal.saved(), keep_s=60.0)
            async with world(saved_requests=late) as w:
                for received, rest in (((0, 0), expected(10)), (had, [])):
                    client = w.client()
                    key = attach(client, name, received)
                    done = await client.end(key)
                    assert (done.reason, done.usage.completion_tokens) == ("length", 10)
                    assert client.tokens(key) == rest
                assert not w.spawn.last("demo")._rows
        async with world(saved_requests=SavedRequests(journal, journal.saved(), keep_s=60.0)):
            await asyncio.sleep(60)
        assert name not in journal.saved()

    assert last.rid == name
    scene()


@pytest.mark.parametrize("cancelled", [True, False])
def test_an_end_without_a_worker_can_be_fetched(cancelled: bool) -> None:
    """The daemon itself ends the request while its worker restarts, and may die right after."""
    journal = MemoryJournal()

    @simulated
    async def scene() -> None:
        async with world({"demo": [SLOW]}, saved_requests=SavedRequests(journal)) as w:
            client = w.client()
            key, name = await _started(client, 2, max_tokens=9)
            w.spawn.last("demo").die(-9)
            await until(lambda: w.state() == "backoff")
            if cancelled:
                client.start(messages.Cancel, target=key)
            else:
                await client.ask(messages.Unload, model="demo")
            end = await client.end(key)
        again, tokens = await _fetched(journal, name)
        assert tokens == expected(2)
        if cancelled:
            assert (end.reason, again.reason) == ("cancelled", "cancelled")
            assert end.usage == again.usage
        else:
            assert (end.error.code, again.error) == ("draining", end.error)

    scene()


def test_a_request_whose_client_was_disconnected_is_cancelled() -> None:
    journal = MemoryJournal()

    @simulated
    async def scene() -> None:
        async with world({"demo": [SLOW]}, saved_requests=SavedRequests(journal)) as w:
            client = w.client()
            _, name = await _started(client, 2, max_tokens=9)
            client.disconnect()
            await until(lambda: journal.saved()[name].end is not None)
        end, tokens = await _fetched(journal, name)
        assert (end.reason, tokens) == ("cancelled", expected(2))

    scene()


def test_a_cancel_after_the_end_of_all_choices_does_not_change_the_reason() -> None:
    """The worker died between the end of the last choice and that of the request."""
    submit = Submit(rid="1", prompt="hello", sampling=Sampling(seed=SEED), n=2)
    reports: list[RowReport] = [
        RowAccepted(rid="1", prompt_tokens=5),
        RowTokens(rid="1", index=0, tokens=[7], text="7 "),
        ChoiceFinished(rid="1", choice=0, reason="length"),
        ChoiceFinished(rid="1", choice=1, reason="stop"),
    ]
    records = [RequestReceived("1", "demo", submit), *(ReportReceived("1", it) for it in reports)]
    journal = MemoryJournal(records)

    @simulated
    async def scene() -> None:
        async with world(saved_requests=SavedRequests(journal, journal.saved())) as w:
            w.spawn.last("demo").die(-9)
            await until(lambda: w.state() == "backoff")
            client = w.client()
            key = attach(client, "1")
            client.start(messages.Cancel, target=key)
            done = await client.end(key)
            ends = [it for it in client.events[key] if isinstance(it, messages.ChoiceFinished)]
            assert [(it.choice, it.reason) for it in ends] == [(0, "length"), (1, "stop")]
            assert (done.reason, done.usage.completion_tokens) == ("length", 1)

    scene()


def test_the_end_names_the_stop_text_again() -> None:
    submit = Submit(rid="1", prompt="hello", sampling=Sampling(seed=SEED), stop=["END"])
    reports: list[RowReport] = [
        RowAccepted(rid="1", prompt_tokens=5),
        RowFinished(rid="1", reason="stop", usage=Usage(5, 3), stop_text="END"),
    ]
    records = [RequestReceived("1", "demo", submit), *(ReportReceived("1", it) for it in reports)]
    journal = MemoryJournal(records)

    @simulated
    async def scene() -> None:
        async with world(saved_requests=SavedRequests(journal, journal.saved())) as w:
            client = w.client()
            assert (await client.end(attach(client, "1"))).stop_text == "END"

    scene()


def test_a_request_whose_choices_have_all_ended_needs_no_worker() -> None:
    """The daemon was killed between the end of the last choice and that of the request."""
    usage = Usage(5, 3, cached_tokens=4)
    submit = Submit(rid="1", prompt="hello", sampling=Sampling(seed=SEED), n=2)
    reports: list[RowReport] = [
        RowAccepted(rid="1", prompt_tokens=5),
        RowTokens(rid="1", index=0, tokens=[7], text="7 "),
        ChoiceFinished(rid="1", choice=1, reason="length"),
        ChoiceFinished(rid="1", choice=0, reason="stop", usage=usage),
    ]
    records = [RequestReceived("1", "demo", submit), *(ReportReceived("1", it) for it in reports)]
    journal = MemoryJournal(records)

    @simulated
    async def scene() -> None:
        saved, known = SavedRequests(journal, journal.saved()), {"demo": KnownModel("demo")}
        async with world(load=(), known=known, saved_requests=saved) as w:
            client = w.client()
            for _ in range(2):  # a client that loses its connection may attach again
                key = attach(client, "1")
                done = await client.end(key)
                assert (done.reason, done.usage) == ("length", usage)
                ends = [it for it in client.events[key] if isinstance(it, messages.ChoiceFinished)]
                assert [(it.choice, it.reason) for it in ends] == [(0, "stop"), (1, "length")]
            assert not w.spawn.processes

    scene()


@simulated
async def test_attach_rejects_unknown_requests_and_wrong_counts() -> None:
    journal = MemoryJournal()
    name = await _interrupted(journal, 3, max_tokens=9)
    async with world(saved_requests=SavedRequests(journal, journal.saved())) as w:
        client = w.client()
        for wrong, kind in (
            ({"request": "other"}, errors.UnknownRequest),
            (
                {"request": name, "received": [ReceivedChoice(), ReceivedChoice()]},
                errors.InvalidRequest,
            ),
        ):
            with pytest.raises(kind):
                await client.ask(messages.Attach, **wrong)
        key = attach(client, name)
        await until(lambda: client.count(key) > 3)
        with pytest.raises(errors.UnknownRequest, match="belongs to another connection"):
            await w.client().ask(messages.Attach, request=name)
        assert (await client.end(key)).reason == "length"


@simulated
async def test_a_refused_attach_can_be_repeated_and_a_cancel_ends_the_request() -> None:
    journal = MemoryJournal()
    name = await _interrupted(journal, 3, max_tokens=9)
    async with world(
        {"demo": [SLOW]}, load=(), saved_requests=SavedRequests(journal, journal.saved())
    ) as w:
        client = w.client()
        with pytest.raises(errors.UnknownModel):
            await client.ask(messages.Attach, request=name)
        await w.system.load("demo")
        key = attach(client, name)
        await until(lambda: client.count(key) == 4)
        client.start(messages.Cancel, target=key)
        assert (await client.end(key)).reason == "cancelled"
    assert journal.saved()[name].end is not None


@simulated
async def test_unclaimed_requests_expire() -> None:
    journal = MemoryJournal()
    name = await _interrupted(journal, 3, max_tokens=9)
    late = SavedRequests(journal, journal.saved(), keep_s=60.0)
    async with world(saved_requests=late) as w:
        await asyncio.sleep(50)
        assert late.saved
        await asyncio.sleep(10)
        assert [notice.fields["rid"] for notice in w.notices_of("request_expired")] == [name]
        with pytest.raises(errors.UnknownRequest):
            await w.client().ask(messages.Attach, request=name)
    assert name not in journal.saved()


@simulated
async def test_a_deadline_survives_a_restart_of_the_daemon() -> None:
    journal = MemoryJournal()
    name = await _interrupted(journal, 3, max_tokens=99, deadline_s=50.0)
    async with world({"demo": [SLOW]}, saved_requests=SavedRequests(journal, journal.saved())) as w:
        client = w.client()
        await asyncio.sleep(40)
        key = attach(client, name)
        await until(lambda: client.count(key) > 3)
        assert w.spawn.last("demo").commands[-1].deadline_s < 10
        client.start(messages.Cancel, target=key)
        assert (await client.end(key)).reason == "cancelled"


@simulated
async def test_a_forced_stop_saves_the_requests_that_it_ends() -> None:
    journal = MemoryJournal()
    async with world({"demo": [SLOW]}, saved_requests=SavedRequests(journal)) as w:
        client = w.client()
        over = client.generate(max_tokens=1)
        key, name = await _started(client, 4, max_tokens=9)
        assert (await client.end(over)).reason == "length"
        await w.system.stop(force=True)
        assert (await client.end(key)).error.code == "draining"
    end, tokens = await _fetched(journal, name)
    assert (end.reason, tokens) == ("length", expected(9))


@simulated
async def test_a_request_that_is_not_written_has_no_attach_name() -> None:
    journal = MemoryJournal()
    async with world({"demo": [SLOW]}, saved_requests=SavedRequests(journal)) as w:
        client = w.client()
        journal.full = True
        lost = client.generate()
        await until(lambda: client.count(lost) == 2)
        journal.full = False
        kept = client.generate()
        for key in (lost, kept):
            assert (await client.end(key)).reason == "length"
        names = [client.events[key][0].request for key in (lost, kept)]
        assert names[0] == ""
        assert {record.rid for record in journal.records} == {names[1]}


@simulated
async def test_without_a_journal_requests_have_no_attach_name() -> None:
    async with world(settings=Settings()) as w:
        client = w.client()
        key = client.generate()
        await client.end(key)
        assert client.events[key][0].request == ""
