"""The fake engine: settings in the model's name, faults, and exactly one end for each request."""

from __future__ import annotations

import math
import random

import pytest

from kvd.worker.fake.engine import FakeEngine
from kvd.worker.fake.model import FakeModel, parse
from kvd.worker.fake.tokens import word
from protocol.cache_outcome import RowCached
from protocol.errors import (
    ContextTooLong,
    EmptyPrompt,
    InsufficientMemory,
    InvalidModel,
    InvalidRequest,
    ModelFailed,
    UnknownModel,
)
from protocol.kv import KVSpec
from protocol.types import ChatMessage, Sampling
from protocol.worker import (
    ChoiceFinished,
    Grant,
    LoadModel,
    MemoryRequested,
    RowAdmitted,
    RowFailed,
    RowFinished,
    RowPrompt,
    RowTokens,
    Submit,
)
from tests.worker.process.peer import submit
from tests.worker.scheduling.invariants import check_scheduler


def grant_of(wanted, granted=True):
    return Grant(seq=wanted.seq, total_bytes=wanted.total_bytes, granted=granted)


def loaded(settings="tps=0", **fields):
    engine = FakeEngine()
    engine.load(
        LoadModel(source=f"fake:{settings}", **fields),
        lambda _stage, _part: None,
        lambda total, _reason: Grant(seq=1, total_bytes=total, granted=True),
    )
    return engine


def run(engine, steps=10_000):
    """Step until no work is left, and grant memory requests at once; return all reports."""
    reports = []
    for _ in range(steps):
        if not engine.has_work:
            return reports
        made = engine.step()
        for report in made:
            if isinstance(report, MemoryRequested):
                engine.granted(grant_of(report))
        reports += made
    raise AssertionError("the engine still has work")


def text_of(reports, rid="a"):
    return "".join(r.text for r in reports if isinstance(r, RowTokens) and r.rid == rid)


def tokens_of(reports, rid="a"):
    return [t for r in reports if isinstance(r, RowTokens) and r.rid == rid for t in r.tokens]


def ends_of(reports):
    return [r for r in reports if isinstance(r, (RowFinished, RowFailed))]


def test_names_are_parsed(tmp_path):
    assert parse("fake:tps=200,load=0.1,crash_after=50") == FakeModel(
        tps=200.0, load=0.1, crash_after=50
    )
    assert parse("fake") == parse("fake:") == parse("demo") == parse(str(tmp_path)) == FakeModel()


@pytest.mark.parametrize("name", ["nope", "org/model", "/no/such/folder"])
def test_unknown_names_are_refused(name):
    with pytest.raises(UnknownModel, match="try fake:"):
        parse(name)


@pytest.mark.parametrize("settings", ["speed=3", "tps=fast", "tps", "crash_after=1.5"])
def test_errors_about_invalid_names_list_the_keys(settings):
    with pytest.raises(InvalidModel, match="the keys are tps, load"):
        parse(f"fake:{settings}")


def test_model_info_describes_the_kv_cache():
    def part(kv):
        grant = Grant(seq=1, total_bytes=2**40, granted=True)
        command = LoadModel(source="fake:page_bytes=6400", kv=kv)
        info = FakeEngine().load(command, lambda _stage, _part: None, lambda *_: grant)
        assert info.layers == sum(part.layers for part in info.kv)
        return info.kv[0]

    full = part(KVSpec(8, 4))
    assert (full.kind, full.path, full.scheme) == ("full", "pages", "k8v4")
    assert (full.bytes_per_token, full.bound_bytes) == (100, 0)
    window = part(KVSpec(max_kv_size=512, keep=8))
    assert (window.kind, window.bytes_per_token, window.bound_bytes) == (
        "window 512 keep 8",
        0,
        51_200,
    )


def test_tokens_are_a_pure_function_of_prompt_seed_and_position():
    def tokens(prompt, sampling, other_rids=()):
        engine = loaded()
        for rid in other_rids:
            engine.submit(submit(rid, rid * 50))
        engine.submit(submit("a", prompt, sampling=sampling, max_tokens=50))
        return tokens_of(run(engine))

    greedy = Sampling(seed=1)
    sampled = Sampling(temperature=1.0, seed=1)
    assert tokens("p", sampled) == tokens("p", sampled, other_rids=["x", "y"])
    assert tokens("p", greedy) == tokens("p", Sampling(seed=2))
    assert tokens("p", sampled) != tokens("p", Sampling(temperature=1.0, seed=2))
    assert tokens("p", sampled) != tokens("q", sampled)


