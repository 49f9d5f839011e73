"""The fake engine: its name's keys, its faults, and that every request ends exactly once."""

from __future__ import annotations

import random

import pytest

from kvd.worker.fake_engine import FakeEngine, FakeModel, parse, word
from protocol.errors import (
    ContextTooLong,
    EmptyPrompt,
    InsufficientMemory,
    InvalidModel,
    InvalidRequest,
    ModelFailed,
    UnknownModel,
)
from protocol.types import ChatMessage, KVSpec, Sampling
from protocol.worker import (
    Grant,
    GrantWanted,
    LoadModel,
    RowFailed,
    RowFinished,
    RowTokens,
    Submit,
)
from tests.worker.peer import submit


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
    """Step until there is nothing to do; return all reports, grants answered at once."""
    reports = []
    for _ in range(steps):
        if not engine.has_work:
            return reports
        made = engine.step()
        for report in made:
            if isinstance(report, GrantWanted):
                engine.granted(grant_of(report))
        reports += made
    raise AssertionError("it does not end")


def text_of(reports, rid="a"):
    return "".join(r.text for r in reports if isinstance(r, RowTokens) and r.rid == rid)


def tokens_of(reports, rid="a"):
    return [t for r in reports if isinstance(r, RowTokens) and r.rid == rid for t in r.tokens]


def ends_of(reports):
    return [r for r in reports if isinstance(r, (RowFinished, RowFailed))]


def test_names(tmp_path):
    assert parse("fake:tps=200,load=0.1,crash_after=50") == FakeModel(
        tps=200.0, load=0.1, crash_after=50
    )
    assert parse("fake") == parse("fake:") == parse("demo") == parse(str(tmp_path)) == FakeModel()


@pytest.mark.parametrize("name", ["nope", "org/model", "/no/such/folder"])
def test_unknown_names(name):
    with pytest.raises(UnknownModel, match="try fake:"):
        parse(name)


@pytest.mark.parametrize("settings", ["speed=3", "tps=fast", "tps", "crash_after=1.5"])
def test_broken_names_list_the_keys(settings):
    with pytest.raises(InvalidModel, match="the keys are tps, load"):
        parse(f"fake:{settings}")


def test_it_says_how_it_would_keep_its_cache():
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
    def tokens(prompt, sampling, beside=()):
        engine = loaded()
        for rid in beside:
            engine.submit(submit(rid, rid * 50))
        engine.submit(submit("a", prompt, sampling=sampling, max_tokens=50))
        return tokens_of(run(engine))

    greedy = Sampling(seed=1)
    sampled = Sampling(temperature=1.0, seed=1)
    assert tokens("p", sampled) == tokens("p", sampled, beside=["x", "y"])
    assert tokens("p", greedy) == tokens("p", Sampling(seed=2))
    assert tokens("p", sampled) != tokens("p", Sampling(temperature=1.0, seed=2))
    assert tokens("p", sampled) != tokens("q", sampled)


def test_text_is_the_tokens_words():
    engine = loaded()
    engine.submit(submit("a", max_tokens=20))
    reports = run(engine)
    assert text_of(reports) == "".join(" " + word(token) for token in tokens_of(reports))
    assert len({word(token) for token in range(256)}) == 256


def test_a_stop_string_ends_a_row_and_is_not_shown():
    engine = loaded()
    engine.submit(submit("a", max_tokens=20))
    words = text_of(run(engine))
    third = words.split()[2]
    engine.submit(submit("a", max_tokens=20, stop=[third]))
    reports = run(engine)
    assert text_of(reports) == words[: words.index(third)]
    assert ends_of(reports)[0].reason == "stop"


def test_rows_end_by_length_and_by_themselves():
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
def test_wrong_requests_leave_nothing_behind(request_, error):
    engine = loaded("tps=0,context=100")
    with pytest.raises(error):
        engine.submit(request_)
    assert not engine.has_work
    engine.submit(submit("a", max_tokens=1))


def test_messages_are_a_prompt():
    engine = loaded()
    messages = [ChatMessage("user", "hi")]
    count = engine.submit(Submit(rid="a", sampling=Sampling(), messages=messages))
    assert count == len("user: hi\n")


def test_load_faults():
    with pytest.raises(ModelFailed):
        loaded("load_error=model_failed")
    with pytest.raises(InsufficientMemory):
        FakeEngine().load(
            LoadModel(source="fake"),
            lambda _stage, _part: None,
            lambda _total, _reason: Grant(seq=1, total_bytes=0, granted=False),
        )


def test_the_pace_is_the_name_s():
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
            engine.submit(submit(rid, "x" * length, max_tokens=new))
            submitted.append(rid)
        if submitted and draw.random() < 0.02:
            rid = draw.choice(submitted)
            engine.cancel(rid)
            cancelled.add(rid)
        for report in engine.step() if engine.has_work else ():
            reports.append(report)
            if isinstance(report, GrantWanted):
                engine.granted(grant_of(report))
        engine._scheduler.check()
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
