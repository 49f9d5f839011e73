"""A worker's copy of the index: the longest stored beginning of a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.worker.prefix.queued_paths import names_of, path_of
from kvd.worker.prefix.segment_index import (
    MIN_PART,
    MIN_SECONDS,
    MIN_TOKENS,
    Checkpoint,
    SegmentIndex,
)
from protocol.segments import SegmentInfo

C = 4
NAMES = path_of(range(6 * C), "", C)
"""The path of a prompt of five whole chunks."""


@pytest.mark.parametrize("chunks", range(1, 6))
@pytest.mark.parametrize("held", range(6))
def test_a_segment_is_found_if_it_is_longer_than_what_is_held(chunks: int, held: int) -> None:
    index = SegmentIndex(bytes(16), C)
    segment = SegmentInfo(key=index.key(NAMES[chunks - 1]), tokens=C * chunks, nbytes=1)
    index.change([segment], [])
    assert index.find(NAMES, above=C * held) == ([segment] if chunks > held else [])


Prompt = tuple[int, ...]
"""A prompt of whole chunks: one number stands for each."""
CHUNK = 256
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


def names(prompt: Prompt) -> tuple[bytes, ...]:
    return names_of("", [bytes([one]) for one in prompt])


@dataclass
class Model:
    """Stored prefixes as a dictionary from prompts to the prompts of their bases."""

    index: SegmentIndex = field(default_factory=lambda: SegmentIndex(bytes(16), CHUNK))
    bases: dict[Prompt, Prompt | None] = field(default_factory=dict)

    def info(self, prompt: Prompt) -> SegmentInfo:
        base = self.bases[prompt]
        return SegmentInfo(
            key=self.key(prompt),
            base=None if base is None else self.key(base),
            tokens=CHUNK * len(prompt),
            nbytes=1,
        )

    def key(self, prompt: Prompt) -> bytes:
        return self.index.key(names(prompt)[-1])

    def chain(self, prompt: Prompt | None) -> list[Prompt]:
        """Return a prompt and its bases; empty if one is missing, or is its own base."""
        found: list[Prompt] = []
        while prompt is not None:
            if prompt not in self.bases or prompt in found:
                return []
            found.append(prompt)
            prompt = self.bases[prompt]
        return found

    def find(self, prompt: Prompt, above: int) -> list[SegmentInfo]:
        for end in range(len(prompt), above, -1):
            if chain := self.chain(prompt[:end]):
                return [self.info(one) for one in chain]
        return []


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Draw an index with segments added, replaced and removed; bases may be missing or circular."""
    model = Model()
    for prompt, base, stays in draw(
        st.lists(st.tuples(PROMPTS, st.none() | PROMPTS, st.booleans()), max_size=12)
    ):
        if stays:
            model.bases[prompt] = base
            model.index.change([model.info(prompt)], [])
        elif model.bases.pop(prompt, 0) != 0:
            model.index.change([], [model.key(prompt)])
    return model


@given(models(), PROMPTS, st.integers(0, 5))
def test_the_longest_complete_chain_is_found(model: Model, prompt: Prompt, above: int) -> None:
    assert len(model.index) == len(model.bases)
    assert model.index.find(names(prompt), CHUNK * above) == model.find(prompt, above)


@given(
    models(),
    st.dictionaries(PROMPTS, st.integers(0, 2), max_size=8),
    st.sampled_from([1.0, 1000.0, 4000.0]),
)
def test_what_is_written_is_worth_it_and_has_a_complete_base(
    model: Model, hits: dict[Prompt, int], rate: float
) -> None:
    """``hits``: those of each checkpoint in memory. ``rate``: tokens prefilled per second."""
    longer = {one: [two for two in hits if two != one and two[: len(one)] == one] for one in hits}
    checkpoints = [
        Checkpoint(
            names(one), CHUNK * len(one), hits[one], [names(x)[-1] for x in longer[one]], one
        )
        for one in hits
    ]
    found = {
        checkpoint.snapshot: base for checkpoint, base in model.index.to_write(checkpoints, rate)
    }
    scores = []
    for prompt, count in hits.items():
        extended = [two for two in longer[prompt] if model.chain(two)]
        base = next(iter(model.find(prompt, 0)), None)
        shared = 0 if base is None or extended else base.tokens
        tokens = CHUNK * len(prompt)
        worth = (
            prompt not in model.bases
            and (count > 0 or not longer[prompt])
            and tokens - shared >= max(MIN_TOKENS, tokens // MIN_PART)
            and tokens >= MIN_SECONDS * rate
        )
        assert (prompt in found) == worth
        if worth and extended:
            assert found[prompt] in [model.info(two) for two in extended]
        elif worth:
            assert found[prompt] == base
    for prompt, base in found.items():
        shared = 0 if base is None or base.tokens >= CHUNK * len(prompt) else base.tokens
        scores.append((CHUNK * len(prompt) - shared) * (1 + hits[prompt]))
    assert scores == sorted(scores, reverse=True)


def test_a_search_computes_keys_only_where_a_segment_may_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It runs between two decode steps. 64 checkpoints of 32K tokens have 8192 names."""
    index = SegmentIndex(bytes(16), C)
    checkpoints = [
        Checkpoint(path_of(range(seed, seed + 129 * C), "", C), 512 * C, 1, [], None)
        for seed in range(64)
    ]
    other = SegmentInfo(key=bytes(16), tokens=60 * C, nbytes=1)
    gone = SegmentInfo(key=bytes([1] * 16), tokens=61 * C, nbytes=1)
    index.change([other, gone], [])
    index.change([], [gone.key])
    keys, plain = [], index.key
    monkeypatch.setattr(index, "key", lambda name: keys.append(name) or plain(name))
    assert len(list(index.to_write(checkpoints, 1.0))) == 64
    assert len(keys) == 2 * 64


def test_keys_differ_by_space_secret_and_prompt() -> None:
    spaces = [
        SegmentIndex(bytes([one]) * 16, C, secret) for one in (0, 1) for secret in (b"", b"s")
    ]
    keys = {index.key(name) for index in spaces for name in NAMES}
    assert len(keys) == len(spaces) * len(NAMES)