def test_text_consists_of_the_words_of_the_tokens():
    engine = loaded()
    engine.submit(submit("a", max_tokens=20))
    reports = run(engine)
    assert text_of(reports) == "".join(" " + word(token) for token in tokens_of(reports))
    assert len({word(token) for token in range(256)}) == 256


def test_a_stop_string_ends_a_row_and_is_not_sent():
    engine = loaded()
    engine.submit(submit("a", max_tokens=20))
    words = text_of(run(engine))
    third = words.split()[2]
    engine.submit(submit("a", max_tokens=20, stop=[third]))
    reports = run(engine)
    assert text_of(reports) == words[: words.index(third)]
    assert ends_of(reports)[0].reason == "stop"


def test_rows_end_by_length_and_by_eos():
    engine = loaded("tps=0,eos_after=7")
    engine.submit(submit("a", max_tokens=5))
    engine.submit(submit("b", max_tokens=9))
    reports = run(engine)
    assert {(r.rid, r.reason, r.usage.completion_tokens) for r in ends_of(reports)} == {
        ("a", "length", 5),
        ("b", "stop", 7),
    }


def test_held_back_text_is_released_at_the_end():
    for settings in ("tps=0", "tps=0,eos_after=4"):
        engine = loaded(settings)
        engine.submit(submit("a", max_tokens=4))
        words = text_of(run(engine))
        engine.submit(submit("a", max_tokens=4, stop=[words[-2:] + "never"]))
        assert text_of(run(engine)) == words


@pytest.mark.parametrize(("settings", "sent"), [("nan_after=3", 2), ("nan_on=ell", 0)])
def test_bad_logits_fail_their_row_alone(settings, sent):
    engine = loaded(f"tps=0,{settings}")
    engine.submit(submit("a", "hello"))
    engine.submit(submit("b", "other", max_tokens=2))
    reports = run(engine)
    failed = next(r for r in ends_of(reports) if isinstance(r, RowFailed))
    assert (failed.rid, failed.error.code, failed.error.retryable) == ("a", "numerical_error", True)
    assert len(tokens_of(reports)) == sent
    assert len(ends_of(reports)) == 2


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (submit("a", ""), EmptyPrompt),
        (Submit(rid="a", sampling=Sampling(), tokens=[]), EmptyPrompt),
        (Submit(rid="a", sampling=Sampling(), messages=[]), EmptyPrompt),
        (Submit(rid="a", sampling=Sampling()), InvalidRequest),
        (Submit(rid="a", sampling=Sampling(), tokens=[256]), InvalidRequest),
        (submit("a", "x" * 100), ContextTooLong),
        (submit("a", "x" * 50, max_tokens=51), ContextTooLong),
        (submit("a", stop=[""]), InvalidRequest),
    ],
)
def test_refused_requests_leave_no_state(request_, error):
    engine = loaded("tps=0,context=100")
    with pytest.raises(error):
        engine.submit(request_)
    assert not engine.has_work
    engine.submit(submit("a", max_tokens=1))


def test_messages_become_a_prompt():
    engine = loaded()
    messages = [ChatMessage("user", "hi")]
    count = engine.submit(Submit(rid="a", sampling=Sampling(), messages=messages))
    assert count == len("user: hi\n")


HOT = Sampling(temperature=1.0, seed=5)


def test_choices_differ_and_the_first_equals_a_single_choice():
    engine = loaded()
    engine.submit(submit("a", max_tokens=6, sampling=HOT))
    single = tokens_of(run(engine))
    engine.submit(submit("b", max_tokens=6, sampling=HOT, n=3))
    reports = run(engine)
    found = [
        [t for r in reports if isinstance(r, RowTokens) and r.choice == choice for t in r.tokens]
        for choice in range(3)
    ]
    assert found[0] == single
    assert len({tuple(tokens) for tokens in found}) == 3
    ends = [r for r in reports if isinstance(r, ChoiceFinished)]
    assert sorted(r.choice for r in ends) == [0, 1, 2]
    (end,) = ends_of(reports)
    assert reports[-1] is end
    assert [r.usage for r in ends] == [None, None, end.usage]
    assert (end.reason, end.usage.completion_tokens) == ("length", 18)


