"""The prefill order: long and short prompts, equal prompts, groups, and the bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.worker.cache.scheme import full_pages
from kvd.worker.scheduling.prefill_order import PrefillOrder
from kvd.worker.scheduling.request import Chunk, QueueKey
from tests.worker.scheduling.helpers import request_of

C = 256


def request(rid, prefill, number=0, priority=0, start=0):
    """Return a request with this many tokens to prefill."""
    return request_of(rid, prefill + 1, number, priority, prefilled=start)


def requests_of(*sizes):
    return [request(chr(97 + number), size, number) for number, size in enumerate(sizes)]


def run(prefill_order, requests, groups=None):
    """Run ``groups`` passes, or all; return the (rid, tokens) pairs of each."""
    ran = []
    while groups is None or len(ran) < groups:
        group = prefill_order.choose([one for one in requests if one.remaining])
        if not group:
            break
        for chunk in group:
            one = next(one for one in requests if one.rid == chunk.rid)
            assert chunk.start == one.prefilled
            one.prefilled = chunk.end
        prefill_order.pass_done()
        ran.append([(chunk.rid, chunk.length) for chunk in group])
    return ran


def leads(ran):
    return "".join(group[0][0] for group in ran)


def order_of(**changes):
    return PrefillOrder(**({"chunk": C, "budget": C, "group": False} | changes))


def test_without_requests_nothing_is_chosen():
    assert order_of().choose([]) == ()


def test_chunks_end_on_the_absolute_grid_and_at_the_prompts_end():
    prefill_order = order_of()
    assert run(prefill_order, [request("a", 600)]) == [[("a", 256)], [("a", 256)], [("a", 88)]]
    assert prefill_order.choose([request("a", 600, start=512)]) == (Chunk("a", 512, 600),)


def test_a_pass_may_have_more_tokens_while_no_rows_decode():
    order = order_of(budget=4 * C + 8, decode_budget=2 * C + 8, group=True)
    prompts = [request("a", 8 * C)]
    passes = {rows: order.choose(prompts, rows) for rows in (0, 1, 8)}
    assert {rows: len(chunks) for rows, chunks in passes.items()} == {0: 4, 1: 2, 8: 2}


def test_the_same_chunk_is_chosen_until_it_ran():
    prefill_order, requests = order_of(), requests_of(600, 100)
    assert prefill_order.choose(requests) == prefill_order.choose(requests) == (Chunk("a", 0, 256),)


def test_equal_prompts_run_one_after_the_other():
    """32 requests of 1550 tokens: the second starts when the first one's prefix is cached."""
    requests = [request(f"{number:02}", 1549, number) for number in range(32)]
    ran = [group[0][0] for group in run(order_of(), requests)]
    assert ran == sorted(ran)
    assert len(ran) == 32 * 7


def test_nearly_equal_prompts_run_one_after_the_other():
    assert leads(run(order_of(), requests_of(1600, 1500, 1400))) == "a" * 7 + "b" * 6 + "c" * 6


def test_a_long_prompt_alternates_with_short_ones():
    """The example in the docstring of `prefill_order`."""
    assert leads(run(order_of(), requests_of(8 * C, 2 * C, 2 * C))) == "ababacacaaaa"


def test_the_shortest_leads_express_passes_and_ties_are_in_queue_order():
    assert leads(run(order_of(), requests_of(8 * C, 2 * C, C, C))) == "acadababaaaa"


def test_express_leads_have_at_least_the_priority_of_the_first():
    requests = [request("low", 300, 0), request("high", 8 * C, 1, priority=1)]
    assert [group[0][0] for group in run(order_of(), requests, 3)] == ["high"] * 3
    requests = [
        request("low", 8 * C, 0),
        request("high", 2 * C, 1, priority=1),
        request("alike", C, 2),
    ]
    requests[1].queue_key = QueueKey(5, 1)  # so late that "low" is ahead of it
    assert [group[0][0] for group in run(order_of(), requests, 6)] == [
        *("low", "high", "low", "high", "low", "alike")
    ]


def test_short_prompts_are_grouped_within_the_budget():
    requests = requests_of(60, 64, 50, 60, 64)
    ran = run(order_of(group=True), requests)
    assert ran == [[("a", 60), ("b", 64), ("c", 50), ("d", 60)], [("e", 64)]]


