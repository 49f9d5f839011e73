"""The engine with the embedded model: results of requests, alone and in a batch."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from kvd import demo as embedded
from kvd.worker.core import interleaving
from kvd.worker.native import build
from kvd.worker.sampling.sampler import Sampler, SamplerOutput
from protocol.errors import ContextTooLong, EmptyPrompt, InsufficientMemory, InvalidRequest
from protocol.kv import KVSpec
from protocol.resume import ChoiceProgress
from protocol.types import ChatMessage, Sampling
from protocol.worker import Submit
from tests.breadth import ALL
from tests.worker import shallow
from tests.worker.core.driver import GIB, Driver
from tests.worker.core.prompts import prompt_of

pytestmark = pytest.mark.mlx

WORDS = "The function returns a list of all values that the iterator has produced so far. "


def test_dense_pages_give_the_tokens_of_mlx_lm() -> None:
    driver = Driver(shallow.path(), kv=KVSpec(16, 16))
    model = driver.engine._runner.model
    for length in (1, 2, 64, 65, 300):
        prompt = prompt_of(length, seed=length)
        got = driver.alone(prompt, max_tokens=80).tokens
        caches = make_prompt_cache(model)
        logits = model(mx.array([prompt]), cache=caches)[:, -1]
        wanted = []
        for _ in range(len(got)):
            wanted.append(int(mx.argmax(logits, axis=-1).item()))
            logits = model(mx.array([wanted[-1:]]), cache=caches)[:, -1]
        assert got == wanted


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 129, 255, 256, 257, 258, 513])
def test_prompts_of_any_length_are_answered(demo: Driver, length: int) -> None:
    outcome = demo.alone(prompt_of(length), max_tokens=5)

    assert outcome.reason in {"length", "stop"}
    assert outcome.usage is not None
    assert outcome.usage.prompt_tokens == length
    assert outcome.usage.completion_tokens in {len(outcome.tokens), len(outcome.tokens) + 1}


def test_requests_get_the_same_tokens_alone_and_in_any_batch(demo: Driver) -> None:
    """Greedy and sampled requests join at random times, and some are cancelled."""
    rng = random.Random(7)
    settings = [
        Sampling(seed=1),
        Sampling(temperature=0.8, seed=5),
        Sampling(temperature=1.0, top_p=0.9, seed=6),
        Sampling(temperature=0.7, top_k=20, min_p=0.05, seed=2**40),
    ]
    lengths = [10, 64, 65, 127, 129, 300, 700, 1500, 1, 33, 260, 513]
    requests = {
        f"r{index}": (prompt_of(length, index), settings[index % 4], rng.randrange(20, 150))
        for index, length in enumerate(lengths)
    }
    wanted = {
        rid: demo.alone(prompt, sampling, max_tokens=limit)
        for rid, (prompt, sampling, limit) in requests.items()
    }
    queue = list(requests)
    rng.shuffle(queue)
    cancelled = set(queue[:3])
    while queue or demo.engine.has_work:
        if queue and rng.random() < 0.3:
            rid = queue.pop()
            prompt, sampling, limit = requests[rid]
            demo.submit(rid, prompt, sampling, max_tokens=limit)
        for rid in cancelled & demo.outcomes.keys():
            if len(demo.outcomes[rid].tokens) > 7:
                demo.engine.cancel(rid)
        if demo.engine.has_work:
            demo.step()

    assert demo.engine.stats().max_rows_in_step >= 3
    for rid, outcome in demo.outcomes.items():
        if outcome.reason == "cancelled":
            assert rid in cancelled
            assert outcome.tokens == wanted[rid].tokens[: len(outcome.tokens)]
        else:
            assert (rid, outcome) == (rid, wanted[rid])


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_cancel_in_every_state_ends_once(demo: Driver, after: int) -> None:
    """The states are queued, in prefill, before the first decode step, and decoding."""
    demo.submit("stays", prompt_of(40), max_tokens=30)
    demo.submit("goes", prompt_of(600), max_tokens=100)
    for _ in range(after):
        demo.step()
    demo.engine.cancel("goes")
    demo.engine.cancel("goes")
    demo.engine.cancel("never was")
    demo.take(demo.engine.take_reports())
    assert demo.outcomes["goes"].reason == "cancelled", "the end waits for a step"
    demo.run()

    assert demo.outcomes["stays"].reason == "length"


def test_stop_string_ends_the_text_before_it(demo: Driver) -> None:
    whole = demo.alone(WORDS, max_tokens=60)
    cut = next(i for i in range(len(whole.text) // 2, len(whole.text)) if whole.text[i].isascii())
    stop = whole.text[cut : cut + 3]
    outcome = demo.alone(WORDS, max_tokens=60, stop=[stop])

    assert outcome.reason == "stop"
    assert outcome.text == whole.text[: whole.text.index(stop)]
    assert (outcome.stop_text, whole.stop_text) == (stop, "")

    sent = ChoiceProgress(outcome.tokens, len(outcome.text.encode()))
    replayed = demo.alone(WORDS, max_tokens=60, stop=[stop], resume=[sent])
    assert (replayed.reason, replayed.stop_text, replayed.text) == ("stop", stop, "")


def test_the_text_is_the_decoded_tokens(demo: Driver) -> None:
    outcome = demo.alone(WORDS, Sampling(temperature=1.5, seed=3), max_tokens=200)

    assert outcome.text == demo.engine._text._tokenizer.decode(
        outcome.tokens, skip_special_tokens=True
    )


def test_chat_uses_the_template_and_stops_at_eos(demo: Driver) -> None:
    demo.outcomes["chat"] = demo.outcomes.get("chat") or type(demo.alone([5], max_tokens=1))()
    demo.engine.submit(
        Submit(
            rid="chat",
            messages=[ChatMessage("user", "Hello!")],
            sampling=Sampling(seed=0),
            max_tokens=120,
        )
    )
    demo.run()

    assert demo.outcomes["chat"].reason == "stop"
    assert demo.outcomes["chat"].text.strip()


def test_a_long_prompt_delays_other_rows_by_a_chunk_at_most(demo: Driver) -> None:
    demo.submit("runs", prompt_of(20), max_tokens=40)
    demo.run(until=lambda: len(demo.outcomes["runs"].tokens) > 3)
    demo.submit("long", prompt_of(2000), max_tokens=2)
    seen = len(demo.outcomes["runs"].tokens)
    while not demo.outcomes["long"].tokens and not demo.outcomes["runs"].over:
        computed = demo.engine._prompts.computed_tokens
        demo.step()
        if demo.engine._prompts.computed_tokens == computed:
            break  # the prompt was read: no step was in flight
        assert len(demo.outcomes["runs"].tokens) > seen  # several on the CPU (`interleaving`)
        seen = len(demo.outcomes["runs"].tokens)
    assert seen > 4
    demo.run()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"prompt": ""}, EmptyPrompt),
        ({"tokens": []}, EmptyPrompt),
        ({"tokens": [10**6]}, InvalidRequest),
        ({"prompt": "a", "tokens": [1]}, InvalidRequest),
        ({}, InvalidRequest),
        ({"tokens": [5] * 16384}, ContextTooLong),
        ({"tokens": [5] * 100, "max_tokens": 16300}, ContextTooLong),
    ],
)
def test_bad_requests_leave_nothing_behind(demo: Driver, fields: dict, error: type) -> None:
    with pytest.raises(error):
        demo.engine.submit(Submit(rid="bad", sampling=Sampling(seed=0), **fields))

    assert not demo.engine._batch.requests
    assert not demo.engine.has_work


def test_a_bad_row_fails_alone(demo: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three rows gets NaN, or equal logits."""
    draw = Sampler.draw
    for poison in (float("nan"), 0.0):

        def poisoned(
            one: Sampler, logits: mx.array, *rest: Any, poison: float = poison
        ) -> SamplerOutput:
            assert logits.shape[0] == 3
            bad = mx.concatenate([logits[:1], logits[1:2] * 0 + poison, logits[2:]])
            return draw(one, bad, *rest)

        for rid in "abc":
            demo.submit(rid, [7], max_tokens=10)
        with monkeypatch.context() as patch:
            patch.setattr(Sampler, "draw", poisoned)
            demo.step()
        demo.run()

        assert demo.outcomes["b"].error is not None
        assert demo.outcomes["b"].error.code == "numerical_error"
        assert demo.outcomes["b"].tokens == []
        assert demo.outcomes["a"] == demo.outcomes["c"] == demo.alone([7], max_tokens=10)