def test_a_cancel_ends_all_choices():
    engine = loaded()
    engine.submit(submit("a", max_tokens=50, sampling=HOT, n=3))
    engine.step()
    engine.cancel("a")
    reports = run(engine)
    assert [r.reason for r in reports if isinstance(r, ChoiceFinished)] == ["cancelled"] * 3
    assert ends_of(reports)[0].reason == "cancelled"


def test_stop_tokens_end_a_row_after_min_tokens_and_are_not_sent():
    engine = loaded()
    engine.submit(submit("a", max_tokens=30))
    words = tokens_of(run(engine))
    stop = words[3]
    at = words.index(stop)
    engine.submit(submit("a", max_tokens=30, stop_tokens=[stop]))
    reports = run(engine)
    assert tokens_of(reports) == words[:at]
    assert text_of(reports) == "".join(" " + word(token) for token in words[:at])
    assert (ends_of(reports)[0].reason, ends_of(reports)[0].usage.completion_tokens) == (
        "stop",
        at + 1,
    )
    engine.submit(submit("a", max_tokens=30, stop_tokens=[stop], min_tokens=10))
    reports = run(engine)
    assert len(tokens_of(reports)) >= 10
    assert stop not in tokens_of(reports)


def test_min_tokens_and_ignore_eos_delay_the_end():
    engine = loaded("tps=0,eos_after=4")
    engine.submit(submit("a", max_tokens=9))
    engine.submit(submit("b", max_tokens=9, ignore_eos=True))
    engine.submit(submit("c", max_tokens=9, min_tokens=6))
    first = word(tokens_of(run(loaded_with("c", max_tokens=1)), "c")[0])
    engine.submit(submit("d", max_tokens=9, min_tokens=2, stop=[first]))
    ends = {end.rid: (end.reason, end.usage.completion_tokens) for end in ends_of(run(engine))}
    assert ends == {"a": ("stop", 4), "b": ("length", 9), "c": ("stop", 6), "d": ("stop", 4)}


def loaded_with(rid, **fields):
    engine = loaded()
    engine.submit(submit(rid, **fields))
    return engine


@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "sampled"])
def test_logprobs_are_those_of_one_distribution(sampling):
    reports = run(loaded_with("a", max_tokens=40, sampling=sampling, logprobs=20))
    logprobs = [t for r in reports if isinstance(r, RowTokens) for t in r.logprobs]
    assert [t.token for t in logprobs] == tokens_of(reports)
    for one in logprobs:
        values = [other.logprob for other in one.top]
        assert values == sorted(values, reverse=True)
        assert len({other.token for other in one.top}) == 20
        assert sum(map(math.exp, values)) < 1
        assert (one.token, one.logprob) in {(other.token, other.logprob) for other in one.top}
    assert all(t.token == t.top[0].token for t in logprobs) == (sampling.temperature == 0)


def test_logprobs_without_alternatives_and_none_at_all():
    logprobs = [t for r in run(loaded_with("a", max_tokens=3, logprobs=0)) for t in logprobs_of(r)]
    assert (len(logprobs), [t.top for t in logprobs]) == (3, [[]] * 3)
    assert not any(logprobs_of(r) for r in run(loaded_with("a", max_tokens=3)))


def logprobs_of(report):
    return (report.logprobs or []) if isinstance(report, RowTokens) else []


@pytest.mark.parametrize("length", [1, 5, 256, 257, 1000])
def test_all_prompt_logprobs_are_reported_before_the_first_token(length):
    reports = run(loaded_with("a", prompt="x" * length, max_tokens=1, prompt_logprobs=2))
    parts = [r for r in reports if isinstance(r, RowPrompt)]
    begun = [r for r in reports if not isinstance(r, RowCached)]
    assert begun[: len(parts) + 1] == [RowAdmitted(rid="a"), *parts]
    entries = [entry for r in parts for entry in r.logprobs]
    assert [r.index for r in parts] == list(range(0, length, 256))
    assert [entry.token for entry in entries] == [ord("x")] * length
    assert (entries[0].logprob, entries[0].top) == (None, [])
    assert all(entry.logprob < 0 and len(entry.top) == 2 for entry in entries[1:])


