"""Framing: the result does not depend on how the stream is cut, and messages round trip.

Garbage raises `RemoteProtocolError` and nothing else.
"""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import messages, worker
from protocol.errors import ErrorInfo, FrameTooLarge, MalformedFrame, RemoteProtocolError
from protocol.framing import (
    FrameDecoder,
    LineDecoder,
    decode_command,
    decode_event,
    decode_report,
    decode_request,
    encode_frame,
    encode_line,
)
from protocol.kv import KVSpec
from protocol.types import ChatMessage, Sampling, Usage, WorkerStats

LIMIT = 32


def chunks(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    edges = [0, *places, len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def feed(decoder: LineDecoder | FrameDecoder, parts: list[bytes]):
    frames = [frame for part in parts for frame in decoder.feed(part)]
    return frames, type(decoder.fault)


# -- lines --------------------------------------------------------------------------------------


def test_line_ends_are_removed_and_empty_lines_skipped():
    assert LineDecoder().receive(b"a\nb\r\n\n\r\n \nrest") == [b"a", b"b", b" "]


def test_a_line_may_come_in_pieces():
    decoder = LineDecoder()

    assert decoder.receive(b'{"a"') == []
    assert decoder.receive(b": 1}\r") == []
    assert decoder.receive(b"\nx\n") == [b'{"a": 1}', b"x"]


@pytest.mark.parametrize("data", [b"x" * (LIMIT + 1), b"x" * (LIMIT + 1) + b"\n"])
def test_a_line_over_the_limit_is_refused_at_once(data: bytes):
    decoder = LineDecoder(LIMIT)

    with pytest.raises(FrameTooLarge) as refused:
        decoder.receive(data)
    assert refused.value.detail == {"limit_bytes": LIMIT}
    with pytest.raises(FrameTooLarge):
        decoder.receive(b"\nfine\n")


def test_a_line_at_the_limit_passes_and_lines_before_a_fault_are_kept():
    decoder = LineDecoder(LIMIT)

    assert decoder.feed(b"x" * LIMIT + b"\ny\n" + b"z" * (LIMIT + 1)) == [b"x" * LIMIT, b"y"]
    assert isinstance(decoder.fault, FrameTooLarge)


@settings(deadline=None)
@given(
    st.lists(st.binary(max_size=LIMIT + 4), max_size=8).map(b"\n".join),
    st.lists(st.integers(0, 500), max_size=10),
)
def test_lines_do_not_depend_on_where_the_stream_is_cut(data: bytes, cuts: list[int]):
    whole = feed(LineDecoder(LIMIT), [data])

    assert whole == feed(LineDecoder(LIMIT), chunks(data, cuts))
    assert whole == feed(LineDecoder(LIMIT), [bytes([byte]) for byte in data])


class Searched(bytearray):
    """Counts the bytes that were searched for a newline."""

    count = 0

    def find(self, sub, start=0, *rest):
        self.count += len(self) - start
        return super().find(sub, start, *rest)


def test_a_long_line_in_small_pieces_is_searched_once():
    decoder = LineDecoder()
    decoder._buffer = Searched()
    for _ in range(2000):
        decoder.receive(b"x" * 4096)

    assert decoder._buffer.count == 2000 * 4096
    assert [len(line) for line in decoder.receive(b"\n")] == [2000 * 4096]


# -- frames -------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.binary(max_size=LIMIT + 2), max_size=6),
    st.lists(st.integers(0, 500), max_size=10),
    st.binary(max_size=6),
)
def test_frames_do_not_depend_on_where_the_stream_is_cut(
    bodies: list[bytes], cuts: list[int], garbage: bytes
):
    data = b"".join(len(body).to_bytes(4, "big") + body for body in bodies) + garbage
    whole = feed(FrameDecoder(LIMIT), [data])

    assert whole == feed(FrameDecoder(LIMIT), chunks(data, cuts))
    assert whole == feed(FrameDecoder(LIMIT), [bytes([byte]) for byte in data])
    good = [body for body in bodies if len(body) <= LIMIT]
    if good == bodies:
        assert bodies == whole[0][: len(bodies)]


def test_a_frame_over_the_limit_is_refused_by_its_header():
    with pytest.raises(FrameTooLarge):
        FrameDecoder(LIMIT).receive((LIMIT + 1).to_bytes(4, "big"))


# -- messages -----------------------------------------------------------------------------------

ERROR = ErrorInfo("internal", "x", True, {"a": 1})
REQUESTS = [
    messages.Hello(id="1", client="x"),
    messages.Load(id="ü", model="m", alias="a", kv=KVSpec(4, 16)),
    messages.Load(id="2", model="m", kv=KVSpec(8, 4, schemes=(), floors={-1: "k8v8", 3: "k16v16"})),
    messages.Generate(
        id="2",
        model="m",
        messages=[ChatMessage("user", "ä\u2028\n")],
        sampling=Sampling(temperature=0.5, seed=2**63 - 1),
        stop=["\n"],
    ),
    messages.Cancel(id="3", target="2"),
    messages.Shutdown(id="4", force=True),
]
EVENTS = [
    messages.Loading(id="1", model="m", stage="s", fraction=0.5),
    messages.Tokens(id="1", index=0, tokens=[1, 2], text="\U0001f600\n"),
    messages.Done(id="1", reason="stop", usage=Usage(1, 2)),
    messages.Error(id="", error=ERROR),
]
COMMANDS = [
    worker.LoadModel(source="demo", kv=KVSpec(2, 8)),
    worker.LoadModel(source="demo", kv=KVSpec(floors={-1: "k8v8"}, max_kv_size=256, keep=128)),
    worker.Submit(rid="1", tokens=[1, 2**31 - 1], sampling=Sampling(seed=1), max_tokens=2),
    worker.Grant(seq=1, total_bytes=2**40, granted=False),
    worker.Stop(write_s=1.5),
]
REPORTS = [
    worker.Started(pid=1),
    worker.RowTokens(rid="1", index=3, tokens=[5], text="x"),
    worker.RowFailed(rid="1", error=ERROR),
    worker.Stats(stats=WorkerStats(step=4)),
]


@pytest.mark.parametrize("request_", REQUESTS)
def test_requests_round_trip(request_: messages.Request):
    line = encode_line(request_)

    assert line.count(b"\n") == 1
    assert request_ == decode_request(LineDecoder().receive(line)[0])


@pytest.mark.parametrize("event", EVENTS)
def test_events_round_trip(event: messages.Event):
    line = encode_line(event)

    assert line.count(b"\n") == 1
    assert event == decode_event(LineDecoder().receive(line)[0])


def test_commands_and_reports_round_trip():
    sent = b"".join(map(encode_frame, COMMANDS))
    said = b"".join(map(encode_frame, REPORTS))

    assert list(map(decode_command, FrameDecoder().receive(sent))) == COMMANDS
    assert list(map(decode_report, FrameDecoder().receive(said))) == REPORTS


@settings(deadline=None)
@given(st.sampled_from(REQUESTS + EVENTS), st.data())
def test_damaged_lines_raise_remote_errors_only(message, data):
    line = bytearray(encode_line(message)[:-1])
    for _ in range(data.draw(st.integers(1, 3))):
        line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RemoteProtocolError):
        decode_event(bytes(line))


