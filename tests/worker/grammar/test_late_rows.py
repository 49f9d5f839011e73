"""Rows whose masks take long: other rows do not wait, and no token depends on when it is drawn."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvd.worker.core import batch as batch_module
from kvd.worker.core.masks import StepMasks
from kvd.worker.core.out_of_memory import CALM_STEPS
from kvd.worker.core.request import Completion
from kvd.worker.gang.leader import LeaderRunner
from kvd.worker.grammar.mask_threads import MaskBatch
from kvd.worker.grammar.matcher import Matcher
from kvd.worker.serving.runner import Runner
from protocol.tools import Grammar
from protocol.types import Sampling
from tests.worker.core.driver import Driver
from tests.worker.core.faults import LATE, UNABLE, memory_runs_out
from tests.worker.core.prompts import prompt_of
from tests.worker.grammar.test_requests import DIGITS, PERSON, WARM, WORDS

pytestmark = pytest.mark.mlx

PENALIZED = Sampling(temperature=1.0, seed=4, frequency_penalty=0.5)
LIST = Grammar("json_schema", '{"type": "array", "items": {"type": "integer"}, "minItems": 99}')


class Gated:
    """An `LLMatcher` whose ``consume_token`` waits for a gate, for the tokens that ``stops`` names.

    ``stops(count)``: whether to wait at the token with this number, from 1 on.
    """

    def __init__(self, plain: Any, gate: threading.Event, stops: Callable[[int], bool]) -> None:
        self._plain = plain
        self._gate = gate
        self._stops = stops
        self._count = 0
        self.stopped = threading.Event()
        """Set once a token waits."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def consume_token(self, token: int) -> bool:
        self._count += 1
        if self._stops(self._count):
            self.stopped.set()
            assert self._gate.wait(60)
        return bool(self._plain.consume_token(token))


GATES: list[threading.Event] = []


@pytest.fixture(autouse=True)
def _opened(demo: Driver) -> Iterator[None]:
    """Open all gates after a test, which may have failed."""
    yield
    while GATES:
        GATES.pop().set()


def gated(
    driver: Driver, rid: str, stops: Callable[[int], bool], gate: threading.Event | None = None
) -> tuple[Gated, threading.Event]:
    """Gate the matchers of a submitted request; return the first one's grammar, and the gate."""
    gate = gate or threading.Event()
    driver.run(until=lambda: rid in driver.engine._batch.requests)
    GATES.append(gate)
    found = []
    for completion in driver.engine._batch.requests[rid].completions:
        assert completion.matcher is not None
        completion.matcher.grammar = Gated(completion.matcher.grammar, gate, stops)
        found.append(completion.matcher.grammar)
    return found[0], gate


def late_keys(driver: Driver) -> list[str]:
    return [row.completion.key[0] for row in driver.engine._batch._masks.late]


def until_late(driver: Driver, rid: str, grammar: Gated) -> None:
    """Run until a token waits for its gate; rows may be late before, on a busy machine."""
    driver.run(until=lambda: grammar.stopped.is_set() and rid in late_keys(driver))


@pytest.mark.parametrize("at", [1, 2, 7])
def test_a_slow_grammar_delays_no_other_row(demo: Driver, at: int) -> None:
    wanted = {
        "free": demo.alone(WORDS, WARM, max_tokens=60, ignore_eos=True, logprobs=1),
        "other": demo.alone(WORDS, WARM, grammar=DIGITS, max_tokens=60),
        "slow": demo.alone(WORDS, WARM, grammar=PERSON, max_tokens=200, logprobs=2),
    }
    demo.submit("slow", WORDS, WARM, grammar=PERSON, max_tokens=200, logprobs=2)
    _, gate = gated(demo, "slow", lambda count: count == at)
    demo.submit("free", WORDS, WARM, max_tokens=60, ignore_eos=True, logprobs=1)
    demo.submit("other", WORDS, WARM, grammar=DIGITS, max_tokens=60)
    demo.run(until=lambda: demo.outcomes["free"].over and demo.outcomes["other"].over)

    assert len(demo.outcomes["slow"].tokens) == at
    gate.set()
    demo.run()
    assert demo.outcomes == wanted


def test_a_step_with_a_slow_row_waits_for_it_once(demo: Driver) -> None:
    """Later steps do not: the row is in none of them."""
    waits: list[float] = []
    demo.submit("slow", WORDS, WARM, grammar=PERSON, max_tokens=200)
    demo.submit("free", WORDS, WARM, max_tokens=60, ignore_eos=True)
    grammar, gate = gated(demo, "slow", lambda count: count == 3)
    until_late(demo, "slow", grammar)
    batch = demo.engine._batch
    (held,) = batch._masks._batches  # the one with the late row
    held.wait_for = lambda _matcher, seconds=-1: waits.append(seconds)
    while not demo.outcomes["free"].over:
        demo.step()

    assert not any(waits)
    del held.wait_for
    gate.set()
    demo.run()


