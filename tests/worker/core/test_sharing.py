"""A shared beginning of prompts is prefilled once, hits are counted, and no output changes."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from protocol.kv import KVSpec
from protocol.types import Sampling
from tests.worker import shallow
from tests.worker.core.driver import GIB, Driver, Outcome
from tests.worker.core.prompts import prompt_of
from tests.worker.prefix.invariants import check_prefix_cache, check_tree

pytestmark = pytest.mark.mlx
CHUNK = 64
WARM = Sampling(temperature=0.9, seed=3)


SHARED = prompt_of(375, 0)
"""Tokens of almost six chunks, as are 1500 tokens with the default chunk of 256."""


@functools.cache
def engine() -> Driver:
    return Driver(shallow.path(), kv=KVSpec(prefix_every=256), prefill_chunk=CHUNK)


@functools.cache
def uncached() -> Driver:
    return Driver(shallow.path(), kv=KVSpec(prefix_cache=0), prefill_chunk=CHUNK)


@pytest.fixture
def driver() -> Driver:
    driver = engine()
    driver.outcomes.clear()
    driver.engine._prefix_cache.tree.clear()
    # Passes alternate between the first request and short ones, and earlier tests had some.
    driver.engine._scheduler._prefill_order._express = False
    return driver


@pytest.fixture
def slow(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A driver whose passes have one chunk."""
    monkeypatch.setattr(driver.engine._scheduler._prefill_order, "_budget", CHUNK)
    return driver


def computed(driver: Driver) -> int:
    return driver.engine.stats().computed_tokens


def assert_prefilled_once(
    driver: Driver, asked: dict[str, list[int]], before: int, expected: int
) -> None:
    """Assert that ``expected`` tokens were prefilled, and all others were reported as hits."""
    prefilled = computed(driver) - before
    assert prefilled == expected
    cached = sum(driver.outcomes[rid].cached for rid in asked)
    assert prefilled + cached == sum(len(prompt) - 1 for prompt in asked.values())


@pytest.mark.parametrize("at_once", [8, 32])
@pytest.mark.parametrize("others", [0, 1])
def test_32_requests_prefill_their_shared_beginning_once(
    driver: Driver, at_once: int, others: int
) -> None:
    asked = {f"long {number}": prompt_of(1500, 90 + number) for number in range(others)}
    rng = random.Random(1)
    for number in range(32):
        asked[f"{number}"] = SHARED + prompt_of(rng.randint(8, 12), 100 + number)
    common = len(SHARED) // CHUNK * CHUNK
    before, waiting = computed(driver), list(asked)
    while waiting or not all(one.over for one in driver.outcomes.values()):
        while waiting and sum(not one.over for one in driver.outcomes.values()) < at_once:
            rid = waiting.pop(0)
            driver.submit(rid, asked[rid], max_tokens=2, ignore_eos=True)
        driver.step()

    own = sum(len(prompt) - 1 for prompt in asked.values()) - 32 * common
    assert_prefilled_once(driver, asked, before, common + own)


def test_each_request_has_memory_for_one_checkpoint(driver: Driver) -> None:
    """No memory is left for further checkpoints. At worst the first request leaves its only one at
    256 tokens, and the second request leaves one at 320, where all prompts diverge."""
    asked = {f"{number}": SHARED + prompt_of(5, 100 + number) for number in range(8)}
    before = computed(driver)
    for rid, prompt in asked.items():
        driver.submit(rid, prompt, max_tokens=2, ignore_eos=True)
    driver.run(until=lambda: driver.engine._scheduler.reserved_rows == 8)
    driver.budget, budget = driver.total, driver.budget
    driver.run()
    driver.budget = budget

    assert computed(driver) - before <= 320 + 64 + 8 * 59


def test_a_short_prompt_waits_for_a_long_one_that_prefills_its_beginning(slow: Driver) -> None:
    driver = slow
    asked = {"long": prompt_of(1500, 1), "short": prompt_of(1500, 1)[:250] + prompt_of(50, 2)}
    before = computed(driver)
    driver.submit("long", asked["long"], max_tokens=2)
    # Without a shared beginning, the short prompt would lead the next pass, an express pass.
    driver.run(until=lambda: computed(driver) - before == CHUNK)
    driver.submit("short", asked["short"], max_tokens=2)
    driver.run(until=lambda: driver.outcomes["short"].over)
    assert not driver.outcomes["long"].over
    driver.run()

    assert_prefilled_once(driver, asked, before, 1499 + 299 - 192)


def test_a_request_that_arrives_during_prefill_shares_the_beginning(driver: Driver) -> None:
    asked = {"first": SHARED + prompt_of(40, 3), "second": SHARED + prompt_of(40, 4)}
    before = computed(driver)
    driver.submit("first", asked["first"], max_tokens=2)
    driver.run(until=lambda: computed(driver) - before == 4 * CHUNK)
    driver.submit("second", asked["second"], max_tokens=2)
    driver.run()

    assert driver.outcomes["second"].cached == 320
    assert_prefilled_once(driver, asked, before, 2 * 414 - 320)


def test_if_the_first_request_is_cancelled_the_next_one_prefills(slow: Driver) -> None:
    driver = slow
    asked = {f"{number}": SHARED + prompt_of(40, 10 + number) for number in range(4)}
    wanted = {rid: uncached().alone(prompt, WARM, max_tokens=4) for rid, prompt in asked.items()}
    before = computed(driver)
    for rid, prompt in asked.items():
        driver.submit(rid, prompt, WARM, max_tokens=4)
    driver.run(until=lambda: computed(driver) - before == 3 * CHUNK)
    driver.engine.cancel("0")
    driver.run()

    assert driver.outcomes.pop("0").reason == "cancelled"
    assert driver.outcomes == {rid: wanted[rid] for rid in driver.outcomes}
    own = sum(414 - 320 for _ in driver.outcomes)
    assert computed(driver) - before == 3 * CHUNK + 320 + own