def test_nan_in_the_cache_fails_its_row_and_not_the_next_row_in_its_slot(demo: Driver) -> None:
    wanted = demo.alone(prompt_of(30, 2), max_tokens=10)
    demo.submit("bad", prompt_of(100, 1), max_tokens=50)
    demo.run(until=lambda: len(demo.outcomes["bad"].tokens) > 3)
    request = demo.engine._batch.requests["bad"]
    slot = request.completions[0].row.rows[0].slot
    demo.engine._batch.synchronize()
    for layer in demo.engine._runner.cache.stores[0].layers:
        layer.tail_values[slot, :, 70:90] = mx.nan
    demo.run()
    assert demo.outcomes["bad"].error is not None
    assert demo.outcomes["bad"].error.code == "numerical_error"
    demo.submit("next", prompt_of(30, 2), max_tokens=10)
    demo.run(until=lambda: demo.engine._batch.requests["next"].completions[0].row is not None)
    assert demo.engine._batch.requests["next"].completions[0].row.rows[0].slot == slot
    demo.run()

    assert demo.outcomes["next"] == wanted


def test_memory_is_requested_and_returned() -> None:
    demo = Driver(shallow.path(), kv=KVSpec(prefix_cache=0))
    resting = demo.total
    rids = [f"r{i}" for i in range(6)]
    for rid in rids:
        demo.submit(rid, prompt_of(1500), max_tokens=100)
    demo.run(until=lambda: demo.engine.stats().pages_used > 80)
    stats = demo.engine.stats()

    assert demo.total > resting
    held = stats.memory.kv_pages + stats.memory.kv_tails
    assert held <= demo.total - demo.engine._admission.budget.base_bytes
    demo.run()
    assert demo.total == resting
    assert demo.engine.stats().pages_total <= 64