def test_a_deadline_ends_running_and_queued_requests():
    times = [0.0]
    engine = FakeEngine(sleep=lambda _: None, clock=lambda: times[-1])
    engine.load(
        LoadModel(source="fake:tps=0", max_rows=1),
        lambda _stage, _part: None,
        lambda total, _reason: Grant(seq=1, total_bytes=total, granted=True),
    )
    engine.submit(submit("a", max_tokens=500, deadline_s=2.0))
    engine.submit(submit("b", max_tokens=500, deadline_s=1.0))
    engine.submit(submit("c", max_tokens=2, deadline_s=9.0))
    reports = []
    for now in (0.0, 0.5, 1.0, 2.0):
        times.append(now)
        reports += engine.step()
    reports += run(engine)
    failed = {r.rid: r.error for r in ends_of(reports) if isinstance(r, RowFailed)}
    assert {rid: error.code for rid, error in failed.items()} == {
        "a": "deadline_exceeded",
        "b": "deadline_exceeded",
    }
    assert [failed[rid].detail["completion_tokens"] for rid in "ab"] == [2, 0]
    assert [r.reason for r in ends_of(reports) if isinstance(r, RowFinished)] == ["length"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stop_tokens": [1, 256]}, "stop_tokens"),
        ({"sampling": Sampling(logit_bias={999: 1.0})}, "sampling.logit_bias"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused_with_their_field(fields, field):
    engine = loaded()
    with pytest.raises(InvalidRequest, match="outside the vocabulary of 256") as caught:
        engine.submit(submit("a", **fields))
    assert caught.value.detail == {"field": field}
    assert not engine.has_work


def test_load_faults():
    with pytest.raises(ModelFailed):
        loaded("load_error=model_failed")
    with pytest.raises(InsufficientMemory):
        FakeEngine().load(
            LoadModel(source="fake"),
            lambda _stage, _part: None,
            lambda _total, _reason: Grant(seq=1, total_bytes=0, granted=False),
        )


def test_the_name_sets_speed_and_load_time():
    now = 0.0

    def sleep(seconds):
        nonlocal now
        now += seconds

    engine = FakeEngine(sleep=sleep, clock=lambda: now)
    engine.load(
        LoadModel(source="fake:tps=50,load=2"),
        lambda _stage, _part: None,
        lambda total, _reason: Grant(seq=1, total_bytes=total, granted=True),
    )
    assert now == pytest.approx(2.0)
    engine.submit(submit("a", "x", max_tokens=101))
    run(engine)
    assert now == pytest.approx(4.0)


@pytest.mark.parametrize("seed", range(5))
def test_mixed_traffic_ends_every_request_exactly_once(seed):
    draw = random.Random(seed)
    engine = loaded("tps=0,pages=10", max_rows=6)
    reports, submitted, cancelled = [], [], set()
    for step in range(3000):
        if step < 1500 and draw.random() < 0.1:
            rid = f"r{len(submitted)}"
            length, new = draw.choice([1, 30, 700, 2500]), draw.randint(1, 80)
            more = {"n": draw.choice([1, 1, 3]), "priority": draw.randint(-2, 2)}
            engine.submit(submit(rid, "x" * length, max_tokens=new, **more))
            submitted.append(rid)
        if submitted and draw.random() < 0.02:
            rid = draw.choice(submitted)
            engine.cancel(rid)
            cancelled.add(rid)
        for report in engine.step() if engine.has_work else ():
            reports.append(report)
            if isinstance(report, MemoryRequested):
                engine.granted(grant_of(report))
        check_scheduler(engine._scheduler)
    assert not engine.has_work
    ends = ends_of(reports)
    assert sorted(end.rid for end in ends) == sorted(submitted)
    assert {end.rid for end in ends if end.reason == "cancelled"} <= cancelled
    for end in ends:
        assert len(tokens_of(reports, end.rid)) == end.usage.completion_tokens
        last = max(i for i, r in enumerate(reports) if getattr(r, "rid", None) == end.rid)
        assert reports[last] is end
    assert engine.stats().pages_used == 0
    assert len(submitted) > 100


def test_queued_requests_do_not_count_as_prefill():
    engine = loaded(max_rows=1)
    for rid in ("a", "b"):
        engine.submit(submit(rid, max_tokens=8))
    read = []
    while engine.has_work:
        read.append(engine.reads_prompts)
        for report in engine.step():
            if isinstance(report, MemoryRequested):
                engine.granted(grant_of(report))

    assert read[0], "prefill of a"
    assert not any(read[1:8]), "b is queued"
    assert sum(read[8:]) == 1, "prefill of b"
