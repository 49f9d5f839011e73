"""The index of the prefix store, and the order of evictions, against plain models."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.machines.eviction_order import GROUPS_PER_OCTAVE, Candidate, EvictionOrder
from actors.machines.segment_index import JUST_USED_S, Segment, SegmentIndex
from tests.sim.segment_disk import key

SPACES = (b"a" * 16, b"b" * 16)


def segment(number: int, base: int | None, *, tokens: int, nbytes: int, used: float) -> Segment:
    return Segment(
        key=key(number),
        space=SPACES[number % 2],
        base=None if base is None else key(base),
        tokens=tokens,
        nbytes=nbytes,
        created=0.0,
        used=used,
    )


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 1000), st.integers(0, 10**5))),
    st.data(),
)
def test_the_least_valuable_segment_is_found_up_to_the_width_of_a_group(triples, data):
    found = {
        key(number): Candidate(saved / nbytes, float(used))
        for number, (nbytes, saved, used) in enumerate(triples)
    }
    order = EvictionOrder(found.get)
    for name in found:
        order.add(name)
    now = 2e5
    while found:
        for name in data.draw(st.lists(st.sampled_from(sorted(found)), max_size=3, unique=True)):
            if data.draw(st.booleans()):
                found[name] = found[name]._replace(used=now)
            elif len(found) > 1:
                found.pop(name, None)
            now += 10
        values = {name: it.worth / (1 + now - it.used) for name, it in found.items()}
        chosen = order.pop(now, 0.0)
        assert chosen is not None
        least = min(values.values())
        assert values[chosen] <= least * 2 ** (1 / GROUPS_PER_OCTAVE) * 1.0001
        del found[chosen]
    assert order.pop(now, 0.0) is None


@given(st.data())
def test_evictions_take_whole_subtrees_from_the_leaves_and_can_be_undone(data):
    index, now = SegmentIndex(), 1000.0
    for number in range(data.draw(st.integers(1, 20))):
        bases = [it for it in range(number % 2, number, 2) if key(it) in index]
        base = data.draw(st.none() | st.sampled_from(bases)) if bases else None
        tokens = data.draw(st.integers(1, 5000))
        one = segment(number, base, tokens=tokens, nbytes=data.draw(st.integers(1, 99)), used=now)
        if index.accepts(one.space, one.info):
            index.add(one)
        now += data.draw(st.integers(0, 20))
        if data.draw(st.booleans()):
            index.hit(data.draw(st.sampled_from(sorted(index.segments))), 1.5, now)
        index.check()
    kept = set(data.draw(st.lists(st.sampled_from(sorted(index.segments)), max_size=2)))
    before = {name: (it.used, it.hits) for name, it in index.segments.items()}
    wanted = data.draw(st.integers(0, index.nbytes + 1))
    evicted = index.evict(wanted, now, kept)
    index.check()
    names = {it.key for it in evicted}
    for name in kept:
        assert not names & {it.key for it in index.path(name)}, "a kept segment lost its base"
    assert all(now - it.used >= JUST_USED_S for it in evicted)
    if sum(it.nbytes for it in evicted) < wanted:
        left = [it for it in index.segments.values() if now - it.used >= JUST_USED_S]
        needed = {it.key for name in kept for it in index.path(name)}
        young = [it for it in index.segments.values() if now - it.used < JUST_USED_S]
        needed |= {it.key for one in young for it in index.path(one.key)}
        assert all(it.key in needed for it in left), "one could have been evicted"
    index.restore(evicted)
    index.check()
    assert {name: (it.used, it.hits) for name, it in index.segments.items()} == before
    everything = index.evict(index.nbytes, now + 100)
    assert len(everything) == len(before)
    assert len(index) == index.nbytes == 0