@settings(deadline=None)
@given(st.sampled_from(COMMANDS + REPORTS), st.data())
def test_damaged_frames_raise_remote_errors_only(message, data):
    frame = bytearray(encode_frame(message)[4:])
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    for decode in (decode_command, decode_report):
        with contextlib.suppress(RemoteProtocolError):
            decode(bytes(frame))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_garbage_raises_remote_errors_only(garbage: bytes):
    for decode in (decode_event, decode_command, decode_report):
        with contextlib.suppress(RemoteProtocolError):
            decode(garbage)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b'{"id":"1","event":"shutdown","x":"\xff"}',  # in an unknown field
        b'{"id":"\xff","event":"shutdown"}',
        b'{"id":"1","event":"shutdown","x":"\\ud800"}',
        b'{"id":"1","event":"shutdown","x":' + b"[" * 100_000,
        b'{"id":"1","event":"shutdown"} and more',
        b'{"id":"1","event":"nope"}',
        b"[]",
        b"NaN",
    ],
)
def test_an_invalid_event_is_malformed(line: bytes):
    with pytest.raises(MalformedFrame):
        decode_event(line)


@pytest.mark.parametrize(
    "report",
    [
        worker.RowTokens(rid="r", index=0, tokens=[2**31], text=""),
        worker.RowTokens(rid="r", index=0, tokens=[-1], text=""),
        worker.RowTokens(rid="r", index=-1, tokens=[], text=""),
        worker.RowTokens(rid="r", index=0, tokens=[1], text="", choice=-1),
        worker.RowTokens(rid="r", index=0, tokens=[1], text="", level=2**64 - 1),
        worker.ChoiceFinished(rid="r", choice=16, reason="stop"),
        worker.RowPrompt(rid="r", index=2**64 - 1, logprobs=[]),
        worker.RowAccepted(rid="r", prompt_tokens=-5),
        worker.Tokenized(seq=1, count=1, tokens=[2**31]),
    ],
)
def test_numbers_of_a_report_are_bounded(report: worker.Report):
    with pytest.raises(MalformedFrame):
        decode_report(encode_frame(report)[4:])


def test_deeply_nested_frames_are_malformed():
    with pytest.raises(MalformedFrame):
        decode_report(b"\x82\xa1r\xa3bye\xa1x" + b"\x91" * 100_000)
