"""Frames between daemon and worker: any bytes, and valid reports at any moment.

A worker that sends nonsense loses its process. The system keeps running, and other models serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from kvd.daemon.rank import _Frames
from protocol import messages
from protocol.errors import RemoteProtocolError
from protocol.framing import FrameDecoder, decode_command, decode_report
from tests.fuzz.mutations import edited_bytes, edited_json, edited_lines, either
from tests.fuzz.target import Check, Target
from tests.sim import loop
from tests.sim.world import world


def _edit(draw: DrawFn, line: bytes) -> bytes:
    return draw(edited_json([line])) if draw(st.booleans()) else draw(edited_bytes([line]))


class Workers(Target):
    """The input has one report per line, as JSON. A line that is no JSON is a frame as it is."""

    name = "workers"
    examples = 40

    def inputs(self) -> SearchStrategy[bytes]:
        seeds = self.seeds()
        return either(edited_lines(seeds, _edit), edited_lines(seeds, lambda _, line: line))

    @contextmanager
    def checking(self) -> Iterator[Check]:
        yield _check


def _check(data: bytes) -> None:
    frames = [_frame(line) for line in data.split(b"\n") if line]
    for frame in frames:
        for decode in (decode_report, decode_command):
            try:
                decode(frame)
            except RemoteProtocolError as error:
                msgspec.json.encode(error.info())
    stream = b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)
    assert FrameDecoder().receive(stream) == frames
    with suppress(RemoteProtocolError):
        FrameDecoder().receive(data)
    loop.run(_play(frames))


def _frame(line: bytes) -> bytes:
    try:
        return msgspec.msgpack.encode(msgspec.json.decode(line))
    except (ValueError, RecursionError, OverflowError):
        return line


async def _play(frames: list[bytes]) -> None:
    """Send frames on behalf of a worker that serves a request."""
    async with world(load=("demo", "other"), budget=1000, faults=True) as it:
        client = it.client()
        mine = client.generate("demo", max_tokens=40)
        others = client.generate("other", max_tokens=40)
        tokenized = client.start(messages.Tokenize, model="demo", prompt="abc")
        await asyncio.sleep(0.1)
        process = it.spawn.last("demo")
        rid = next(iter(process._rows), "r")
        wire = _Frames(process.report, lambda _: process.die(76))
        for frame in frames:
            if process.alive:
                whole = frame.replace(b"\xa3RID", bytes([0xA0 | len(rid)]) + rid.encode())
                wire.data_received(len(whole).to_bytes(4, "big") + whole)
            await asyncio.sleep(0.02)
            it.system.check()
        done = await client.end(others)
        assert isinstance(done, messages.Done), done
        assert len(client.tokens(others)) == 40
        await client.end(mine)
        await client.end(tokenized)
        client.disconnect()
        failed = {notice.fields["actor"] for notice in it.notices_of("actor_failed")}
        assert failed <= {"worker-demo"}, "a report broke more than its own worker"
