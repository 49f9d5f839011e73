"""After the death of a worker at any report, a new worker continues its streams byte for byte."""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec
import pytest

from kvd.worker.core.replay import SentText
from protocol.errors import InvalidRequest
from protocol.resume import ChoiceProgress
from protocol.types import Sampling
from protocol.worker import (
    ChoiceFinished,
    MemoryRequested,
    Report,
    RowFailed,
    RowFinished,
    RowPrompt,
    RowTokens,
    StartLevel,
    Submit,
)
from tests.worker.core.driver import Driver
from tests.worker.core.prompts import prompt_of
from tests.worker.process.received import Received

pytestmark = pytest.mark.mlx

WORDS = "To open a file, call open() and read it. To close it,"
HOLDS = [f"{letter}#" for letter in "aeiou tnsrlh.,"]
"""Stop strings that begin with common characters. Text that ends in one of them is held back, so
the end of a stream often sends text, too."""


def asked() -> list[Submit]:
    greedy, warm = Sampling(seed=0), Sampling(temperature=0.9, seed=3)
    strict = Sampling(
        temperature=1.0, seed=8, repetition_penalty=1.3, presence_penalty=0.5, top_p=0.9
    )
    return [
        Submit(rid="greedy", prompt=WORDS, sampling=greedy, max_tokens=150, ignore_eos=True),
        Submit(rid="warm", tokens=prompt_of(300, 1), sampling=warm, max_tokens=90, logprobs=2),
        Submit(rid="three", prompt=WORDS, sampling=warm, max_tokens=40, n=3),
        Submit(rid="strict", prompt="Hi", sampling=strict, max_tokens=70, min_tokens=40),
        Submit(rid="stops", prompt=WORDS, sampling=warm, max_tokens=80, n=2, stop=["e", "the"]),
        Submit(
            rid="scored",
            tokens=prompt_of(290, 2),
            sampling=greedy,
            max_tokens=30,
            prompt_logprobs=1,
            ignore_eos=True,
        ),
        Submit(rid="held", prompt=WORDS, sampling=warm, max_tokens=20, stop=HOLDS),
        Submit(rid="one", tokens=[400], sampling=warm, max_tokens=9, prompt_logprobs=0),
    ]


def transcripts_of(reports: Iterable[Report]) -> dict[str, Received]:
    received = {submit.rid: Received(submit) for submit in asked()}
    for report in reports:
        received[report.rid].add(report)
    return received


def stepped(driver: Driver, count: int) -> list[Report]:
    """Run some steps, then answer their memory requests; return all reports."""
    reports = [one for _ in range(count) for one in driver.engine.step()]
    driver.take([one for one in reports if isinstance(one, MemoryRequested)])
    return reports


def reports_of(driver: Driver, requests: Iterable[Submit]) -> list[Report]:
    """Run requests to their end; return their reports of tokens and ends."""
    for submit in requests:
        driver.engine.submit(submit)
    reports: list[Report] = []
    before = driver.engine.step

    def step() -> list[Report]:
        found = before()
        reports.extend(one for one in found if hasattr(one, "rid"))
        return [one for one in found if not hasattr(one, "rid")]

    driver.engine.step = step
    try:
        batch = driver.engine._batch
        driver.run(until=lambda: not (batch.requests or batch.reports))
    finally:
        del driver.engine.step
    kinds = (RowTokens, RowPrompt, ChoiceFinished, RowFinished, RowFailed)
    return [one for one in reports if isinstance(one, kinds)]


@pytest.fixture
def undisturbed(demo: Driver) -> list[Report]:
    return reports_of(demo, asked())


def test_usage_has_the_level_of_the_first_worker_and_of_the_second(demo: Driver) -> None:
    request = Submit(
        rid="a", tokens=prompt_of(200, 4), sampling=Sampling(seed=0), max_tokens=6, ignore_eos=True
    )
    received = Received(request)
    for report in reports_of(demo, [request]):
        if isinstance(report, RowTokens) and report.index < 3:
            received.add(report)
    assert received.levels == [0]

    demo.engine.start_level(StartLevel(level=2))  # memory is short when the second worker starts
    try:
        for report in reports_of(demo, [received.resubmission()]):
            received.add(report)
    finally:
        demo.engine.start_level(StartLevel(level=0))
    assert received.end is not None
    assert received.end[1].levels == [0, 2]


