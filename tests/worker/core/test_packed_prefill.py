"""Packed prefill: chunks of one or more prompts in a pass have the bits of passes alone."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import mlx.core as mx
import msgspec
import pytest

from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.packed import page_product
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.native import build as build_native
from kvd.worker.native.layers import pack_weights
from kvd.worker.native.step import Library
from kvd.worker.serving import loading
from kvd.worker.serving import runner as runners
from kvd.worker.serving.probe import find_layout, serve
from kvd.worker.serving.runner import Row, Runner
from protocol import memory_bounds
from protocol.kv import KVSpec
from protocol.types import Sampling
from protocol.worker import LoadModel
from tests.breadth import ALL
from tests.worker import shallow
from tests.worker.architectures.reference import TOKENS
from tests.worker.architectures.zoo import build
from tests.worker.cache.invariants import check_cache
from tests.worker.core.driver import Driver, Outcome
from tests.worker.core.prompts import prompt_of
from tests.worker.core.row_contents import contents_of

pytestmark = pytest.mark.mlx
SCHEMES = (Scheme(8, 8), Scheme(4, 4))
LENGTHS = (1, 2, 3, 4, 9, 15, 16, 17, 31, 63, 64, 65, 127, 200, 299)


def library() -> ModuleType:
    try:
        return build_native.load()
    except build_native.NotBuiltError:
        pytest.skip("no C++ compiler")


class Counted:
    """A model that records the tokens of each pass."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.passes: list[int] = []

    def __call__(self, tokens: mx.array, **more: Any) -> Any:
        self.passes.append(tokens.size)
        return self._model(tokens, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def two_runners(
    name: str, library: ModuleType | None = None, settings: CacheSettings | None = None
) -> tuple[Runner, Runner]:
    """Return two runners of one model, each with its own cache."""
    model = build(name)[0]
    if library is not None:
        pack_weights(model, library)
    layout = find_layout(model)
    caches = [ModelCache(layout, settings or CacheSettings(SCHEMES)) for _ in range(2)]
    for cache in caches:
        cache.use(page_product, library and Library(library))
    alone, together = (Runner(model, cache) for cache in caches)
    assert alone.pack()
    assert together.pack()
    return alone, together


def assert_same(alone: Runner, row: Row, together: Runner, grouped: Row) -> None:
    assert row.length == grouped.length
    contents, grouped_contents = contents_of(alone, row), contents_of(together, grouped)
    for expected, actual in zip(contents, grouped_contents, strict=True):
        assert mx.isfinite(expected).all()
        assert mx.array_equal(expected, actual)


@pytest.mark.parametrize(
    ("name", "native", "settings"),
    [
        ("llama", False, CacheSettings(SCHEMES, max_size=200, keep=4)),
        ("qwen3", False, CacheSettings(SCHEMES, quantized_start=150)),
        ("gemma3_text", False, CacheSettings(SCHEMES)),
        ("qwen3_moe", True, CacheSettings(SCHEMES)),
    ],
    ids=["bounded", "dense start", "windows", "experts"],
)
def test_rows_of_any_length_have_the_same_bits_alone_and_together(
    name: str, settings: CacheSettings, *, native: bool
) -> None:
    """Chunks alternate with decode steps."""
    alone, together = two_runners(name, library() if native else None, settings)
    draw = random.Random(3)
    for count in (1, 2, 5, 8) if ALL else (1, 2, 8):
        pairs = [(alone.cache.new_row(), together.cache.new_row()) for _ in range(count)]
        for _ in range(3):
            chunks = [[draw.randrange(60) for _ in range(draw.choice(LENGTHS))] for _ in pairs]
            for (row, _), chunk in zip(pairs, chunks, strict=True):
                alone.prefill(row, chunk)
            together.prefill_pass([row for _, row in pairs], chunks)
            for one, other in pairs:
                assert_same(alone, one, together, other)
            found = []
            for side, runner in enumerate((alone, together)):
                logits = runner.decode([pair[side] for pair in pairs], mx.array([7] * count))
                mx.eval(logits, runner.cache.arrays())
                runner.cache.flush()
                check_cache(runner.cache)
                found.append(logits)
            assert mx.isfinite(found[0]).all()
            assert mx.array_equal(*found)
        for side, runner in enumerate((alone, together)):
            for pair in pairs:
                runner.cache.free(pair[side])


@pytest.mark.parametrize(
    ("name", "native", "settings"),
    [
        ("llama", True, CacheSettings((Scheme(16, 16),))),
        ("qwen3", False, CacheSettings(SCHEMES)),
        ("llama", False, CacheSettings(SCHEMES[1:], max_size=200, keep=4)),
        ("qwen3", False, CacheSettings(SCHEMES, quantized_start=150)),
        ("gemma3_text", True, CacheSettings(SCHEMES)),
        ("gpt_oss", True, CacheSettings(SCHEMES)),
        ("qwen3_moe", True, CacheSettings(SCHEMES)),
    ],
    ids=["dense", "quantized", "bounded", "dense start", "windows", "sinks", "experts"],
)
def test_successive_chunks_have_the_same_bits_in_one_pass_and_in_several(
    name: str, settings: CacheSettings, *, native: bool
) -> None:
    """A later chunk sees the pages that an earlier one of the same pass fills."""
    alone, together = two_runners(name, library() if native else None, settings)
    draw = random.Random(5)
    pairs = [(alone.cache.new_row(), together.cache.new_row()) for _ in range(3)]
    for last in (0, 63, 1):
        rows, chunks = [], []
        for one, other in pairs:
            lengths = [64 - one.length % 64, *([64] * draw.randrange(2)), 128, 64, 64][: 2 + last]
            for length in [*lengths, *([last] if last else [])]:
                chunks.append([draw.randrange(60) for _ in range(length)])
                rows.append(other)
                alone.prefill(one, chunks[-1])
        together.prefill_pass(rows, chunks)
        for one, other in pairs:
            assert_same(alone, one, together, other)
        check_cache(together.cache)


def test_logits_of_a_padded_chunk_are_those_of_its_tokens() -> None:
    alone, _ = two_runners("llama")
    one, other = alone.cache.new_row(), alone.cache.new_row()
    scores = alone.score(one, [5, 9, 3])
    alone.prefill(other, [5, 9, 3])

    assert scores.shape[0] == 3
    assert_same(alone, one, alone, other)


@pytest.mark.parametrize("name", ["mamba2", "jamba", "llama4", "deepseek_v3"])
def test_models_that_take_one_row_a_pass_are_not_packed(name: str) -> None:
    """These models have recurrent states, take one position for all rows, or need rectangles."""
    served = serve(build(name)[0], CacheSettings(SCHEMES), TOKENS)

    assert not served.runner.pack()
    assert not served.runner.packs
    row = served.runner.cache.new_row()
    served.runner.prefill(row, [1, 2, 3])
    assert row.length == 3


def test_a_model_with_different_results_in_a_packed_pass_is_not_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("llama")[0]
    runner = Runner(model, ModelCache(find_layout(model), CacheSettings(SCHEMES)))

    def wrong(self: Any) -> mx.array:
        return mx.zeros((self.batch,), mx.int32)

    monkeypatch.setattr("kvd.worker.cache.steps.PackedPrefill.positions", property(wrong))
    assert not runner.pack()
    assert not runner.packs
    assert runner.cache.usage.pages_used == 0
    assert not runner.cache.sequences


def test_on_an_accelerator_models_are_packed_despite_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The router of four experts computes small products, which on a CPU round differently
    depending on the number of rows."""
    model = build("mixtral")[0]
    runner = Runner(model, ModelCache(find_layout(model), CacheSettings(SCHEMES)))
    monkeypatch.setattr(runners, "on_cpu", lambda: False)

    assert runner.pack()


# The engine.


def submitted(demo: Driver, requests: dict[str, dict[str, Any]]) -> dict[str, Outcome]:
    for rid, request in requests.items():
        demo.submit(rid, **request)
    demo.run()
    return {rid: demo.outcomes.pop(rid) for rid in requests}


def test_short_prompts_that_arrive_together_take_one_pass(
    demo: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = demo.engine._runner
    assert runner.packs
    model = Counted(runner.model)
    monkeypatch.setattr(runner, "model", model)
    requests = {
        f"r{number}": {"prompt": prompt_of(30 + number % 3, number), "max_tokens": 20}
        for number in range(8)
    }
    wanted = {rid: demo.alone(**request) for rid, request in requests.items()}
    assert len(model.passes) == 8
    model.passes.clear()

    assert submitted(demo, requests) == wanted
    assert model.passes == [sum(29 + number % 3 for number in range(8))]


def test_prompts_beyond_the_grant_take_a_pass_once_the_daemon_has_answered(
    demo: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that fit do not wait for the memory of those behind them."""
    admission = demo.engine._admission
    kept = 6 * admission.row_pages + 4
    demo.reclaim("spare", (admission.budget.pages - kept) * admission.budget.page_bytes)
    assert admission.budget.pages == kept
    model = Counted(demo.engine._runner.model)
    monkeypatch.setattr(demo.engine._runner, "model", model)
    for number in range(8):
        demo.submit(f"r{number}", prompt_of(30, number), max_tokens=20)
    asked = len(demo.asked)
    demo.run()

    assert model.passes == [6 * 29, 2 * 29]
    assert len(demo.asked) > asked


def test_requests_get_the_same_output_alone_and_in_any_company(
    demo: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some prompts are scored, some requests have several choices or logprobs, and rows decode."""
    draw = random.Random(11)
    requests: dict[str, dict[str, Any]] = {}
    for number in range(24):
        length = draw.choice((2, 3, 17, 18, 40, 41, 64, 65, 66, 120, 129, 257, 300))
        how = Sampling(temperature=draw.choice((0.0, 0.9)), seed=number)
        more = draw.choice(({}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"n": 2}))
        requests[f"r{number}"] = {
            "prompt": prompt_of(length, number),
            "sampling": how,
            "max_tokens": draw.randrange(3, 30),
        } | more
    wanted = {rid: demo.alone(**request) for rid, request in requests.items()}
    rows: list[int] = []
    runner = demo.engine._runner
    prefill_pass = runner.prefill_pass

    def noted(some: list[Row], *rest: Any, **more: Any) -> None:
        rows.append(len(some))
        prefill_pass(some, *rest, **more)

    monkeypatch.setattr(runner, "prefill_pass", noted)
    demo.engine._prefix_cache.tree.clear()
    names = list(requests)
    draw.shuffle(names)
    while names or demo.engine.has_work:
        for _ in range(draw.choice((0, 0, 1, 4, 7))):
            if names:
                rid = names.pop()
                demo.submit(rid, **requests[rid])
        if demo.engine.has_work:
            demo.step()

    assert max(rows) >= 3
    for rid, outcome in wanted.items():
        assert (rid, demo.outcomes.pop(rid)) == (rid, outcome)


def test_a_cancelled_request_does_not_disturb_its_pass(demo: Driver) -> None:
    requests = {
        f"r{number}": {"prompt": prompt_of(40, number), "max_tokens": 10} for number in range(4)
    }
    wanted = {rid: demo.alone(**request) for rid, request in requests.items()}
    for rid, request in requests.items():
        demo.submit(rid, **request)
    demo.engine.cancel("r1")
    demo.step()
    demo.engine.cancel("r2")
    demo.run()

    for rid in ("r0", "r3"):
        assert demo.outcomes[rid] == wanted[rid]
    assert demo.outcomes["r1"].reason == demo.outcomes["r2"].reason == "cancelled"


CHUNK = 64


def driver_of(*, packed: bool) -> tuple[Driver, Counted]:
    """Return a driver whose passes take up to four chunks, or one chunk of one prompt."""
    driver = Driver(shallow.path(), prefill_chunk=CHUNK)
    runner, scheduler = driver.engine._runner, driver.engine._scheduler
    assert runner.packs
    if not packed:
        scheduler.must_end_pass = lambda *_, **__: True
        scheduler._prefill_order._group = False
    model = Counted(runner.model)
    runner.model = model
    return driver, model


def test_passes_of_several_chunks_change_no_output() -> None:
    """Prompts share beginnings, some are scored or embedded, and rows decode meanwhile."""
    draw = random.Random(17)
    shared = prompt_of(300, 99)
    requests: dict[str, dict[str, Any]] = {}
    for number in range(16):
        own = prompt_of(draw.choice((2, 63, 64, 65, 66, 128, 129, 255, 256, 257, 500)), number)
        prompt = own if number % 3 else shared[: draw.choice((64, 130, 300))] + own
        more = draw.choice(({}, {}, {"prompt_logprobs": 1}, {"n": 2}))
        requests[f"r{number}"] = {"prompt": prompt, "max_tokens": draw.randrange(1, 12)} | more
    found = []
    for packed in (True, False):
        driver, model = driver_of(packed=packed)
        names = list(requests)
        random.Random(3).shuffle(names)
        while names or driver.engine.has_work:
            for rid in [names.pop() for _ in range(min(len(names), draw.choice((0, 1, 3))))]:
                driver.submit(rid, **requests[rid])
            if driver.engine.has_work:
                driver.step()
        found.append(driver.outcomes)
        assert max(model.passes) > 2 * CHUNK if packed else max(model.passes) <= CHUNK
    assert found[0] == found[1]


def test_a_pass_ends_where_a_prompt_leaves_a_checkpoint_if_chunks_are_short() -> None:
    driver, model = driver_of(packed=True)
    first, second = prompt_of(300, 1), prompt_of(300, 2)
    second = first[:130] + second[130:]
    driver.submit("first", first, max_tokens=2)
    driver.submit("second", second, max_tokens=2)
    driver.run()

    # Two chunks to where the prompts diverge, and the rest.
    assert model.passes[0] == 128
    assert driver.outcomes["second"].cached == 128


def checkpointing(monkeypatch: pytest.MonkeyPatch, pass_tokens: int) -> Driver:
    """Return a driver whose prompts leave a checkpoint after each chunk of 256 tokens."""
    monkeypatch.setattr(memory_bounds, "PASS_TOKENS", pass_tokens)
    return Driver(shallow.path(), prefill_chunk=256, kv=KVSpec(prefix_every=256))


def test_a_pass_leaves_checkpoints_at_the_chunk_ends_inside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts that continue from them get the same tokens as without a cache."""
    driver = checkpointing(monkeypatch, 1024)
    runner, tree = driver.engine._runner, driver.engine._prefix_cache.tree
    assert runner.packs
    runner.model = model = Counted(runner.model)
    first = prompt_of(1000, 1)
    lengths = 100, 256, 300, 520, 800, 999
    others = {f"r{at}": first[:at] + prompt_of(90, at) for at in lengths}
    wanted = {rid: driver.alone(prompt=prompt, max_tokens=4) for rid, prompt in others.items()}
    tree.clear()
    model.passes.clear()
    driver.submit("first", first, max_tokens=2)
    driver.run()
    assert [tokens for tokens in model.passes if tokens > 2] == [999]
    assert len(tree) == 3
    for rid, prompt in others.items():
        driver.submit(rid, prompt, max_tokens=4)
        driver.run()
        outcome = driver.outcomes[rid]
        assert outcome.cached == int(rid[1:]) // 256 * 256
        assert outcome.tokens == wanted[rid].tokens


@pytest.mark.parametrize(("length", "count"), [(4000, 1), (2000, 2), (1000, 4)])
def test_checkpoints_inside_a_pass_wait_for_memory(
    monkeypatch: pytest.MonkeyPatch, length: int, count: int
) -> None:
    """It is requested when the prompt begins, and granted after its only pass."""
    driver = checkpointing(monkeypatch, 4096)
    tree = driver.engine._prefix_cache.tree
    prompts = [prompt_of(length, number) for number in range(count)]
    for number, prompt in enumerate(prompts):
        driver.submit(f"r{number}", prompt, max_tokens=20)
    driver.run()
    assert len(tree) == count * ((length - 1) // 256)
    assert tree.counts.evicted == 0
    for number, prompt in enumerate(prompts):
        driver.submit(f"again{number}", prompt, max_tokens=2)
        driver.run()
        assert driver.outcomes[f"again{number}"].cached == (length - 1) // 256 * 256


def test_checkpoints_are_trusted_if_their_memory_comes_after_the_first_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that are not trusted are never written to the disk."""
    driver = checkpointing(monkeypatch, 4096)
    tree, memory = driver.engine._prefix_cache.tree, driver.engine._memory
    spare_bytes = memory.spare_bytes
    monkeypatch.setattr(
        memory,
        "spare_bytes",
        lambda: spare_bytes() if len(driver.outcomes["first"].tokens) >= 3 else 0,
    )
    driver.submit("first", prompt_of(2000, 1), max_tokens=20)
    driver.run(until=lambda: driver.outcomes["first"].tokens)
    assert len(tree) == 1, "the reservation has room for one"
    driver.run()
    assert len(tree) == len(tree.checkpoints()) == 7


def test_a_row_that_is_freed_meanwhile_leaves_no_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pages belong to others by then."""
    prompt = prompt_of(4000, 1)
    wanted = checkpointing(monkeypatch, 4096).alone(prompt=prompt, max_tokens=9)
    driver = checkpointing(monkeypatch, 4096)
    cache = driver.engine._prefix_cache
    driver.submit("first", prompt, max_tokens=9)
    for _ in range(8):
        if not cache._missed:
            driver.step()
    assert cache._missed
    before = len(cache.tree)
    driver.engine.cancel("first")
    driver.submit("other", prompt_of(1000, 2), max_tokens=9)
    driver.run()
    assert not cache._missed
    assert before < 15
    check_cache(driver.engine._runner.cache)
    driver.submit("again", prompt, max_tokens=9)
    driver.run()
    assert driver.outcomes["again"].tokens == wanted.tokens


def test_a_scored_prompt_in_the_same_step_costs_no_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = checkpointing(monkeypatch, 1024)
    driver.submit("plain", prompt_of(700, 1), max_tokens=2)
    driver.submit("scored", prompt_of(200, 2), max_tokens=2, prompt_logprobs=1)
    driver.run()
    driver.submit("again", prompt_of(700, 1), max_tokens=2)
    driver.run()
    assert driver.outcomes["again"].cached == 512


def test_prompts_that_are_scored_end_their_passes_at_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They have one pass per chunk, so no tail inside a pass can be kept."""
    driver = checkpointing(monkeypatch, 1024)
    prompt = prompt_of(1000, 1)
    driver.submit("scored", prompt, max_tokens=2, prompt_logprobs=1)
    driver.run()
    driver.submit("plain", prompt[:600] + prompt_of(50, 2), max_tokens=2)
    driver.run()
    assert driver.outcomes["plain"].cached == 512


def test_the_last_checkpoint_of_a_prompt_takes_no_pass_of_its_own() -> None:
    """It is cut from the row, which has grown by less than a page."""
    driver, model = driver_of(packed=True)
    prompt = prompt_of(250, 1)
    driver.submit("first", prompt, max_tokens=20)
    driver.run()
    assert [tokens for tokens in model.passes if tokens > CHUNK // 2] == [249]

    driver.submit("again", prompt, max_tokens=20)
    driver.run()
    assert driver.outcomes["again"].cached == 192
    assert driver.outcomes["again"].tokens == driver.outcomes["first"].tokens


def test_a_model_whose_passes_take_one_chunk_has_a_chunk_of_its_own() -> None:
    command = LoadModel(source=shallow.path(), prefill_chunk=CHUNK, lone_chunk=4 * CHUNK)
    runner = driver_of(packed=True)[0].engine._runner
    assert loading.with_chunk(command, runner).prefill_chunk == CHUNK
    runner.packs = False
    assert loading.with_chunk(command, runner).prefill_chunk == 4 * CHUNK
    same = msgspec.structs.replace(command, lone_chunk=None)
    assert loading.with_chunk(same, runner).prefill_chunk == CHUNK


def test_a_row_holds_no_more_pages_in_a_pass_than_it_has_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass may fill the whole step's budget with one prompt, whose window drops pages later."""
    driver = Driver(shallow.path(), prefill_chunk=CHUNK, max_rows=512, kv=KVSpec(max_kv_size=200))
    store = driver.engine._runner.cache.stores[0]
    held, drop = [0], store._drop_unseen

    def noted(rows: Any, *more: Any) -> None:
        rows = list(rows)
        held.extend(len(row.held) for row in rows)
        drop(rows, *more)

    monkeypatch.setattr(store, "_drop_unseen", noted)
    driver.submit("long", prompt_of(3000), max_tokens=2)
    driver.run()

    sizes = driver.engine._scheduler.sizes
    page_bytes = driver.engine._admission.budget.page_bytes
    assert max(held) * store.pages.charge() <= sizes.pages_for(3002, 0) * page_bytes
