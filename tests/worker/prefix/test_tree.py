"""The prefix tree, compared with a dictionary of all checkpoints."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvd.worker.prefix.queued_paths import path_of
from kvd.worker.prefix.tree import SAMPLE, PrefixTree
from tests.worker.prefix.invariants import check_tree

CHUNK = 4
TAIL = 3
"""Bytes of a checkpoint in addition to its pages; a page is one token and one byte."""


@dataclass(eq=False)
class Kept:
    """A snapshot of the fake cache."""

    pages: tuple[int, ...]
    sound: bool = True
    alive: bool = True


@dataclass
class FakeCache:
    """A fake of the cache that takes snapshots. A sequence is a tuple of page numbers."""

    holds: Counter[int] = field(default_factory=Counter)
    """By page, the number of snapshots and running rows that hold it."""

    def can_cut(self, length: int, tokens: int) -> bool:
        return length == tokens

    def keeps_tails(self, _chunk: int) -> bool:
        return False

    def can_take(self, sequence: tuple[int, ...], tokens: int) -> bool:
        return len(sequence) == tokens

    def take(self, sequence: tuple[int, ...], tokens: int) -> Kept:
        assert len(sequence) == tokens
        self.holds.update(sequence)
        return Kept(sequence)

    def drop(self, snapshot: Kept) -> None:
        assert snapshot.alive
        snapshot.alive = False
        self.holds -= Counter(snapshot.pages)

    def unlowered(self, snapshot: Kept) -> bool:
        assert snapshot.alive
        return snapshot.sound

    def held_bytes(self, snapshot: list[Kept]) -> int:
        return TAIL * len(snapshot) + len({page for one in snapshot for page in one.pages})

    def freed_bytes(self, snapshot: list[Kept]) -> int:
        held = Counter(page for one in snapshot for page in one.pages)
        return TAIL * len(snapshot) + sum(self.holds[page] == count for page, count in held.items())

    @property
    def nbytes(self) -> int:
        return len(self.holds)


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=22).map(tuple)
SALTS = st.sampled_from(["", "a"])
Key = tuple[str, tuple[int, ...]]


class Prompts(RuleBasedStateMachine):
    """Prompts arrive, leave checkpoints, run and end; memory is reclaimed."""

    @initialize(cap=st.sampled_from([0, 20, 40, 1000]), every=st.sampled_from([0, 3, 8]))
    def start(self, cap: int, every: int) -> None:
        self.cache = FakeCache()
        self.tree = PrefixTree(self.cache, CHUNK, every, cap)
        self.stored: dict[Key, Kept] = {}
        self.running: list[tuple[int, ...]] = []
        self.pages: dict[Key, int] = {}
        self.queries: list[tuple[int, int]] = []
        self.cleared = 0

    def _pages(self, salt: str, tokens: tuple[int, ...]) -> list[int]:
        """Return one page per token; prompts with the same beginning share its pages."""
        keys = [(salt, tokens[: end + 1]) for end in range(len(tokens))]
        return [self.pages.setdefault(key, len(self.pages)) for key in keys]

    def _prune(self) -> None:
        self.stored = {key: kept for key, kept in self.stored.items() if kept.alive}

    def _longest(self, salt: str, tokens: tuple[int, ...]) -> int:
        return max(
            (
                len(key[1])
                for key, kept in self.stored.items()
                if kept.sound
                and key[0] == salt
                and len(key[1]) < len(tokens)
                and tokens[: len(key[1])] == key[1]
            ),
            default=0,
        )

    @rule(tokens=TOKENS, salt=SALTS)
    def match(self, tokens: tuple[int, ...], salt: str) -> None:
        want = self._longest(salt, tokens)
        hit = self.tree.match(tokens, salt)
        self._prune()
        assert hit.tokens == want
        assert hit.snapshot is (self.stored[salt, tokens[:want]] if want else None)
        self.queries.append((len(tokens), want))

    @rule(tokens=TOKENS, salt=SALTS, run=st.booleans())
    def prompt(self, tokens: tuple[int, ...], salt: str, run: bool) -> None:
        """Serve a prompt as an engine does; with ``run`` its row keeps running."""
        want = self._longest(salt, tokens)
        hit = self.tree.match(tokens, salt)
        self._prune()
        assert hit.tokens == want
        self.queries.append((len(tokens), want))
        boundaries = self.tree.boundaries(tokens, salt)
        assert boundaries == self._boundaries(salt, tokens)
        pages = tuple(self._pages(salt, tokens))
        self.cache.holds.update(pages)
        for end in sorted(boundary for boundary in boundaries if boundary > hit.tokens):
            self._insert(salt, tokens[:end])
        self.running.append(pages)
        if not run:
            self.end(0, newest=True)

    def _boundaries(self, salt: str, tokens: tuple[int, ...]) -> set[int]:
        grid = range(CHUNK, len(tokens), CHUNK)
        known = [
            end
            for end in grid
            if any(key[0] == salt and key[1][:end] == tokens[:end] for key in self.stored)
        ]
        every = self.tree.every
        wanted = {end for end in grid if (every and end % every == 0)}
        wanted |= {*grid[-1:], *known[-1:]}
        return {end for end in wanted if (salt, tokens[:end]) not in self.stored}

    def _insert(self, salt: str, tokens: tuple[int, ...]) -> None:
        before, there = dict(self.stored), self.stored.get((salt, tokens))
        pages = tuple(self._pages(salt, tokens))
        done = self.tree.insert(tokens, salt, pages)
        fits = TAIL + len(set(pages)) <= self.tree.cap_bytes
        assert done == (fits and not (there is not None and there.sound))
        if done:
            self.stored[salt, tokens] = self.tree.match((*tokens, 7), salt).snapshot
            self.queries.append((len(tokens) + 1, len(tokens)))
            assert self.stored[salt, tokens].pages == pages
        self._prune()
        assert done or set(self.stored) <= set(before)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 99))
    def end(self, choice: int, newest: bool = False) -> None:
        pages = self.running.pop(-1 if newest else choice % len(self.running))
        self.cache.holds -= Counter(pages)

    @precondition(lambda self: self.stored)
    @rule(wanted=st.integers(1, 60))
    def evict(self, wanted: int) -> None:
        all_of_it = self.tree.freeable_bytes
        tails, pages = len(self.stored), self.cache.nbytes
        freed = self.tree.evict(wanted)
        self._prune()
        gone = tails - len(self.stored)
        assert freed == TAIL * gone + pages - self.cache.nbytes
        assert gone > 0
        assert freed >= wanted or (freed == all_of_it and not self.stored)

    @precondition(lambda self: self.stored)
    @rule(choice=st.integers(0, 99), at_once=st.booleans())
    def lower(self, choice: int, at_once: bool) -> None:
        """Step a checkpoint down: it is no hit any more, and is dropped now or later."""
        list(self.stored.values())[choice % len(self.stored)].sound = False
        if at_once:
            unsound = sum(not kept.sound for kept in self.stored.values())
            before = self.tree.counts.lowered
            self.tree.drop_lowered()
            assert self.tree.counts.lowered - before == unsound
            self._prune()
            assert all(kept.sound for kept in self.stored.values())

    @rule(tokens=TOKENS, salt=SALTS)
    def drop_untrusted(self, tokens: tuple[int, ...], salt: str) -> None:
        """A request with bad logits leaves no checkpoint on its path."""
        on_its_way = {
            key for key in self.stored if key[0] == salt and tokens[: len(key[1])] == key[1]
        }
        before = set(self.stored)
        self.tree.drop_untrusted(tokens, salt)
        self._prune()
        assert set(self.stored) == before - on_its_way

    @precondition(lambda self: self.stored)
    @rule()
    def clear(self) -> None:
        self.cleared += len(self.stored)
        self.tree.clear()
        self._prune()
        assert not self.stored
        assert self.tree.freeable_bytes == self.tree.held_bytes == 0

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "tree"):
            return
        check_tree(self.tree)
        assert len(self.tree) == len(self.stored)
        kept = list(self.stored.values())
        assert self.tree.held_bytes == self.cache.held_bytes(kept) <= self.tree.cap_bytes
        assert self.tree.freeable_bytes == self.cache.freed_bytes(kept) <= self.tree.held_bytes
        counts = self.tree.counts
        assert counts.queries == len(self.queries)
        assert counts.prompt_tokens == sum(tokens for tokens, _ in self.queries)
        assert counts.hit_tokens == sum(hit for _, hit in self.queries)
        dropped = counts.evicted + counts.lowered + counts.untrusted
        assert counts.stored - len(self.stored) - dropped == self.cleared


TestPrompts = Prompts.TestCase
TestPrompts.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def tree(cap: int = 1000, every: int = 0) -> tuple[PrefixTree, FakeCache]:
    cache = FakeCache()
    return PrefixTree(cache, CHUNK, every, cap), cache


def test_the_third_prompt_hits_at_the_end_of_a_shared_beginning() -> None:
    prefixes, _ = tree(every=100)
    shared = tuple(range(10))
    hits = []
    for user in range(3):
        prompt = (*shared, *[50 + user] * 9)
        hit = prefixes.match(prompt)
        hits.append(hit.tokens)
        for end in sorted(prefixes.boundaries(prompt)):
            if end > hit.tokens:
                prefixes.insert(prompt[:end], "", prompt[:end])

    assert hits == [0, 0, 8]


def test_a_prompt_never_hits_completely() -> None:
    prefixes, _ = tree()
    prefixes.insert((1, 2, 3, 4), "", (1, 2, 3, 4))

    assert prefixes.match((1, 2, 3, 4)).tokens == 0
    assert prefixes.match((1, 2, 3, 4, 5)).tokens == 4
    assert prefixes.match((1, 2, 3, 4, 5), "other").tokens == 0


def test_the_distance_of_checkpoints_is_rounded_up_to_chunks() -> None:
    prefixes, _ = tree(every=5)

    assert prefixes.boundaries(tuple(range(30))) == {8, 16, 24, 28}


def test_used_checkpoints_are_evicted_after_unused_ones() -> None:
    prefixes, _ = tree()
    old, new = (1, 1, 1, 1), (2, 2, 2, 2)
    for prompt in (old, new):
        prefixes.insert(prompt, "", prompt)
    for _ in range(3):
        prefixes.match((*old, 0))
    prefixes.evict(1)

    assert [prefixes.match((*prompt, 0)).tokens for prompt in (old, new)] == [4, 0]


def test_checkpoints_that_save_more_per_byte_are_evicted_later() -> None:
    """A checkpoint whose pages rows hold frees only a tail, so its value per byte is higher."""
    prefixes, cache = tree()
    held, alone = (1, 1, 1, 1), (2, 2, 2, 2)
    for prompt, pages in ((held, (1, 2, 3, 4)), (alone, (5, 6, 7, 8))):
        prefixes.insert(prompt, "", pages)
    cache.holds.update((1, 2, 3, 4))  # a running row holds these pages
    freed = prefixes.evict(1)

    assert freed == TAIL + 4
    assert prefixes.match((*held, 0)).tokens == 4


def hit_tokens(sample: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the tokens that hits save while users come, continue conversations, and leave.

    There is room for about 150 checkpoints, of which an eviction compares ``sample``.
    """
    monkeypatch.setattr("kvd.worker.prefix.tree.SAMPLE", sample)
    rng, prefixes = random.Random(1), tree(cap=2400)[0]
    prompts = [(user,) * CHUNK for user in range(120)]
    for time in range(900):
        user = (time // 12 + min(rng.randrange(24), rng.randrange(24))) % 120
        if len(prompts[user]) > 40 * CHUNK:
            prompts[user] = (user,) * CHUNK
        prompts[user] += tuple(rng.randrange(9) for _ in range(CHUNK * rng.randrange(1, 5)))
        prompt = prompts[user]
        prefixes.match(prompt)
        prefixes.insert(prompt, "", tuple(range(1000 * user, 1000 * user + len(prompt))))
    return prefixes.counts.hit_tokens


def test_a_sample_keeps_nearly_what_comparing_all_checkpoints_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert hit_tokens(16, monkeypatch) > 0.97 * hit_tokens(1 << 30, monkeypatch) > 0


def test_an_eviction_counts_the_pages_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes, cache = tree(cap=1 << 20)
    for number in range(3 * SAMPLE):
        prefixes.insert((number,) * CHUNK, "", tuple(range(CHUNK * number, CHUNK * (number + 1))))
    counted = []

    def freed_bytes(snapshots: list[Kept]) -> int:
        counted.extend(snapshots)
        return FakeCache.freed_bytes(cache, snapshots)

    monkeypatch.setattr(cache, "freed_bytes", freed_bytes)
    prefixes.evict(1)

    assert len(counted) == SAMPLE
    assert len(prefixes) == 3 * SAMPLE - 1


@pytest.mark.parametrize("tokens", [(), (1, 2, 3)])
def test_only_whole_chunks_are_stored(tokens: tuple[int, ...]) -> None:
    prefixes, _ = tree()
    with pytest.raises(ValueError, match="chunk"):
        prefixes.insert(tokens, "", (1,))


def test_invalid_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        PrefixTree(FakeCache(), 0, 0, 0)


def test_the_names_of_checkpoints_are_those_of_their_paths_and_hashed_once() -> None:
    prefixes, _ = tree()
    prompts = [((*range(8), *[20 + n] * 8), salt) for n in range(3) for salt in ("", "a")]
    for tokens, salt in prompts:
        prefixes.insert(tokens, salt, tokens)
        prefixes.trust(tokens, salt)
    wanted = {path_of((*tokens, 0), salt, CHUNK) for tokens, salt in prompts}
    found = [one.names for one in prefixes.checkpoints()]
    assert set(found) == wanted
    again = [one.names for one in prefixes.checkpoints()]
    assert all(
        name is before
        for names, earlier in zip(again, found, strict=True)
        for name, before in zip(names, earlier, strict=True)
    )
