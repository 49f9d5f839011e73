"""Prefill where each shape of attention is planned (cuDNN): few shapes, and the same results."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from kvd.worker.cache import padded_sizes
from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.serving import runner as runners
from kvd.worker.serving.probe import find_layout
from kvd.worker.serving.runner import Row, Runner
from tests.worker.architectures.zoo import build
from tests.worker.attention.test_packed import Group, bench_of
from tests.worker.cache.invariants import check_cache
from tests.worker.core.row_contents import contents_of

pytestmark = pytest.mark.mlx

LENGTHS = ((130, 7, 64), (1, 70, 33), (64, 64, 64), (63, 5, 200))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Simulate a device that plans attention per shape; return the shapes of queries and keys."""
    monkeypatch.setattr(padded_sizes, "attention_is_planned", lambda: True)
    monkeypatch.setattr(runners, "on_cpu", lambda: False)
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    attend = mx.fast.scaled_dot_product_attention

    def noted(queries: mx.array, keys: mx.array, *rest: Any, **more: Any) -> mx.array:
        seen.append((queries.shape, keys.shape))
        found: mx.array = attend(queries, keys, *rest, **more)
        return found

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noted)
    return seen


@pytest.mark.parametrize(
    "kind", [FULL, Kind(window=150, keep=70), Kind(chunk=96)], ids=lambda kind: kind.name
)
@pytest.mark.usefixtures("planned")
def test_a_chunk_attends_to_the_same_with_its_padding(kind: Kind) -> None:
    """`Group` pads keys and values with 7.0, and compares with dense attention in float32."""
    bench = bench_of(kind=kind)
    rows = [bench.new(), bench.new(100), bench.new(333)]
    for counts in (*LENGTHS, (1, 1, 2)):
        case = Group(bench, rows, counts)
        case.check()
        case.check(mx.array([0.5, -2.0, 3.0, 1.0]))
        case.finish()


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("share", [4, 24])
def test_a_padded_chunk_attends_to_the_same_in_parts(share: int) -> None:
    """With less scratch, attention runs for some heads at a time, or in tiles."""
    bench = bench_of()
    case = Group(bench, [bench.new(2000), bench.new(1500)], (100, 30))
    bench.store.scratch.limit = bench.geometry.dense_bytes(2100) * share // 4
    case.check()
    case.finish()


def runner_of(name: str) -> Runner:
    model = build(name)[0]
    cache = ModelCache(find_layout(model), CacheSettings((Scheme(16, 16),)))
    runner = Runner(model, cache)
    assert runner.pack()
    return runner


def read(runner: Runner) -> tuple[list[Row], mx.array]:
    """Prefill chunks of three rows, grouped or one by one, and decode a token after each chunk.

    Return the rows and logits.
    """
    rows = [runner.cache.new_row() for _ in range(3)]
    found = []
    for number, counts in enumerate(LENGTHS):
        chunks = [[(7 * at + count) % 60 for at in range(count)] for count in counts]
        if number % 2:
            for row, chunk in zip(rows, chunks, strict=True):
                runner.prefill(row, chunk)
        else:
            runner.prefill_pass(rows, chunks)
        logits = runner.decode(rows, mx.array([5, 6, 7]))
        mx.eval(logits, runner.cache.arrays())
        runner.cache.flush()
        check_cache(runner.cache)
        found.append(logits)
    return rows, mx.stack(found)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_cache_and_logits_do_not_change(request: pytest.FixtureRequest, name: str) -> None:
    plain = runner_of(name)
    rows, logits = read(plain)
    seen = request.getfixturevalue("planned")
    few = runner_of(name)
    del seen[:]
    few_rows, few_logits = read(few)

    assert all(queries[2] % 64 == 0 for queries, _ in seen if queries[2] > 1)
    assert len(set(seen)) < len(seen)
    assert mx.isfinite(few_logits).all()
    assert mx.abs(few_logits - logits).max() <= 1e-4 * mx.abs(logits).max()
    for one, other in zip(rows, few_rows, strict=True):
        assert one.length == other.length
        for exact, padded in zip(contents_of(plain, one), contents_of(few, other), strict=True):
            assert exact.shape == padded.shape
            assert mx.isfinite(padded).all()
            assert mx.abs(exact - padded).max() <= 1e-4 * mx.abs(exact).max()


def test_prompts_of_many_lengths_have_few_shapes(
    planned: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    runner = runner_of("qwen3")
    del planned[:]
    for length in range(3, 250, 13):
        row = runner.cache.new_row()
        runner.prefill(row, [1 + at % 50 for at in range(length)])
        runner.cache.free(row)

    assert len(set(planned)) == 4  # widths of 64, 128, 192 and 256


def test_widths_are_whole_pages() -> None:
    widths = [padded_sizes.padded_width(count) for count in (1, 63, 64, 65, 1000)]
    assert widths == [64, 64, 64, 128, 1024]


def test_on_the_cpu_chunks_are_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    attend = mx.fast.scaled_dot_product_attention

    def noted(queries: mx.array, *rest: Any, **more: Any) -> mx.array:
        seen.append(queries.shape[2])
        found: mx.array = attend(queries, *rest, **more)
        return found

    runner = runner_of("qwen3")
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noted)
    runner.prefill_pass([runner.cache.new_row(), runner.cache.new_row()], [[1] * 63, [1] * 65])

    assert set(seen) == {63, 65}