def test_calls_that_only_wait_for_a_late_row_measure_no_step(
    demo: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo.submit("slow", WORDS, WARM, grammar=PERSON, max_tokens=200)
    grammar, gate = gated(demo, "slow", lambda count: count == 5)
    launched, notes = 0, 0
    runner, rates = demo.engine._batch.runner, demo.engine._rates
    launch, note = runner.launch, rates.note

    def count_launch(*given: Any) -> Any:
        nonlocal launched
        launched += 1
        return launch(*given)

    def count_note(work: Any, *given: float) -> None:
        nonlocal notes
        notes += work == "decode"
        note(work, *given)

    monkeypatch.setattr(runner, "launch", count_launch)
    monkeypatch.setattr(rates, "note", count_note)
    until_late(demo, "slow", grammar)
    for _ in range(5):
        demo.step()
    assert notes < launched  # the first launch reads nothing
    gate.set()
    demo.run()


def test_a_late_row_writes_no_page(demo: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers pause before a step that writes pages, and would wait for its mask."""
    demo.submit("slow", WORDS, WARM, grammar=PERSON, max_tokens=200)
    demo.submit("free", WORDS, WARM, max_tokens=4000, ignore_eos=True)
    grammar, gate = gated(demo, "slow", lambda count: count == 3)
    until_late(demo, "slow", grammar)
    batch = demo.engine._batch
    with monkeypatch.context() as patch:
        patch.setattr(batch.cache, "needs_flush", lambda rows, _steps=1: bool(rows))
        assert [batch.must_flush([rid]) for rid in ("slow", "free", "gone")] == [False, True, False]
    demo.engine.cancel("free")
    gate.set()
    demo.run()


def test_the_last_token_of_a_slow_grammar_delays_no_other_row(demo: Driver) -> None:
    """Whether the answer is complete is known only after its last token."""
    whole = demo.alone(WORDS, WARM, grammar=DIGITS, max_tokens=60)
    size = len(whole.tokens)
    for limit, reason in ((size, "stop"), (size - 1, "length")):
        demo.submit("slow", WORDS, WARM, grammar=DIGITS, max_tokens=limit)
        _, gate = gated(demo, "slow", lambda count, last=limit: count == last)
        demo.submit("free", WORDS, WARM, max_tokens=60, ignore_eos=True)
        demo.run(until=lambda: demo.outcomes["free"].over)
        assert len(demo.outcomes["slow"].tokens) == limit - 1
        gate.set()
        demo.run()
        slow = demo.outcomes["slow"]
        assert (slow.tokens, slow.reason) == (whole.tokens[:limit], reason)


def test_a_prompt_does_not_delay_the_last_token_before_it(
    demo: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step in flight is read before a prompt's pass, and so is the end of its answers."""
    monkeypatch.setattr(batch_module, "IDLE_SECONDS", 60.0)  # the machine may be busy
    monkeypatch.setattr("kvd.worker.core.masks.SPARE_SECONDS", 60.0)  # and no row late
    demo.submit("short", WORDS, WARM, grammar=DIGITS, max_tokens=3)
    demo.run(until=lambda: len(demo.outcomes["short"].tokens) == 2)
    batch = demo.engine._batch
    assert batch.in_flight
    batch.finish_step()

    demo.take(demo.engine.take_reports())
    assert demo.outcomes["short"].reason == "length"


def open_at_a_wait(monkeypatch: pytest.MonkeyPatch, gated: Gated, gate: threading.Event) -> None:
    """Open the gate when something waits for the gated matcher, without a limit."""
    wait, wait_for = MaskBatch.wait, MaskBatch.wait_for

    def wait_and_open(batch: MaskBatch, seconds: float = -1) -> bool:
        if seconds < 0:
            gate.set()
        return wait(batch, seconds)

    def wait_for_and_open(batch: MaskBatch, matcher: Matcher, seconds: float = -1) -> None:
        if seconds < 0 and matcher.grammar is gated:
            gate.set()
        wait_for(batch, matcher, seconds)

    monkeypatch.setattr(MaskBatch, "wait", wait_and_open)
    monkeypatch.setattr(MaskBatch, "wait_for", wait_for_and_open)


def test_a_gang_does_not_wait_for_the_mask_of_a_cancelled_request(
    demo: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.engine._batch._masks, "_draws_late", False)
    wanted = demo.alone(WORDS, WARM, grammar=DIGITS, max_tokens=60)
    for rid, grammar in (("gone", PERSON), ("kept", DIGITS)):
        demo.submit(rid, WORDS, WARM, grammar=grammar, max_tokens=60)
    slow, gate = gated(demo, "gone", lambda count: count == 3)
    demo.run(until=lambda: len(demo.outcomes["gone"].tokens) == 2)
    demo.engine._batch.finish_step()  # before a prompt: starts to advance by the third token
    assert slow.stopped.wait(60)
    demo.engine.cancel("gone")
    open_at_a_wait(monkeypatch, slow, gate)
    demo.run()

    assert not gate.is_set()
    assert demo.outcomes["kept"] == wanted


def test_a_gang_waits_for_slow_masks(demo: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other ranks know at the launch of a step how many tokens it draws."""
    assert (Runner.draws_late, LeaderRunner.draws_late) == (True, False)
    masks = demo.engine._batch._masks
    monkeypatch.setattr(masks, "_draws_late", False)
    demo.submit("free", WORDS, WARM, max_tokens=40, ignore_eos=True)
    demo.submit("slow", WORDS, WARM, grammar=PERSON, max_tokens=200)
    grammar, gate = gated(demo, "slow", lambda count: count == 3)
    open_at_a_wait(monkeypatch, grammar, gate)
    while demo.engine.has_work:
        demo.step()
        assert not late_keys(demo)

    assert grammar.stopped.is_set()
    assert gate.is_set()
    assert demo.outcomes["slow"] == demo.alone(WORDS, WARM, grammar=PERSON, max_tokens=200)


def test_a_slow_row_alone_does_not_spin(demo: Driver) -> None:
    """Each step waits for it, for a moment: commands are handled meanwhile."""
    demo.submit("slow", WORDS, WARM, grammar=PERSON, max_tokens=200)
    grammar, gate = gated(demo, "slow", lambda count: count == 3)
    until_late(demo, "slow", grammar)
    demo.step()
    (held,) = demo.engine._batch._masks._batches
    waits: list[float] = []
    plain = held.wait_for
    held.wait_for = lambda *how: waits.append(how[1]) or plain(*how)
    for _ in range(5):
        demo.step()
    gate.set()
    demo.run()

    assert sum(waits[:5]) >= 0.005
    assert demo.outcomes["slow"] == demo.alone(WORDS, WARM, grammar=PERSON, max_tokens=200)


@pytest.mark.parametrize("last", [False, True])
def test_a_late_row_can_be_cancelled(demo: Driver, last: bool) -> None:
    limit = 4 if last else 200
    demo.submit("slow", WORDS, WARM, grammar=PERSON, max_tokens=limit, n=2)
    demo.submit("free", WORDS, WARM, max_tokens=40, ignore_eos=True)
    grammar, gate = gated(demo, "slow", lambda count: count == 4)
    demo.run(until=grammar.stopped.is_set)
    demo.step()
    demo.engine.cancel("slow")
    demo.run()
    gate.set()

    assert demo.outcomes["slow"].reason == "cancelled"
    assert demo.outcomes["free"].reason == "length"
    assert not late_keys(demo)
    assert demo.alone(WORDS, WARM, grammar=DIGITS, max_tokens=60).reason == "stop"


@pytest.mark.parametrize(("fault", "tries"), [(UNABLE, 3), (LATE, 1)])
@pytest.mark.parametrize("limit", [200, 4])
def test_a_failed_step_with_a_late_row_changes_no_answer(
    demo: Driver, monkeypatch: pytest.MonkeyPatch, fault: str, tries: int, limit: int
) -> None:
    def submit() -> None:
        demo.submit("slow", WORDS, WARM, grammar=PERSON, max_tokens=limit, logprobs=1)
        demo.submit("free", WORDS, PENALIZED, max_tokens=40, ignore_eos=True)
        demo.submit("other", prompt_of(70, 2), WARM, grammar=DIGITS, max_tokens=60, n=2)

    submit()
    demo.run()
    wanted, demo.outcomes = demo.outcomes, {}
    submit()
    demo.engine._out_of_memory.calm_steps = CALM_STEPS
    grammar, gate = gated(demo, "slow", lambda count: count == 4)
    demo.run(until=grammar.stopped.is_set)
    demo.step()
    plain = StepMasks.discard

    def discard(masks: StepMasks, live: list[Completion]) -> None:  # waits for the thread
        gate.set()
        plain(masks, live)

    monkeypatch.setattr(StepMasks, "discard", discard)
    with memory_runs_out(range(1, 1 + tries).__contains__, fault) as seen:
        demo.run()

    assert seen.failed == tries
    assert gate.is_set()
    assert demo.outcomes == wanted


def test_a_failed_step_does_not_wait_for_the_mask_of_a_cancelled_request(
    demo: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = demo.alone(WORDS, WARM, grammar=DIGITS, max_tokens=60)
    demo.submit("gone", WORDS, WARM, grammar=PERSON, max_tokens=200)
    demo.submit("kept", WORDS, WARM, grammar=DIGITS, max_tokens=60)
    demo.engine._out_of_memory.calm_steps = CALM_STEPS
    grammar, gate = gated(demo, "gone", lambda count: count == 3)
    until_late(demo, "gone", grammar)
    demo.engine.cancel("gone")
    open_at_a_wait(monkeypatch, grammar, gate)
    with memory_runs_out({1}.__contains__, LATE) as seen:
        demo.run()

    assert seen.failed == 1
    assert not gate.is_set()
    assert demo.outcomes["kept"] == wanted


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("limit", [200, 4])
def test_a_late_row_is_preempted_once_it_is_drawn(demo: Driver, lost: bool, limit: int) -> None:
    wanted = demo.alone(WORDS, WARM, grammar=PERSON, max_tokens=limit, n=2)
    demo.submit("slow", WORDS, WARM, grammar=PERSON, max_tokens=limit, n=2)
    grammar, gate = gated(demo, "slow", lambda count: count == 3)
    demo.run(until=grammar.stopped.is_set)
    demo.step()
    gate.set()
    batch = demo.engine._batch
    batch.finish_step(late=True)
    assert not batch.in_flight
    assert not batch._masks.late
    assert not batch._last
    if "slow" in batch.requests:
        demo.preempt("slow")
        if lost:
            demo.engine._preemption.rows.move_out(batch.requests["slow"], None)
        demo.requeue("slow")
    demo.run()

    assert demo.outcomes["slow"] == wanted


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("limit", [200, 3])
def test_a_preemption_does_not_wait_for_the_mask_of_a_cancelled_request(
    demo: Driver, limit: int, *, together: bool
) -> None:
    """``together``: whether one batch of masks has both matchers."""
    wanted = demo.alone(WORDS, WARM, grammar=PERSON, max_tokens=limit)
    found = {}
    for rid in ("gone", "kept"):
        demo.submit(rid, WORDS, WARM, grammar=PERSON, max_tokens=limit)
        found[rid] = gated(demo, rid, lambda count: count == 3)
        if not together:
            demo.run(until=found[rid][0].stopped.is_set)
    demo.run(until=lambda: all(grammar.stopped.is_set() for grammar, _ in found.values()))
    demo.step()
    demo.engine.cancel("gone")
    batch = demo.engine._batch
    found["kept"][1].set()
    batch.finish_step(late=True)

    assert not found["gone"][1].is_set()
    assert not batch._masks.late
    assert not batch._last
    if limit > 3:
        demo.preempt("kept")
        demo.requeue("kept")
    demo.run()
    assert demo.outcomes["kept"] == wanted
    found["gone"][1].set()


def random_requests(chance: random.Random, count: int) -> dict[str, dict[str, Any]]:
    """Return arguments of `Driver.submit` by request id."""
    found: dict[str, dict[str, Any]] = {}
    for number in range(count):
        one: dict[str, Any] = {"max_tokens": chance.randrange(1, 40), "n": chance.choice([1, 1, 2])}
        if (grammar := chance.choice([None, PERSON, DIGITS, LIST])) is not None:
            one["grammar"] = grammar
        if chance.random() < 0.3:
            one["min_tokens"] = min(10, one["max_tokens"])
        one["prompt"] = prompt_of(chance.randrange(2, 150), number)
        one["sampling"] = Sampling(
            temperature=1.0, seed=number, frequency_penalty=chance.choice([0.0, 0.4])
        )
        found[f"r{number}"] = one
    return found


@pytest.mark.parametrize("seed", range(6))
def test_tokens_do_not_depend_on_how_long_masks_take(demo: Driver, seed: int) -> None:
    """Requests join and leave while random tokens of their grammars wait for random steps."""
    chance = random.Random(seed)
    asked = random_requests(chance, 7)
    wanted = {rid: demo.alone(**one) for rid, one in asked.items()}
    gates: list[threading.Event] = []
    waiting = list(asked)
    seen = 0

    def step() -> None:
        nonlocal seen
        demo.step()
        seen += len(late_keys(demo))
        for gate in gates:
            if chance.random() < 0.4:
                gate.set()
            elif chance.random() < 0.4:
                gate.clear()

    while waiting:
        rid = waiting.pop()
        demo.submit(rid, **asked[rid])
        if "grammar" in asked[rid]:
            gates.append(threading.Event())
            stops = random.Random(rid)
            gated(demo, rid, lambda _, by=stops: by.random() < 0.3, gates[-1])
        for _ in range(chance.randrange(6)):
            step()
    for _ in range(20_000):
        if not demo.engine.has_work:
            break
        step()

    assert demo.outcomes == wanted
    assert seen or not gates
