"""Steps with grammars on accelerators: when tokens are read, and what is launched before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from kvd.worker.core.batch import Batch
from kvd.worker.core.masks import StepMasks
from kvd.worker.core.out_of_memory import CALM_STEPS
from kvd.worker.grammar.mask_threads import MaskBatch, MaskThreads
from kvd.worker.text.stream import TextStream
from protocol.types import Sampling
from tests.worker.core.driver import Driver
from tests.worker.core.faults import LATE, UNABLE, memory_runs_out
from tests.worker.grammar.test_requests import DIGITS, PERSON, WARM, WORDS


@pytest.fixture(scope="module")
def _alone() -> dict[str, Any]:
    """Outcomes of requests that ran alone; `wanted` runs them once."""
    return {}


@pytest.fixture
def wanted(demo: Driver, _alone: dict[str, Any]) -> dict[str, Any]:
    """Outcomes of requests that run alone, and whose tokens a thread reads on the CPU."""
    if not _alone:
        _alone["free"] = demo.alone(WORDS, WARM, max_tokens=40, ignore_eos=True, logprobs=1)
        _alone["digits"] = demo.alone(WORDS, Sampling(temperature=1.0, seed=9), grammar=DIGITS)
        _alone["person"] = demo.alone(WORDS, WARM, grammar=PERSON, max_tokens=200, logprobs=2)
    return dict(_alone)


@pytest.fixture(autouse=True)
def _reads(demo: Driver, wanted: dict[str, Any]) -> Iterator[None]:
    """Let the calling thread read tokens, as on accelerators. ``wanted`` is computed before."""
    del wanted
    masks = demo.engine._batch._masks
    in_thread, masks._reads_in_thread = masks._reads_in_thread, False
    yield
    masks._reads_in_thread = in_thread


def _submit(demo: Driver) -> None:
    demo.submit("free", WORDS, WARM, max_tokens=40, ignore_eos=True, logprobs=1)
    demo.submit("digits", WORDS, Sampling(temperature=1.0, seed=9), grammar=DIGITS)
    demo.submit("person", WORDS, WARM, grammar=PERSON, max_tokens=200, logprobs=2)


@pytest.mark.mlx
def test_tokens_do_not_depend_on_the_thread_that_reads_them(
    wanted: dict[str, Any], demo: Driver
) -> None:
    _submit(demo)
    demo.run()
    assert demo.outcomes == wanted


@pytest.mark.mlx
@pytest.mark.parametrize("fault", [UNABLE, LATE])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_step_that_runs_out_of_memory_is_repeated(
    wanted: dict[str, Any], demo: Driver, number: int, fault: str
) -> None:
    _submit(demo)
    demo.engine._out_of_memory.calm_steps = CALM_STEPS
    demo.run(until=lambda: len(demo.outcomes["person"].tokens) > 3)
    with memory_runs_out({number}.__contains__, fault) as seen:
        demo.run()
    assert seen.failed == 1
    assert demo.outcomes == wanted


@pytest.mark.mlx
@pytest.mark.parametrize("ready", [True, False])
def test_what_is_launched_before_tokens_are_waited_for(
    demo: Driver, ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the pass is. Masks are computed while the rest is launched.

    The text of the previous step is written once masks are ready, or while they are computed.
    """
    wanted = demo.alone(WORDS, WARM, grammar=PERSON, max_tokens=200)
    demo.submit("person", WORDS, WARM, grammar=PERSON, max_tokens=200)
    demo.run(until=lambda: len(demo.outcomes["person"].tokens) > 3 and _settled(demo))
    with monkeypatch.context() as patch:
        events = _record(patch, ready=ready)
        demo.engine._batch._masks._recent.clear()
        demo.step()

    assert len(demo.engine._batch._masks._recent) == 1
    last = ["launch", "deliver"] if ready else ["deliver", "launch"]
    assert events == ["launch", "read", "masks", "launch", *last]
    demo.run()
    assert demo.outcomes["person"] == wanted


@pytest.mark.mlx
def test_a_step_is_not_read_early_if_it_may_force_the_next_token(
    demo: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo.submit("person", WORDS, WARM, grammar=PERSON, max_tokens=200)
    demo.run(until=lambda: len(demo.outcomes["person"].tokens) > 3 and _settled(demo))
    with monkeypatch.context() as patch:
        patch.setattr(TextStream, "may_force", True)
        events = _record(patch, ready=True)
        demo.step()

    assert events[-2:] == ["launch", "deliver"]
    demo.run()


def _settled(demo: Driver) -> bool:
    """Return whether no row is late, and no thread advances its matcher."""
    batch = demo.engine._batch
    rows = [one for request in batch.requests.values() for one in request.completions]
    return not batch._masks.late and not any(one.is_lent for one in rows)


def _record(patch: pytest.MonkeyPatch, *, ready: bool) -> list[str]:
    """Return what happens from now on.

    ``ready``: whether masks are computed at once; if not, only once a text is written.
    """
    events: list[str] = []
    held: list[MaskBatch] = []

    def spy(owner: Any, name: str, event: Callable[..., str]) -> None:
        plain = getattr(owner, name)

        def called(*given: Any, **more: Any) -> Any:
            if shown := event(*given):
                events.append(shown)
            return plain(*given, **more)

        patch.setattr(owner, name, called)

    def run(_threads: MaskThreads, batch: MaskBatch, _count: int) -> None:
        events.append("masks")
        held.append(batch)
        if ready:
            held.pop().run()

    def deliver(*_: Any) -> str:
        while held:
            held.pop().run()
        return "deliver"

    spy(mx, "async_eval", lambda *_: "launch")
    spy(StepMasks, "advance", lambda _, step: "" if step.advanced else "read")
    spy(Batch, "_deliver", deliver)
    patch.setattr(MaskThreads, "run", run)
    return events
