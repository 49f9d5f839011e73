"""A request that an earlier daemon saved may have more events than a reader may leave unread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from actors.request_journal import EVENT_TOKENS, SavedChoice, SavedRequest
from actors.saved_requests import SavedRequests
from actors.system import Settings
from kvd.host import listen
from protocol import errors, messages
from protocol.session import ClientSession
from protocol.types import Alternative, ReceivedChoice, Sampling, TokenLogprob, Usage
from protocol.worker import RowFinished, Submit
from tests.sim.fakes import Script
from tests.sim.loop import simulated, until
from tests.sim.world import World, world

COUNT = 4000
TEXT = "é" * COUNT
LIMIT = 64 * 1024
RECEIVED_LOGPROBS = 700


def saved_request(count: int = COUNT, *, ended: bool = True) -> SavedRequest:
    """Return a request of about 1.3 KB per token."""
    top = [Alternative(number, f"token {number}", -1.5 - number) for number in range(20)]
    logprobs = [TokenLogprob(number, "token", -1.5, top=top) for number in range(count)]
    return SavedRequest(
        "demo",
        Submit(
            rid="saved",
            prompt="hello",
            sampling=Sampling(seed=1),
            logprobs=20,
            max_tokens=100_000,
        ),
        prompt_tokens=count,
        prompt_logprobs=logprobs,
        choices=[SavedChoice(list(range(count)), TEXT[:count], logprobs)],
        end=RowFinished(rid="saved", reason="length", usage=Usage(1, count)) if ended else None,
    )


class SocketClient:
    """A client over a real socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._session = ClientSession()

    def attach(self, **fields: object) -> None:
        self.writer.write(self._session.request(messages.Attach(id="q", request="saved", **fields)))

    async def events(self) -> AsyncIterator[messages.Event]:
        """Yield events until the daemon closes the connection."""
        while data := await self._reader.read(65536):
            for event in self._session.receive(data):
                yield event


@asynccontextmanager
async def connected(it: World, path: Path) -> AsyncIterator[SocketClient]:
    server = await listen.serve(listen.bind(path), it.system.connect)
    client = SocketClient(*await asyncio.open_unix_connection(str(path)))
    try:
        yield client
    finally:
        client.writer.close()
        server.close()
        await asyncio.sleep(0)  # so that the loop closes the sockets


@pytest.mark.parametrize("had", [0, 1000, COUNT])
async def test_a_client_that_reads_gets_all_saved_events(had: int, tmp_path: Path) -> None:
    saved = SavedRequests(None, {"saved": saved_request()})
    async with (
        asyncio.timeout(20),
        world(load=(), saved_requests=saved) as it,
        connected(it, tmp_path / "socket") as client,
    ):
        client.attach(
            received=[ReceivedChoice(had, 2 * (had // 2))],
            received_prompt_logprobs=RECEIVED_LOGPROBS,
        )
        tokens: list[int] = []
        prompt, text = RECEIVED_LOGPROBS, ""
        async for event in client.events():
            assert not isinstance(event, messages.Error)
            if isinstance(event, messages.PromptLogprobs):
                assert event.index == prompt
                prompt += len(event.logprobs)
            elif isinstance(event, messages.Tokens):
                assert event.index == had + len(tokens)
                assert [one.token for one in event.logprobs or ()] == event.tokens
                assert len(event.tokens) <= EVENT_TOKENS
                tokens += event.tokens
                text += event.text
            elif isinstance(event, messages.Done):
                break
        assert tokens == list(range(had, COUNT))
        assert (prompt, text) == (COUNT, TEXT[had // 2 :])


async def test_a_client_that_does_not_read_is_slow_only_when_more_follows(tmp_path: Path) -> None:
    saved = SavedRequests(None, {"saved": saved_request(1000, ended=False)})
    fast = {"demo": [Script(load_s=0.01, start_s=0.01, token_s=0.0)]}
    settings = Settings(slow_reader_bytes=LIMIT)
    async with (
        asyncio.timeout(20),
        world(fast, settings=settings, saved_requests=saved) as it,
        connected(it, tmp_path / "socket") as client,
    ):
        client.attach()
        await until(lambda: it.model().requests)
        await until(lambda: not it.model().requests)  # it is cancelled
        events = [event async for event in client.events()]
        assert isinstance(events[-1], messages.Error)
        assert events[-1].error.code == "slow_reader"
        tokens = [event for event in events if isinstance(event, messages.Tokens)]
        live = [event for event in tokens if event.index >= 1000]
        assert sum(len(event.tokens) for event in tokens) == 1000 + len(live)
        assert live, "what was saved made the reader slow"


@simulated
async def test_attach_is_refused_while_too_much_is_unread_and_can_be_repeated() -> None:
    saved = SavedRequests(None, {"saved": saved_request(100)})
    async with world(
        load=(), saved_requests=saved, settings=Settings(slow_reader_bytes=LIMIT)
    ) as it:
        client = it.client()
        client.reads = False
        keys = [client.start(messages.Attach, request="saved") for _ in range(2)]
        first, second = [await client.end(key) for key in keys]
        assert first.usage.completion_tokens == 100
        assert second.error.code == "invalid_request"  # one at a time
        assert client.unread > LIMIT
        with pytest.raises(errors.Overloaded, match=f"{client.unread} bytes .* unread"):
            await client.ask(messages.Attach, request="saved")
        assert not client.closed
        client.unread = 0
        done = await client.ask(messages.Attach, request="saved")
        assert done.usage.completion_tokens == 100