def test_nothing_runs_beyond_the_budget() -> None:
    driver = Driver(shallow.path())
    driver.budget = driver.total
    rids = [f"r{i}" for i in range(8)]
    for rid in rids:
        driver.submit(rid, prompt_of(900), max_tokens=30)
    driver.run()

    assert {outcome.reason for outcome in driver.outcomes.values()} <= {"length", "stop"}
    assert driver.total <= driver.budget
    with pytest.raises(InsufficientMemory) as caught:
        driver.submit("never", prompt_of(16000), max_tokens=100)
    detail = caught.value.detail
    assert detail["needed_bytes"] > detail["limit_bytes"] == driver.budget
    driver.outcomes.clear()


def test_rows_that_start_dense_stay_within_a_tight_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleaving, "STAGE_SECONDS", 60.0)  # no row ends before the last begins
    driver = Driver(shallow.path(), kv=KVSpec(quantized_kv_start=256), prefill_chunk=128)
    driver.budget = driver.total
    for index in range(4):
        driver.submit(f"r{index}", prompt_of(1800, index), max_tokens=70)
    cache, budget = driver.engine._runner.cache, driver.engine._admission.budget
    while driver.engine.has_work:
        driver.step()
        held = cache.charged_bytes + cache.tail_slots * cache.row_bytes
        assert held <= driver.total - budget.base_bytes

    assert {outcome.reason for outcome in driver.outcomes.values()} <= {"length", "stop"}
    assert driver.engine.stats().max_rows_in_step == 4


def test_a_load_beyond_the_budget_reports_both_sizes() -> None:
    with pytest.raises(InsufficientMemory) as caught:
        Driver("demo", budget=1 << 20)

    assert caught.value.detail["needed_bytes"] > caught.value.detail["budget_bytes"] == 1 << 20


def test_info_describes_what_was_loaded(demo: Driver) -> None:
    info = demo.info

    assert info.architecture == "qwen3"
    assert info.kv_scheme == "k8v8"
    assert info.context_length == 16384
    native = build.compiler() is not None
    assert info.attention_path.startswith("native" if native else "reference, gathered pages")
    assert (info.native == "on") == native
    assert 0 <= info.attention_error < 1e-3
    assert info.page_bytes == info.kv_bytes_per_token * 64
    assert demo.total < 2 * GIB


@pytest.mark.slow
def test_recall_agrees_with_dense() -> None:
    """Quantized pages answer recall tasks of 1024 tokens as dense pages do."""
    quantized, dense = Driver("demo"), Driver("demo", kv=KVSpec(16, 16))
    tokenizer = quantized.engine._text._tokenizer
    same = []
    for seed in range(12 if ALL else 6):
        task = embedded.make_recall_prompt(seed, 1024, tokenizer)
        one, other = (d.alone(task.prompt, max_tokens=6).tokens for d in (quantized, dense))
        same += [a == b for a, b in zip(one, other, strict=True)]

    assert np.mean(same) >= 0.95