def test_without_groups_one_request_runs_at_a_time():
    assert leads(run(order_of(), requests_of(60, 64, 50))) == "abc"


def test_a_chunk_that_does_not_fit_leaves_its_room_to_smaller_ones():
    requests = requests_of(64, 10, 600, 60, 70)
    ran = run(order_of(group=True), requests, 1)
    assert ran == [[("a", 64), ("b", 10), ("d", 60), ("e", 70)]]


def test_an_express_pass_serves_all_short_prompts_before_the_long_one():
    requests = requests_of(8 * C, 300, 2 * C, 10)
    ran = run(order_of(budget=3 * C, group=True), requests, 2)
    assert ran[0] == [("a", C)] * 3
    assert ran[1] == [("d", 10), ("b", C), ("b", 44), ("c", C)]


def test_a_pass_ends_where_a_request_must_end_it():
    asked = []

    def must_end(rid, end, next_end, *, goes_on):
        if goes_on:
            asked.append((rid, end, next_end))
        return rid == "a" and end == 2 * C

    chosen = order_of(budget=8 * C, group=True).choose(requests_of(1000, 300), 0, must_end)
    assert chosen == (
        *(Chunk("a", 0, C), Chunk("a", C, 2 * C)),
        *(Chunk("b", 0, C), Chunk("b", C, 300)),
    )
    # At the end of b's prompt, no chunk follows.
    assert asked == [("a", C, 2 * C), ("a", 2 * C, 3 * C), ("b", C, 300)]


def may_end(_rid, _end, _next_end, *, goes_on):
    """Let each chunk leave a checkpoint: tails are kept if the pass goes on."""
    return not goes_on


def test_a_pass_ends_at_checkpoints_if_it_then_has_more_tokens():
    prefill_order = order_of(budget=4 * C, group=True)
    equal = requests_of(*[C + 150] * 6)
    assert prefill_order.choose(equal, 0, may_end) == tuple(
        Chunk(rid, 0, C) for rid in ("a", "b", "c", "d")
    )
    alone = requests_of(9 * C)
    ends = [(chunk.start, chunk.end) for chunk in prefill_order.choose(alone, 0, may_end)]
    assert ends == [(at, at + C) for at in range(0, 4 * C, C)]
    # Both have as many tokens: long prompts run one after the other.
    long = requests_of(6 * C, 6 * C, 6 * C, 6 * C)
    assert {chunk.rid for chunk in prefill_order.choose(long, 0, may_end)} == {"a"}


@given(
    sizes=st.lists(st.integers(1, 9 * C), min_size=1, max_size=8),
    budget=st.integers(1, 9).map(lambda chunks: chunks * C + 8),
)
def test_no_pass_is_smaller_than_one_that_ends_at_checkpoints(sizes, budget):
    def ends(_rid, _end, _next_end, *, goes_on):
        del goes_on
        return True

    requests, prefill_order = requests_of(*sizes), order_of(budget=budget, group=True)
    tokens = [
        sum(chunk.length for chunk in prefill_order.choose(requests, 0, rule))
        for rule in (may_end, ends, lambda *_, **__: False)
    ]
    assert tokens[0] == max(tokens[1:])


def test_a_request_joins_a_group_with_its_last_chunk():
    requests = [request("a", 60), request("b", 1080, 1, start=1024), request("c", 300, 2)]
    assert run(order_of(group=True), requests, 1) == [[("a", 60), ("b", 56)]]


def test_dense_tails_count_toward_a_group():
    """Each request has 64 dense tokens before 8 new ones. Five of them have 360, six have 432, and
    383 are allowed: a chunk of 256 with a tail of 127."""
    requests = [request(chr(97 + number), 1032, number, start=1024) for number in range(8)]
    assert [len(group) for group in run(order_of(group=True), requests)] == [5, 3]


def test_decoding_takes_its_tokens_from_the_budget_first():
    requests = requests_of(*[64] * 5)
    assert [
        len(order_of(group=True).choose(requests, decoding)) for decoding in (0, 1, 64, 65)
    ] == [*(4, 3, 3, 2)]
    assert order_of(group=True).choose(requests_of(600), 200) == (Chunk("a", 0, 256),)


