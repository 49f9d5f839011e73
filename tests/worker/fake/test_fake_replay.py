"""Requests continue in a new fake engine after the first one stopped at any report."""

from __future__ import annotations

import msgspec
import pytest

from protocol.kv import KVSpec
from protocol.tools import ChatOptions, Grammar, Tool
from protocol.types import ChatMessage, Sampling
from protocol.worker import (
    ChoiceFinished,
    Reclaim,
    RowFailed,
    RowFinished,
    RowPrompt,
    RowTokens,
    StartLevel,
)
from tests.worker.fake.test_fake_engine import loaded, run
from tests.worker.process.peer import submit
from tests.worker.process.received import Received

HELD_BACK = ["a#", "e#", "i#", "o#"]
"""Stop strings that begin with a vowel. Text that ends in one is held back, so the end of a row
often sends text, too."""
SCHEMA = """{"type": "object",
"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}"""
TOOL = Tool("weather", parameters=msgspec.json.decode(SCHEMA))


def chat(rid, **fields):
    options = ChatOptions(tools=[TOOL, Tool("time")])
    sampling = Sampling(temperature=1.0, seed=5)
    message = ChatMessage("user", f"hello {rid}")
    return submit(rid, None, messages=[message], chat=options, sampling=sampling, **fields)


REQUESTS = [
    submit("plain", max_tokens=9, logprobs=2),
    submit("warm", max_tokens=9, n=3, sampling=Sampling(temperature=1.0, seed=4)),
    submit("stops", max_tokens=40, n=2, stop=["a b", "lo"], min_tokens=3),
    submit("ends", max_tokens=300, stop_tokens=list(range(0, 256, 7)), min_tokens=2),
    submit("held", max_tokens=300, stop=HELD_BACK, stop_tokens=list(range(0, 256, 9))),
    submit("held to the end", max_tokens=5, n=2, stop=HELD_BACK),
    chat("calls", max_tokens=100, n=2),
    chat("calls cut", max_tokens=30, logprobs=1),
    chat("calls and stops", max_tokens=100, stop=["a b", "lo", "l"]),
    submit("json", max_tokens=100, grammar=Grammar("json_schema", SCHEMA)),
    submit("scored", prompt="x" * 600, max_tokens=2, prompt_logprobs=1),
]


@pytest.mark.parametrize("settings", ["tps=0", "tps=0,eos_after=6"])
def test_streams_continue_from_any_report(settings):
    def reports_of(requests):
        engine = loaded(settings)
        for request in requests:
            engine.submit(request)
        kinds = (RowTokens, RowPrompt, ChoiceFinished, RowFinished, RowFailed)
        return [one for one in run(engine) if isinstance(one, kinds)]

    def received_of(reports):
        received = {one.rid: Received(one) for one in REQUESTS}
        for report in reports:
            received[report.rid].add(report)
        return received

    undisturbed = reports_of(REQUESTS)
    expected = {rid: one.all() for rid, one in received_of(undisturbed).items()}
    assert all(one.end for one in received_of(undisturbed).values())
    for cut in range(len(undisturbed)):
        received = received_of(undisturbed[:cut])
        for report in reports_of(
            [one.resubmission() for one in received.values() if one.end is None]
        ):
            received[report.rid].add(report)
        assert {rid: one.all() for rid, one in received.items()} == expected, f"cut at {cut}"


def test_usage_has_the_levels_of_all_workers():
    def started(start_level):
        engine = loaded("tps=0", kv=KVSpec())
        engine.start_level(StartLevel(level=start_level))
        return engine

    request = submit("a", max_tokens=60, n=2)
    received = Received(request)
    first, reports = started(0), []
    first.submit(request)
    while first.stats().generated_tokens < 20:
        reports += first.step()
    first.reclaim(Reclaim(seq=1, method="precision", wanted_bytes=1, level=1))
    while first.stats().generated_tokens < 40:
        reports += first.step()
    for report in reports:
        if isinstance(report, RowTokens):
            received.add(report)
    assert received.levels == [0, 1]

    second = started(2)
    second.submit(received.resubmission())
    (end,) = [one for one in run(second) if isinstance(one, RowFinished)]
    assert end.usage.levels == [0, 1, 2]
