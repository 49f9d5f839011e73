"""Explanations of lookups in the prefix cache, compared with plain lists."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.worker.prefix import evicted
from kvd.worker.prefix.cache import PrefixCache
from kvd.worker.prefix.evicted import Evictions
from kvd.worker.prefix.lookup import Lookup, Nearest, Unread
from kvd.worker.prefix.queued_paths import path_of
from kvd.worker.prefix.tree import PrefixTree
from protocol.cache_outcome import REUSED, Eviction
from tests.worker.prefix.test_tree import FakeCache

CHUNK = 4
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=22).map(tuple)
COUNTS = st.integers(0, 30)


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def tree_of(prompts: list[tuple[int, ...]], salt: str = "") -> PrefixTree:
    tree = PrefixTree(FakeCache(), CHUNK, 0, 1 << 20, clock=lambda: 7.0)
    for prompt in prompts:
        whole = len(prompt) // CHUNK * CHUNK
        if whole:
            tree.insert(prompt[:whole], salt, tuple(range(whole)))
    return tree


@settings(max_examples=50)
@given(PROMPTS, st.lists(PROMPTS, max_size=6), PROMPTS)
def test_the_first_token_that_differs_is_that_of_comparing_lists(prompt, cached, foreign):
    tree = tree_of(cached)
    tree.insert((*foreign, *prompt[:3], 0, 0, 0)[:CHUNK], "other", tuple(range(CHUNK)))
    known = [one[: len(one) // CHUNK * CHUNK] for one in cached]
    same = max((common(prompt, one) for one in known), default=0)
    nearest = tree.nearest(prompt)
    assert nearest.tokens == same
    others = {one[same] for one in known if common(prompt, one) == same < len(one)}
    if same < len(prompt) and others:
        assert nearest.rest[0] in others - {prompt[same]}
    else:
        assert not nearest.rest


@settings(max_examples=50)
@given(COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, st.booleans())
def test_the_parts_are_the_whole_prompt(more, memory, read, stored, dropped, same, differs):
    total = max(memory, read, stored, dropped, same) + more
    lookup = Lookup(
        total, CHUNK, memory, Nearest(same, (1,) if differs else ()),
        Eviction(dropped, 1.0, "rows"),
    )  # fmt: skip
    held = max(memory, read)
    outcome = lookup.outcome(held, Unread(stored, "slow"))
    assert outcome.prompt_tokens == total
    assert all(part.tokens for part in outcome.parts)
    assert outcome.reused_tokens == held
    assert (outcome.difference is not None) == any(p.reason == "differs" for p in outcome.parts)
    if outcome.difference is not None:
        after = sum(part.tokens for part in outcome.parts if part.reason != "differs")
        assert outcome.difference.token == same == after


def outcome_of(tree, prompt, **changes):
    cache = PrefixCache(tree)
    tracked = cache.track("r", prompt, "", full_prefill=changes.pop("full_prefill", False))
    for name, value in changes.items():
        setattr(tracked, name, value)
    return tracked.outcome(cache.begin_prefill(tracked).tokens)


def reasons(outcome):
    return [(part.reason, part.tokens) for part in outcome.parts]


FIRST = (1,) * 10


@pytest.mark.parametrize(
    ("cause", "drop"),
    [
        ("reclaim", lambda tree: tree.evict(1, "reclaim")),
        ("rows", lambda tree: tree.evict(1)),
        ("failure", lambda tree: tree.clear()),
        ("untrusted", lambda tree: tree.drop_untrusted(FIRST)),
    ],
)
def test_an_evicted_beginning_is_named_with_cause_and_time(cause, drop):
    tree = tree_of([FIRST])
    drop(tree)
    outcome = outcome_of(tree, FIRST)
    assert reasons(outcome) == [("evicted", 8), ("end", 2)]
    assert outcome.eviction == Eviction(8, 7.0, cause)


def test_a_beginning_at_another_level_is_named():
    tree = tree_of([FIRST])
    next(iter(tree._stored)).snapshot.sound = False
    assert outcome_of(tree, FIRST).eviction == Eviction(8, 7.0, "precision")


def test_what_a_full_cache_replaces_is_named_until_it_is_stored_again():
    tree = PrefixTree(FakeCache(), CHUNK, 0, 12, clock=lambda: 7.0)
    for prompt in (FIRST, (2,) * 10):
        tree.insert(prompt[:8], "", tuple(range(prompt[0] * 10, prompt[0] * 10 + 8)))
    assert outcome_of(tree, FIRST).eviction == Eviction(8, 7.0, "full")
    tree.insert(FIRST[:8], "", tuple(range(10, 18)))
    assert reasons(outcome_of(tree, FIRST)) == [("memory", 8), ("end", 2)]


def test_tokens_after_the_last_whole_chunk_are_the_end_of_the_prompt():
    tree = tree_of([FIRST])
    assert reasons(outcome_of(tree, FIRST)) == [("memory", 8), ("end", 2)]
    assert reasons(outcome_of(tree, (*FIRST, 2, 2))) == [("memory", 8), ("end", 4)]
    assert reasons(outcome_of(tree, (*FIRST, 2, 2, 2))) == [("memory", 8), ("new", 5)]
    for one in (tree, tree_of([])):
        assert reasons(outcome_of(one, (3,) * CHUNK)) == [("end", CHUNK)]
        assert reasons(outcome_of(one, (3,) * (CHUNK + 1))) == [("empty", CHUNK + 1)]


def test_reasons_that_concern_the_whole_prompt():
    tree = tree_of([FIRST])
    assert reasons(outcome_of(tree, FIRST, lowered=True)) == [("lowered", 10)]
    assert reasons(outcome_of(tree, FIRST, full_prefill=True)) == [("scored", 10)]
    assert reasons(outcome_of(None, FIRST)) == [("off", 10)]
    assert reasons(outcome_of(tree_of([FIRST], "secret"), FIRST)) == [("empty", 10)]


def test_an_eviction_of_another_salt_is_not_revealed():
    tree = tree_of([FIRST], "secret")
    tree.evict(1)
    assert len(tree.evictions) == 1
    assert reasons(outcome_of(tree, FIRST)) == [("empty", 10)]


@settings(max_examples=30)
@given(st.lists(st.integers(0, 9), max_size=40))
def test_the_newest_evictions_are_kept(numbers):
    limit, evicted.MAX_EVICTIONS = evicted.MAX_EVICTIONS, 4
    try:
        evictions = Evictions(lambda: 1.0)
        for number in numbers:
            evictions.add(path_of((number,) * 5, "", CHUNK)[0], "rows")
    finally:
        evicted.MAX_EVICTIONS = limit
    newest = list(dict.fromkeys(reversed(numbers)))
    for place, number in enumerate(newest):
        found = evictions.find(path_of((number,) * 5, "", CHUNK), CHUNK, 0)
        assert (found is not None) == (place < 4)


def test_reused_parts_come_first():
    outcome = Lookup(20, CHUNK, 4, Nearest(9, (3,))).outcome(8, None)
    assert reasons(outcome) == [("memory", 4), ("disk", 4), ("between", 1), ("differs", 11)]
    assert [part.reason for part in outcome.parts[:2]] == list(REUSED)