def test_scored_prompts_do_not_wait_and_leave_checkpoints(driver: Driver) -> None:
    prompt = SHARED + prompt_of(40, 5)
    before = computed(driver)
    for rid in ("scored", "scored too"):
        driver.submit(rid, prompt, max_tokens=2, prompt_logprobs=0)
    driver.submit("plain", SHARED + prompt_of(40, 6), max_tokens=2)
    driver.run()

    assert [driver.outcomes[rid].cached for rid in ("scored", "scored too", "plain")] == [0, 0, 256]
    assert computed(driver) - before == 3 * 414 - 256


def test_hits_are_counted(driver: Driver) -> None:
    before = driver.engine.stats().prefix
    for seed in (7, 8):
        driver.alone(SHARED + prompt_of(40, seed), max_tokens=2)
    after = driver.engine.stats().prefix

    assert after.queries - before.queries == 2
    assert after.query_tokens - before.query_tokens == 2 * 415
    assert after.hit_tokens - before.hit_tokens == 256  # the first prompt's, at `prefix_every`
    assert after.checkpoints == 4  # the first prompt's at 256 and 384, the second's at 320 and 384
    assert 0 < after.held <= 256 << 20
    driver.engine._prefix_cache.evict(1)
    assert driver.engine.stats().prefix.evicted > after.evicted


def test_choices_of_one_request_reserve_its_prompt_once(driver: Driver) -> None:
    """The driver checks after each step that the choices stay within the grant."""
    first, further = driver.engine._scheduler.sizes.of(1500, 40, 0)
    assert 7 * further < first
    found = driver.alone(prompt_of(1500, 9), WARM, max_tokens=40, n=8, ignore_eos=True)
    alone = uncached().alone(prompt_of(1500, 9), WARM, max_tokens=40, ignore_eos=True)

    assert found.tokens == alone.tokens
    assert len(found.others) == 7


# Whatever happens, the output is that of an engine without a prefix cache.

TRUNK = prompt_of(300, 20)
PROMPTS = [
    TRUNK[:cut] + prompt_of(own, 30 + number)
    for number, (cut, own) in enumerate(
        [(300, 20), (300, 1), (300, 90), (200, 30), (129, 1), (64, 65), (64, 1), (0, 150), (0, 1)]
    )
]


ASKED = {"max_tokens": 12, "ignore_eos": True, "logprobs": 2}


@functools.cache
def wanted(prompt: int, n: int) -> Outcome:
    return uncached().alone(PROMPTS[prompt], WARM, n=n, **ASKED)


class Batches(RuleBasedStateMachine):
    """Requests with a shared beginning are cancelled or preempted, and checkpoints are evicted."""

    @initialize(tight=st.booleans())
    def start(self, tight: bool) -> None:
        self.driver = driver = engine()
        driver.outcomes.clear()
        driver.engine._prefix_cache.tree.clear()
        self.asked: dict[str, tuple[int, int]] = {}
        self.cancelled: set[str] = set()
        self.preempted: list[str] = []
        # With a tight budget, checkpoints are evicted when rows need memory, or are not made.
        driver.budget = driver.total + (4 << 20 if tight else 1 << 30)

    @rule(prompt=st.integers(0, len(PROMPTS) - 1), n=st.sampled_from([1, 1, 2]))
    def submit(self, prompt: int, n: int) -> None:
        rid = f"r{len(self.asked)}"
        self.asked[rid] = prompt, n
        self.driver.submit(
            rid, PROMPTS[prompt], WARM, max_tokens=12, n=n, ignore_eos=True, logprobs=2
        )

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.step()
            check_tree(self.driver.engine._prefix_cache.tree)

    def _any_of(self, data: Any, rids: list[str]) -> str | None:
        return data.draw(st.sampled_from(rids)) if rids else None

    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        if rid := self._any_of(data, list(self.driver.engine._batch.requests)):
            self.cancelled.add(rid)
            self.driver.engine.cancel(rid)

    @rule(data=st.data())
    def preempt(self, data: Any) -> None:
        if rid := self._any_of(data, self.driver.engine._scheduler.victims()):
            self.driver.preempt(rid)
            self.preempted.append(rid)

    @precondition(lambda self: self.preempted)
    @rule()
    def requeue(self) -> None:
        rid = self.preempted.pop(0)
        if rid in self.driver.engine._batch.requests:
            self.driver.requeue(rid)

    @rule(wanted=st.sampled_from([1, 1 << 20, 1 << 30]))
    def evict(self, wanted: int) -> None:
        self.driver.engine._prefix_cache.evict(wanted)

    def _grant_what_was_denied(self) -> None:
        """Raise the budget: snapshots of preempted rows may hold what the queue waits for."""
        budget = self.driver.engine._admission.budget
        self.driver.budget = 8 * GIB
        if budget.remembered:
            self.driver.engine.granted(
                self.driver.answer(budget.seq, budget.denied_bytes, "denied before")
            )

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        while self.preempted:
            self.requeue()
        self._grant_what_was_denied()
        self.driver.run()
        for rid, asked in self.asked.items():
            outcome, right = self.driver.outcomes[rid], wanted(*asked)
            if rid in self.cancelled:
                assert outcome.tokens == right.tokens[: len(outcome.tokens)]
            else:
                assert outcome == right
        engine = self.driver.engine
        assert not engine._runner.cache.sequences
        check_prefix_cache(engine._prefix_cache, [])


TestBatches = Batches.TestCase
TestBatches.settings = settings(
    max_examples=12,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
