"""Steps with grammars on accelerators: when tokens are read, and what is launched before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from kvd.worker.core.batch import Batch
from kvd.worker.core.masks import StepMasks
from kvd.worker.core.out_of_memory import CALM_STEPS
from kvd.worker.core.read_order import PERIOD, TRIAL, ReadOrder
from kvd.worker.grammar.mask_threads import MaskThreads
from protocol.types import Sampling
from tests.worker.core.driver import Driver
from tests.worker.core.faults import LATE, UNABLE, memory_runs_out
from tests.worker.grammar.test_requests import DIGITS, PERSON, WARM, WORDS


class _Fixed(ReadOrder):
    """An order that no trial changes."""

    def __init__(self, *, reads_first: bool) -> None:
        super().__init__()
        self.reads_first = reads_first

    def note(self, seconds: float) -> None:
        assert seconds >= 0


@pytest.fixture(params=[False, True], ids=["launches first", "reads first"])
def reads_first(request: pytest.FixtureRequest, demo: Driver) -> Iterator[bool]:
    """Let the calling thread read tokens, as on accelerators, in one of both orders."""
    masks = demo.engine._batch._masks
    in_thread, order = masks._reads_in_thread, masks._order
    masks._reads_in_thread, masks._order = False, _Fixed(reads_first=request.param)
    yield request.param
    masks._reads_in_thread, masks._order = in_thread, order


@pytest.fixture
def wanted(demo: Driver) -> dict[str, Any]:
    """Outcomes of requests that run alone, and whose tokens a thread reads on the CPU."""
    return {
        "free": demo.alone(WORDS, WARM, max_tokens=40, ignore_eos=True, logprobs=1),
        "digits": demo.alone(WORDS, Sampling(temperature=1.0, seed=9), grammar=DIGITS),
        "person": demo.alone(WORDS, WARM, grammar=PERSON, max_tokens=200, logprobs=2),
    }


def _submit(demo: Driver) -> None:
    demo.submit("free", WORDS, WARM, max_tokens=40, ignore_eos=True, logprobs=1)
    demo.submit("digits", WORDS, Sampling(temperature=1.0, seed=9), grammar=DIGITS)
    demo.submit("person", WORDS, WARM, grammar=PERSON, max_tokens=200, logprobs=2)


@pytest.mark.mlx
def test_no_token_depends_on_the_order(
    wanted: dict[str, Any], demo: Driver, reads_first: bool
) -> None:
    _submit(demo)
    demo.run()
    assert demo.outcomes == wanted


@pytest.mark.mlx
def test_no_token_depends_on_a_change_of_the_order(wanted: dict[str, Any], demo: Driver) -> None:
    masks = demo.engine._batch._masks
    in_thread, order = masks._reads_in_thread, masks._order
    masks._reads_in_thread, masks._order = False, _Fixed(reads_first=False)
    try:
        _submit(demo)
        while demo.engine.has_work:
            demo.step()
            masks._order.reads_first = not masks._order.reads_first
    finally:
        masks._reads_in_thread, masks._order = in_thread, order
    assert demo.outcomes == wanted


@pytest.mark.mlx
@pytest.mark.parametrize("fault", [UNABLE, LATE])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_step_that_runs_out_of_memory_is_repeated(
    wanted: dict[str, Any], demo: Driver, reads_first: bool, number: int, fault: str
) -> None:
    _submit(demo)
    demo.engine._out_of_memory.calm_steps = CALM_STEPS
    demo.run(until=lambda: len(demo.outcomes["person"].tokens) > 3)
    with memory_runs_out({number}.__contains__, fault) as seen:
        demo.run()
    assert seen.failed == 1
    assert demo.outcomes == wanted


@pytest.mark.mlx
def test_what_is_launched_before_tokens_are_waited_for(
    demo: Driver, reads_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draw is launched before the text of the previous step is written, in both orders."""
    events: list[str] = []
    _record(events, monkeypatch)
    demo.submit("person", WORDS, WARM, grammar=PERSON, max_tokens=200)
    demo.run(until=lambda: len(demo.outcomes["person"].tokens) > 3)
    events.clear()
    demo.step()

    order = ["read", "masks", "forward"] if reads_first else ["forward", "read", "masks"]
    assert events == [*order, "draw", "deliver"]
    demo.run()


def _record(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def spy(owner: Any, name: str, event: Callable[..., str]) -> None:
        plain = getattr(owner, name)

        def called(*given: Any, **more: Any) -> Any:
            if shown := event(*given):
                events.append(shown)
            return plain(*given, **more)

        monkeypatch.setattr(owner, name, called)

    spy(mx, "async_eval", lambda *arrays: "forward" if len(arrays) == 2 else "draw")
    spy(StepMasks, "advance", lambda _, step: "" if step.advanced else "read")
    spy(MaskThreads, "run", lambda *_: "masks")
    spy(Batch, "_deliver", lambda *_: "deliver")


# The choice.


def _note(order: ReadOrder, steps: int, wait: Callable[[bool], float]) -> list[bool]:
    """Return whether each step reads first; ``wait``: seconds that it waits then."""
    found = []
    for _ in range(steps):
        found.append(order.reads_first)
        order.note(wait(order.reads_first))
    return found


@pytest.mark.parametrize("better", [False, True])
def test_the_order_with_shorter_waits_is_chosen(better: bool) -> None:
    order = ReadOrder()
    _note(order, 2 * TRIAL, lambda first: 0.001 if first is better else 0.002)
    assert order.reads_first is better
    later = _note(order, PERIOD, lambda first: 0.001 if first is better else 0.002)
    assert later.count(not better) == TRIAL


def test_an_order_that_becomes_worse_is_left() -> None:
    order = ReadOrder()
    _note(order, 2 * TRIAL, lambda first: 0.002 if first else 0.001)
    assert not order.reads_first
    _note(order, PERIOD, lambda first: 0.001 if first else 0.002)
    assert order.reads_first


def test_a_few_slow_masks_do_not_decide() -> None:
    order, count = ReadOrder(), iter(range(10_000))

    def wait(first: bool) -> float:
        slow = first and next(count) % 4 == 0
        return 0.004 if slow else 0.0001 if first else 0.0005

    _note(order, 2 * TRIAL, wait)
    assert order.reads_first


def test_orders_that_wait_alike_launch_first() -> None:
    """Then the device has work while the thread reads."""
    order = ReadOrder()
    _note(order, 2 * TRIAL, lambda _: 0.0)
    assert not order.reads_first
