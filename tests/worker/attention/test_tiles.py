"""Plans that cut prefill attention into parts that fit the scratch."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.worker.attention.tiles import MOST_SCORES, TILE_SCORES, Plan, Work, plan
from kvd.worker.cache.scheme import PAGE_TOKENS

MIB = 1 << 20

works = st.builds(
    Work,
    kv_heads=st.integers(1, 128),
    repeats=st.integers(1, 128),
    queries=st.integers(1, 4096),
    keys=st.integers(1, 2_000_000),
    k_dim=st.sampled_from([8, 64, 80, 96, 112, 128, 192, 256, 576]),
    v_dim=st.sampled_from([8, 64, 80, 96, 112, 128, 256, 512]),
    itemsize=st.sampled_from([2, 4]),
    unpacking=st.sampled_from([0, 4, 8, 28]),
    masked=st.booleans(),
    sinks=st.booleans(),
    fused=st.booleans(),
).map(lambda work: replace(work, keys=max(work.keys, work.queries)))


@settings(max_examples=1000, deadline=None)
@given(work=works, scratch=st.integers(1, 1 << 32))
def test_a_plan_fits_or_is_the_smallest(work: Work, scratch: int) -> None:
    cut = plan(work, scratch)

    assert 1 <= cut.heads <= work.kv_heads
    assert 1 <= cut.queries <= work.queries
    smallest = Plan(1, 1, PAGE_TOKENS, work.tile_bytes(1, PAGE_TOKENS))
    assert cut.nbytes <= scratch or cut == smallest
    if cut.keys is None:
        assert cut.queries == work.queries
        assert cut.nbytes == work.dense_bytes(cut.heads)
        assert work.fused or cut.heads == work.kv_heads
    else:
        assert cut.heads == 1
        assert cut.keys % PAGE_TOKENS == 0
        assert PAGE_TOKENS <= cut.keys < work.keys + PAGE_TOKENS
        assert cut.nbytes == work.tile_bytes(cut.queries, cut.keys)
        assert cut.queries * work.repeats * cut.keys <= TILE_SCORES


@settings(max_examples=300, deadline=None)
@given(work=works, scratch=st.integers(1, 1 << 32))
def test_more_scratch_never_means_smaller_parts(work: Work, scratch: int) -> None:
    less, more = plan(work, scratch), plan(work, 2 * scratch)

    if less.keys is None:
        assert more.keys is None
        assert more.heads >= less.heads
    elif more.keys is not None:
        assert more.queries * more.keys * 2 > less.queries * less.keys
        assert more.queries >= less.queries


def test_work_that_fits_is_one_call() -> None:
    work = Work(8, 4, 256, 4096, 128, 128, itemsize=2)

    assert plan(work, 256 * MIB) == Plan(8, 256, None, work.dense_bytes(8))


def test_a_fused_kernel_gets_equal_numbers_of_heads_per_call() -> None:
    work = Work(8, 4, 2048, 40_000, 128, 128, itemsize=2, fused=True)

    assert [plan(work, scratch * MIB).heads for scratch in (128, 512, 1024)] == [1, 4, 8]
    assert all(plan(work, scratch * MIB).keys is None for scratch in (128, 512, 1024))
    assert plan(work, 64 * MIB).keys is not None
    assert plan(replace(work, fused=False), 128 * MIB).keys is not None


def test_a_fused_kernel_never_runs_for_seconds() -> None:
    work = Work(8, 8, 2048, 65_536, 128, 128, itemsize=2, fused=True)
    cut = plan(work, 1 << 40)

    assert cut.heads * 8 * 2048 * 65_536 <= MOST_SCORES
    assert cut.heads == 4


def test_no_score_matrix_of_a_long_context() -> None:
    """A million tokens have the same plan as a hundred thousand."""
    work = Work(8, 4, 256, 100_000, 256, 256, itemsize=2)

    assert plan(work, 256 * MIB) == plan(replace(work, keys=1_000_000), 256 * MIB)