def test_a_larger_budget_makes_larger_passes_but_no_larger_chunks():
    prefill_order = order_of(budget=4 * C, group=True)
    assert run(prefill_order, requests_of(2000, 10), 1) == [[("a", C)] * 4]
    assert run(order_of(budget=4 * C, group=True), requests_of(*[250] * 6), 1) == [
        [(rid, 250) for rid in "abcd"]
    ]


sizes = st.lists(st.integers(1, 3000), min_size=1, max_size=12)


@given(
    sizes=sizes,
    group=st.booleans(),
    budget=st.integers(C, 4 * C),
    decoding=st.integers(0, 100),
)
def test_every_pass_respects_budget_and_grid(sizes, group, budget, decoding):
    requests = requests_of(*sizes)
    prefill_order = order_of(budget=budget + decoding, group=group)
    for _ in range(sum(-(-size // C) for size in sizes)):
        chunks = prefill_order.choose([one for one in requests if one.remaining], decoding)
        if not chunks:
            break
        real = sum(chunk.length for chunk in chunks)
        assert len(chunks) == 1 or (group and real <= budget)
        starts = {chunk.rid: chunk.start for chunk in reversed(chunks)}.values()
        assert sum(start - 64 * full_pages(start) for start in starts) + real <= budget + 127
        for chunk in chunks:
            one = next(one for one in requests if one.rid == chunk.rid)
            assert chunk.start == one.prefilled
            assert chunk.end == min((chunk.start // C + 1) * C, one.prefill_end)
            one.prefilled = chunk.end
        prefill_order.pass_done()
    assert not any(one.remaining for one in requests)


@given(
    crowd=st.lists(
        st.tuples(st.integers(1, 3000), st.integers(0, 2), st.integers(0, 30)),
        min_size=1,
        max_size=12,
    ),
    express=st.booleans(),
    group=st.booleans(),
    decoding=st.integers(0, 40),
)
def test_a_prompt_is_prefilled_after_twice_the_chunks_ahead_of_it(crowd, express, group, decoding):
    """Requests of any size and key arrive at any time. `prefill_order` states the bound."""
    prefill_order = order_of(group=group, budget=C + 40)
    if express:
        prefill_order.pass_done()
    coming = [
        (when, request(f"{number:02}", size, number, priority))
        for number, (size, priority, when) in enumerate(crowd)
    ]
    here, groups_of = [], {}
    allowed = {
        one.rid: 2
        * sum(-(-other.remaining // C) for _, other in coming if other.queue_key <= one.queue_key)
        for _, one in coming
    }
    for step in range(1000):
        here += [one for when, one in coming if when == step]
        requests = [one for one in here if one.remaining]
        if not requests:
            if step > 30:
                break
            continue
        for one in requests:
            groups_of[one.rid] = groups_of.get(one.rid, 0) + 1
        for chunk in prefill_order.choose(requests, decoding):
            next(one for one in requests if one.rid == chunk.rid).prefilled = chunk.end
        prefill_order.pass_done()
    assert set(groups_of) == {one.rid for _, one in coming}
    for rid, groups in groups_of.items():
        assert groups <= allowed[rid]


@given(
    long=st.integers(1, 20_000),
    short=st.integers(1, 5000),
    express=st.booleans(),
    tokens=st.sampled_from([C, 4 * C, 16 * C]),
)
def test_a_short_prompt_waits_for_a_bounded_part_of_a_long_one(long, short, express, tokens):
    prefill_order = order_of(budget=tokens, group=tokens > C)
    requests = requests_of(long, short)
    if express:
        prefill_order.pass_done()
    while requests[1].remaining:
        run(prefill_order, requests, 1)
    if long > short:
        assert requests[0].prefilled < 2 * short + 2 * tokens


@pytest.mark.parametrize("streams", [1, 5])
def test_a_stream_of_short_prompts_leads_at_most_half_of_the_passes(streams):
    prefill_order, requests = order_of(), requests_of(20 * C)
    count = 1
    for _ in range(40):
        while sum(one.remaining > 0 for one in requests) < 1 + streams:
            requests.append(request(f"s{count}", 20, count))
            count += 1
        run(prefill_order, requests, 1)
    assert requests[0].remaining == 0