@pytest.mark.slow
def test_streams_continue_after_any_report(demo: Driver, undisturbed: list[Report]) -> None:
    right = {rid: received.all() for rid, received in transcripts_of(undisturbed).items()}
    assert {reasons[0] for *_, reasons, _, _ in right.values()} >= {"stop", None}
    # The hardest cut is before an end: the tokens are known, but not that they were the last.
    ends = [
        at for at, one in enumerate(undisturbed) if isinstance(one, ChoiceFinished | RowFinished)
    ]
    rng = random.Random(5)
    for cut in [0, *rng.sample(range(len(undisturbed)), 3), *rng.sample(ends, 3), ends[-1]]:
        demo.engine._prefix_cache.tree.clear()
        received = transcripts_of(undisturbed[:cut])
        again = [one.resubmission() for one in received.values() if one.end is None]
        for report in reports_of(demo, again):
            received[report.rid].add(report)

        assert {rid: one.all() for rid, one in received.items()} == right, f"cut at {cut}"


def test_a_replay_does_not_disturb_other_rows(demo: Driver, undisturbed: list[Report]) -> None:
    right = transcripts_of(undisturbed)["greedy"]
    received = transcripts_of(undisturbed[: len(undisturbed) // 2])
    others = [one for rid, one in received.items() if rid != "greedy" and one.end is None]
    others_again = [
        msgspec.structs.replace(one, rid=f"{one.rid}!")
        for one in map(Received.resubmission, others)
    ]
    alone = Received(right.submit)
    for report in reports_of(demo, [right.submit, *others_again]):
        if report.rid == "greedy":
            alone.add(report)

    assert alone.all() == right.all()


def test_a_replay_can_be_cancelled_preempted_and_reach_its_deadline(
    demo: Driver, undisturbed: list[Report]
) -> None:
    right = transcripts_of(undisturbed)["greedy"]
    far = Received(right.submit)
    far.tokens, far.texts = [right.tokens[0][:100]], [""]
    text = "".join(
        one.text
        for one in undisturbed
        if isinstance(one, RowTokens) and one.rid == "greedy" and one.index < 100
    )
    far.texts = [text]
    engine = demo.engine

    engine.submit(far.resubmission())
    stepped(demo, 20)
    engine.cancel("greedy")
    [end] = [one for one in reports_of(demo, []) if isinstance(one, RowFinished)]
    assert (end.reason, end.usage.completion_tokens) == ("cancelled", 100)

    engine.submit(far.resubmission())
    stepped(demo, 20)
    demo.preempt("greedy")
    demo.requeue("greedy")
    for report in reports_of(demo, []):
        far.add(report)
    assert far.all() == right.all()

    late = msgspec.structs.replace(
        far.submit, deadline_s=1e-9, resume=[ChoiceProgress([400, 401], 0)]
    )
    engine.submit(late)
    [failed] = [one for one in stepped(demo, 3) if isinstance(one, RowFailed)]
    assert failed.error.code == "deadline_exceeded"
    assert failed.error.detail["completion_tokens"] == 2


def test_progress_that_does_not_match_the_request_is_refused(demo: Driver) -> None:
    submit = asked()[0]
    for wrong in ([ChoiceProgress(), ChoiceProgress()], [ChoiceProgress([10**9])]):
        with pytest.raises(InvalidRequest, match="resume"):
            demo.engine.submit(msgspec.structs.replace(submit, resume=wrong))


def test_sent_text_is_removed_by_bytes() -> None:
    assert SentText(0).remove_from("aé日b") == "aé日b"
    assert SentText(3).remove_from("aé日b") == "日b"
    assert SentText(99).remove_from("aé日b") == ""
