"""Splits: every page is in exactly one, and a row's splits do not depend on its batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.worker.cache.page_tables import PageList
from kvd.worker.cache.pages import PageId
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import PAGE_TOKENS
from kvd.worker.cache.splits import (
    LEAST,
    MOST,
    PADDING,
    WANTED,
    Splits,
    split_pages,
)
from protocol import memory_bounds

pytestmark = pytest.mark.mlx

counts = st.lists(st.integers(0, 400) | st.integers(0, 10_000), min_size=1, max_size=9)


def most_splits(pages: int) -> int:
    """Return the most splits of a row with up to this many pages, its tail included."""
    return max(min(-(-pages // LEAST), WANTED), -(-pages // MOST)) + 1


def splits_of(pages: list[int]) -> tuple[Splits, list[list[list[int]]]]:
    """Return the splits of rows with these numbers of pages, and the entries of each row."""
    splits = Splits.of(np.cumsum(pages).tolist())
    entries = np.array(splits.array).tolist()
    firsts = (0, *splits.ends)
    return splits, [entries[first:end] for first, end in zip(firsts, splits.ends, strict=False)]


@given(counts)
def test_each_page_is_in_one_split_in_order_and_the_tail_is_last(pages: list[int]) -> None:
    splits, rows = splits_of(pages)
    first = 0
    for row, (count, mine) in enumerate(zip(pages, rows, strict=True)):
        *paged, tail = mine
        assert tail == [row, 0, 0, 1]
        for owner, start, end, is_tail in paged:
            assert (owner, start, is_tail) == (row, first, 0)
            assert 0 < end - start <= split_pages(count)
            first = end
        assert first == sum(pages[: row + 1])
        assert len(mine) <= most_splits(count)
    assert splits.count == splits.array.shape[0] == sum(map(len, rows))


@given(counts, st.integers(0, 8))
def test_a_rows_splits_do_not_depend_on_other_rows(pages: list[int], which: int) -> None:
    which %= len(pages)
    _, together = splits_of(pages)
    _, alone = splits_of([pages[which]])
    before = sum(pages[:which])

    assert [
        [0, start - before * (not tail), end - before * (not tail), tail]
        for _, start, end, tail in together[which]
    ] == alone[0]


def test_long_rows_have_large_splits() -> None:
    sizes = [split_pages(pages) for pages in range(5000)]
    assert sizes == sorted(sizes)
    assert set(sizes) == {4, 8, 16, 32, 64}
    assert split_pages(WANTED * LEAST) == LEAST
    assert split_pages(WANTED * LEAST + 1) == 2 * LEAST
    # A reservation for a row up to some length covers shorter rows too.
    needed = [len(splits_of([pages])[1][0]) for pages in range(0, 5000, 7)]
    assert all(
        max(needed[: at + 1]) <= most_splits(pages) for at, pages in enumerate(range(0, 5000, 7))
    )


@given(st.integers(0, 100_000))
def test_the_reservation_of_a_row_covers_its_splits(pages: int) -> None:
    assert (
        most_splits(pages)
        <= memory_bounds.ROW_SPLITS + PAGE_TOKENS * pages // memory_bounds.SPLIT_TOKENS
    )
    assert memory_bounds.SPLIT_TOKENS == MOST * PAGE_TOKENS


def test_padding_belongs_to_no_row_and_is_made_once() -> None:
    splits, _ = splits_of([9, 0, 130])
    padded = splits.padded(40)

    assert padded is splits.padded(40)
    assert splits.padded(3) is splits
    assert padded.ends == splits.ends
    entries = np.array(padded.array)
    assert entries.shape == (40, 4)
    assert entries.dtype == np.int32
    assert (entries[: splits.count] == np.array(splits.array)).all()
    assert (entries[splits.count :, 0] == PADDING).all()


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10_000)), max_size=12),
            st.integers(0, 3),
            st.integers(0, 50),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_a_list_has_all_pages_with_their_positions(
    rows: list[tuple[list[tuple[int, int]], int, int]],
) -> None:
    rows = [
        Row(0, pages=[PageId(*page) for page in pages], anchored=anchored, skipped=skipped)
        for pages, anchored, skipped in rows
    ]
    listed = PageList.of(rows)
    pages = [(page, row.start(at)) for row in rows for at, page in enumerate(row.pages)]
    found = np.array(listed.array)

    assert listed.levels == tuple(sorted({page.level for page, _ in pages}))
    assert listed.count == len(pages)
    assert list(listed.ends) == np.cumsum([len(row.pages) for row in rows]).tolist()
    assert [
        (listed.levels[level], slot, start) for level, slot, start in found[: len(pages)].tolist()
    ] == [(page.level, page.slot, start) for page, start in pages]
    assert found.shape == (max(1, len(pages)), 3)
    assert np.array(listed.padded(100).array)[len(pages) :].sum() == 0


def test_the_number_of_heads_is_found_under_its_other_names() -> None:
    config = {"num_attention_heads": 12, "hidden_size": 768, "num_hidden_layers": 12}
    other = {"n_head": 12, "n_embd": 768, "num_hidden_layers": 12}

    assert (
        memory_bounds.parts_bytes(other, 4, 1000) == memory_bounds.parts_bytes(config, 4, 1000) > 0
    )
