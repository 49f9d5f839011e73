"""Decode steps run between the stages of a prefill pass, and change no number."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import mlx.core as mx
import pytest

from kvd.worker.cache import model_cache
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.scheme import PAGE_TOKENS
from kvd.worker.core import interleaving, out_of_memory
from kvd.worker.core.rates import Rates
from kvd.worker.engine import ignore_phase
from kvd.worker.process import shortage
from protocol import memory_bounds
from protocol.types import Sampling
from protocol.worker import Report, RowTokens
from tests.worker.core.driver import Driver, Outcome
from tests.worker.core.faults import LATE, UNABLE, memory_runs_out
from tests.worker.core.prompts import prompt_of

pytestmark = pytest.mark.mlx

Started = Callable[[Callable[[int], None]], None]


@pytest.fixture
def layered(demo: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """An engine whose passes have a stage for each layer, because prefill seems slow."""
    rates = demo.engine._rates
    monkeypatch.setattr(rates, "_measured", {"prefill": 1e-6, "decode": 1e6})
    monkeypatch.setattr(rates, "note", lambda *_: None)
    monkeypatch.setattr(demo.engine._prompts._interleaving, "_reads_soon", False)
    shortages = demo.engine._out_of_memory
    shortages.calm_steps = out_of_memory.CALM_STEPS
    yield demo
    shortages.count = 0


@pytest.fixture
def early(layered: Driver) -> Iterator[list[Report]]:
    """Reports that leave the engine before a step returns."""
    seen: list[Report] = []

    def take(reports: list[Report]) -> None:
        seen.extend(reports)
        layered.take(reports)

    layered.engine.watch(ignore_phase, take)
    yield seen
    layered.engine.watch(ignore_phase)


@pytest.fixture(params=["cpu", "slow accelerator", "fast accelerator"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of device that the engine assumes; steps of a fast one are read at once."""
    monkeypatch.setattr(interleaving, "on_cpu", lambda: request.param == "cpu")
    if request.param == "fast accelerator":
        monkeypatch.setattr(interleaving, "SOON_SECONDS", math.inf)
        for name in ("STAGE_SECONDS", "EARLY_SECONDS"):  # a step also before each pass
            monkeypatch.setattr(interleaving, name, 0.0)
    else:
        monkeypatch.setattr(interleaving, "SOON_SECONDS", 0.0)
    return str(request.param)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """Registers a callback that gets the number of layers just before their evaluation starts."""
    evaluate = mx.async_eval
    calls = list[Callable[[int], None]]()

    def launch(*arrays: Any) -> None:
        if len(arrays) == 1 and all(isinstance(layer, list) for layer in arrays[0]):
            for call in calls:
                call(len(arrays[0]))
        evaluate(*arrays)

    monkeypatch.setattr(mx, "async_eval", launch)
    yield calls.append
    calls.clear()


def in_prefill(driver: Driver, rid: str) -> bool:
    return rid in driver.engine._scheduler.states.prefilling


def test_a_row_decodes_between_the_stages_of_anothers_prompt(
    layered: Driver, early: list[Report], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {
        rid: layered.alone(prompt_of(length, length), max_tokens=60)
        for rid, length in (("runs", 90), ("reads", 400))
    }
    layered.engine._prefix_cache.tree.clear()
    layered.submit("runs", prompt_of(90, 90), max_tokens=60)
    layered.run(until=lambda: len(layered.outcomes["runs"].tokens) > 2)
    layered.submit("reads", prompt_of(400, 400), max_tokens=60)
    early.clear()
    is_fast = device == "fast accelerator"
    monkeypatch.setattr(layered.engine._prompts._interleaving, "_reads_soon", is_fast)
    before = len(layered.outcomes["runs"].tokens)
    layered.step()

    layers = len(layered.engine._runner.cache.stores[0].layers)
    assert in_prefill(layered, "reads")
    assert layers > 2
    # Steps read: the one in flight before the pass, and one for each stage except the last.
    # Accelerators add one after the last stage. A fast device adds one before the pass and one
    # before the last stage.
    steps = layers + (device != "cpu") + 2 * is_fast
    assert len(layered.outcomes["runs"].tokens) == before + steps
    assert len([report for report in early if isinstance(report, RowTokens)]) == steps
    layered.run()
    assert layered.outcomes == expected


def test_the_tokens_of_a_fast_device_do_not_wait_for_a_stage(
    layered: Driver,
    early: list[Report],
    started: Started,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host delivers them before it launches the stage that it has built."""
    for module in (interleaving, model_cache):
        monkeypatch.setattr(module, "on_cpu", lambda: False)
    monkeypatch.setattr(interleaving, "SOON_SECONDS", math.inf)
    for name in ("STAGE_SECONDS", "EARLY_SECONDS"):
        monkeypatch.setattr(interleaving, name, 0.0)
    monkeypatch.setattr(layered.engine._prompts._interleaving, "_reads_soon", True)
    layered.submit("runs", prompt_of(90, 90), max_tokens=60)
    layered.run(until=lambda: len(layered.outcomes["runs"].tokens) > 2)
    layered.submit("reads", prompt_of(400, 400), max_tokens=1)
    stages = len(layered.engine._runner.cache.stage_ends(0.0))
    delivered: list[int] = []
    started(lambda _: delivered.append(len([one for one in early if isinstance(one, RowTokens)])))
    early.clear()
    layered.step()

    # Before the first stage, three steps are delivered: the one in flight, the one that this
    # engine step launched, and the one before the pass. Each stage adds one.
    assert delivered == [3 + stage for stage in range(stages)]
    layered.run()


class SimulatedDevice:
    """A batch and its device, which computes stages and steps in order; times in seconds."""

    launch = 0.001
    flush = 0.004
    """Host seconds for the flush, and again for the checkpoints after it."""
    requests: ClassVar[dict[str, Any]] = {}

    def __init__(self, build: float, stage: float, step: float, start: float) -> None:
        self.build, self.stage, self.step, self.start = build, stage, step, start
        self.now = self.free = self.step_end = 0.0
        self.in_flight = self.timed = False
        self.step_began_at = self.decode_seconds = 0.0
        self.idle = 0.0
        self.read_early: list[bool] = []
        self.reads: list[float] = []
        self.enter_phase: Any = ignore_phase

    def _queue(self, seconds: float) -> float:
        self.idle += max(0.0, self.now - self.free)
        self.free = max(self.now, self.free) + seconds
        return self.free

    def synchronize(self) -> None:
        if self.in_flight:
            self.now = max(self.now, self.step_end)

    def finish_step(self) -> None:
        self.synchronize()
        if self.in_flight:
            self.reads.append(self.now)
        self.in_flight = False

    def decode(self, _: object, *, timed: bool = True) -> None:
        self.timed = timed
        self.now += self.launch
        self.step_end, self.in_flight = self._queue(self.step), True

    def run(self, one: interleaving.Interleaving, stages: int) -> None:
        """Launch a step as an engine does, and read the one that the last pass has left.

        Then compute one pass.
        """
        launched, step_end, was_in_flight = self.now, self.step_end, self.in_flight
        self.decode(())
        if was_in_flight:
            self.now = max(self.now, step_end)
            self.reads.append(self.now)
        self.decode_seconds = self.now - launched
        self.step_began_at = self.now if was_in_flight else launched
        one.begin(())
        for left in reversed(range(stages)):
            self.now += self.build
            reads = len(self.reads)

            def start(reads: int = reads) -> None:
                self.read_early.append(len(self.reads) > reads)
                self.now += self.start
                self._queue(self.stage)

            one.run_stage(left, start)
        assert not self.timed  # the host prepares the flush while the last step is in flight
        self.now += self.flush
        self.step_end = self._queue(0.002)  # a read of the step also waits for what was written
        written = self.free
        one.pass_written()
        self.now = max(self.now + self.flush, written)


@pytest.mark.parametrize(
    ("times", "early"),
    [((0.003, 0.008, 0.002, 0.001), False), ((0.008, 0.003, 0.001, 0.004), True)],
    ids=["device", "host"],
)
def test_steps_are_read_early_only_if_the_host_is_slower(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, ...], early: bool
) -> None:
    """A read of a step before a stage says nothing about the stage."""
    device = SimulatedDevice(*times)
    monkeypatch.setattr(interleaving, "on_cpu", lambda: False)
    monkeypatch.setattr(interleaving.time, "monotonic", lambda: device.now)
    one = interleaving.Interleaving(device, Rates(), lambda: None)  # type: ignore[arg-type]
    monkeypatch.setattr(interleaving.Interleaving, "has_rows", True)
    for _ in range(4):
        device.run(one, 8)
    if early:
        # The first two stages of the first pass show which is slower.
        assert device.read_early == [False] * 2 + [True] * 30
    else:
        assert not any(device.read_early)
        assert device.idle < 0.2 * device.now


@pytest.mark.parametrize("layers", [1, 2, 28, 36, 48, 49, 61, 62, 63, 64, 72, 96, 128])
def test_the_steps_of_a_pass_fit_into_a_page(layers: int) -> None:
    """A row may commit only one page during a pass."""
    cache: Any = SimpleNamespace(_attention_views=range(layers))
    stages = ModelCache.stage_ends(cache, interleaving.SMALLEST_SHARE)
    assert stages[-1] == layers
    assert len(stages) + interleaving.MORE_STEPS < PAGE_TOKENS


def test_a_read_without_a_launch_is_not_measured(
    demo: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step is read alone, which takes no time if its device is faster than the host."""
    noted = list[str]()
    monkeypatch.setattr(demo.engine._rates, "note", lambda work, *_: noted.append(work))
    demo.submit("r", prompt_of(90, 90), max_tokens=5, ignore_eos=True)
    demo.run()
    assert noted.count("decode") == 5 - 1


def test_a_step_around_a_pass_is_not_measured(
    layered: Driver, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host leaves checkpoints while such a step is in flight, so its duration is not noted.

    Only the step before the passes is measured, and sometimes one before a first stage.
    """
    noted = list[str]()
    rates = layered.engine._rates
    monkeypatch.setattr(rates, "note", lambda work, *_: noted.append(work))
    layered.submit("runs", prompt_of(90, 90), max_tokens=60)
    layered.run(until=lambda: len(layered.outcomes["runs"].tokens) > 2)
    layered.submit("reads", prompt_of(1100, 1100), max_tokens=1)
    noted.clear()
    layered.step()
    while in_prefill(layered, "reads"):
        layered.step()
    assert noted.count("prefill") > 3
    assert device == "cpu" or noted.count("decode") <= 2
    layered.run()


def test_a_short_pass_has_stages_if_no_recent_pass_took_less(
    layered: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accelerator's host takes about the same time to launch few tokens as many."""
    monkeypatch.setattr(interleaving, "on_cpu", lambda: False)
    rates = {"prefill": 1e5, "decode": 1e3}
    monkeypatch.setattr(layered.engine._rates, "_measured", rates)
    layered.submit("runs", prompt_of(90, 90), max_tokens=20)
    layered.run(until=lambda: len(layered.outcomes["runs"].tokens) > 2)
    one = interleaving.Interleaving(
        layered.engine._batch, layered.engine._rates, layered.engine._deliver
    )
    one.begin(["runs"])
    assert one.stage_share(100) == 1.0
    one.end(0.04)
    one.end(0.08)
    assert one.stage_share(100) == pytest.approx(interleaving.STAGE_SECONDS / 0.04, rel=0.05)
    monkeypatch.setattr(interleaving, "on_cpu", lambda: True)
    assert one.stage_share(100) == 1.0
    monkeypatch.setattr(interleaving, "on_cpu", lambda: False)
    for _ in range(interleaving.RECENT_PASSES):
        one.end(0.001)
    assert one.stage_share(100) == 1.0
    layered.run()


@pytest.mark.parametrize(
    ("times", "whole", "step"),
    [
        # The device computes 8 stages of 8 ms and a flush; the host leaves checkpoints.
        ((0.003, 0.008, 0.006, 0.001), 8 * 0.008 + 0.004 + 0.002, 0.006),
        ((0.003, 0.008, 0.02, 0.001), 8 * 0.008 + 0.004 + 0.002, 0.02),
        # The host builds and launches 8 stages, and a flush; it leaves checkpoints.
        ((0.008, 0.003, 0.001, 0.004), 8 * (0.008 + 0.004) + 2 * 0.004, 0.001),
        # It also measures each step inside the pass.
        ((0.008, 0.003, 0.001, 0.004), 8 * (0.008 + 0.004) + 2 * 0.004, None),
    ],
    ids=["slow device", "slow steps", "slow host", "slow host without measured steps"],
)
def test_the_time_of_a_pass_is_learnt_without_its_steps(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, ...], whole: float, step: float | None
) -> None:
    """Passes follow each other, so only steps before and in them can be measured."""
    device, rates = SimulatedDevice(*times), Rates()
    monkeypatch.setattr(interleaving, "on_cpu", lambda: False)
    monkeypatch.setattr(interleaving.time, "monotonic", lambda: device.now)
    monkeypatch.setattr(interleaving.Interleaving, "has_rows", True)
    one = interleaving.Interleaving(device, rates, lambda: None)  # type: ignore[arg-type]
    one._measured_rows = 1
    begin = interleaving.Interleaving.begin

    def begin_and_measure(self: interleaving.Interleaving, decoding: Any) -> None:
        begin(self, decoding)
        self._measure_step(1)

    if step is not None:
        monkeypatch.setattr(interleaving.Interleaving, "begin", begin_and_measure)
    found = []
    for _ in range(40):
        launched = device.now
        device.run(one, 8)
        found.append(one.end(device.now - launched - device.decode_seconds))
    assert step is None or rates.seconds("decode", 1) == pytest.approx(step, rel=0.1)
    assert found[10:] == pytest.approx([whole] * 30, rel=0.1)


@pytest.mark.parametrize("share", [None, 1.0], ids=["stages", "short passes"])
def test_a_row_decodes_while_prompts_are_scored(
    layered: Driver, monkeypatch: pytest.MonkeyPatch, share: float | None
) -> None:
    """Between the stages of a pass, between the parts of its logits, and between passes."""
    if share is not None:
        monkeypatch.setattr(interleaving.Interleaving, "stage_share", lambda *_: share)
    requests: dict[str, dict[str, Any]] = {
        f"scored {number}": {"prompt": prompt_of(75, number), "prompt_logprobs": 1, "max_tokens": 3}
        for number in range(3)
    }
    requests["runs"] = {"prompt": prompt_of(90, 90), "max_tokens": 90}
    expected = {rid: layered.alone(**request) for rid, request in requests.items()}
    layered.submit("runs", **requests.pop("runs"))
    layered.run(until=lambda: len(layered.outcomes["runs"].tokens) > 2)
    for rid, request in requests.items():
        layered.submit(rid, **request)
    before = len(layered.outcomes["runs"].tokens)
    layered.step()

    assert not any(in_prefill(layered, rid) for rid in requests)
    assert all(len(layered.outcomes[rid].prompt_logprobs) == 75 for rid in requests)
    parts = -(-74 // memory_bounds.SCORED_AT_ONCE)
    stages = 1 if share else len(layered.engine._runner.cache.stage_ends(0.0))
    # The step of before, and this step's own. For each prompt one before the pass, between its
    # stages, and between the parts of its logits.
    steps = 2 + 3 * (1 + (stages - 1) + (parts - 1))
    assert len(layered.outcomes["runs"].tokens) == before + steps
    layered.run()
    assert layered.outcomes == expected


def test_a_first_token_does_not_wait_for_the_next_prompt(
    layered: Driver, early: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the pass over that prompt has one stage."""
    monkeypatch.setattr(interleaving.Interleaving, "stage_share", lambda *_: 1.0)
    for rid in ("first", "second"):
        layered.submit(rid, prompt_of(200, len(rid)), max_tokens=3)
    layered.step()
    assert not in_prefill(layered, "first")
    assert in_prefill(layered, "second")
    layered.step()

    assert not in_prefill(layered, "second")
    assert [report.rid for report in early if isinstance(report, RowTokens)] == ["first"]
    layered.run()


@pytest.mark.usefixtures("device")
def test_no_stage_changes_a_number(layered: Driver) -> None:
    """Requests of all kinds join at random steps. Rows commit pages and end between stages."""
    draw = random.Random(7)
    requests: dict[str, dict[str, Any]] = {}
    for number in range(20):
        length = draw.choice((2, 40, 64, 66, 120, 129, 257, 300, 600))
        more = draw.choice(({}, {}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"n": 2}))
        requests[f"r{number}"] = {
            "prompt": prompt_of(length, number),
            "sampling": Sampling(temperature=draw.choice((0.0, 0.9)), seed=number),
            "max_tokens": draw.choice((1, 3, 8, 30, 90)),
        } | more
    wanted = {rid: layered.alone(**request) for rid, request in requests.items()}
    layered.engine._prefix_cache.tree.clear()
    names = list(requests)
    while names or layered.engine.has_work:
        if names and draw.random() < 0.3:
            rid = names.pop()
            layered.submit(rid, **requests[rid])
        if layered.engine.has_work:
            layered.step()

    assert layered.outcomes == wanted


def test_a_step_runs_while_the_model_builds_the_pass(
    layered: Driver, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device computes the first layers before the host has built the last ones.

    On CPUs, each layer is started once its keys and values are built.
    """
    layered.submit("runs", prompt_of(90, 90), max_tokens=60)
    layered.run(until=lambda: len(layered.outcomes["runs"].tokens) > 2)
    layered.submit("reads", prompt_of(400, 400), max_tokens=1)
    cache = layered.engine._runner.cache
    (store,) = cache.stores
    events: list[str] = []
    run_step = interleaving.Interleaving.run_step

    def run(self: interleaving.Interleaving, left: int, **more: bool) -> None:
        pending = [layer for layer in store.layers if layer.pending]
        assert not pending, "a pass is paused with its pages set aside"
        events.append("step")
        run_step(self, left, **more)

    monkeypatch.setattr(interleaving.Interleaving, "run_step", run)
    started(lambda layers: events.append(str(layers)))
    layered.step()

    layers = len(store.layers)
    # The first two layers are one stage. The last one ends with nothing left to start.
    assert events == ["1", *["1", "step"] * (layers - 2), "1", "0", "step"]
    layered.run()


def test_a_cpu_computes_while_the_host_builds_although_no_row_decodes(
    layered: Driver, started: Started
) -> None:
    wanted = layered.alone(prompt_of(400, 3), max_tokens=4)
    layered.engine._prefix_cache.tree.clear()
    (store,) = layered.engine._runner.cache.stores
    built: list[int] = []
    started(built.append)
    layered.submit("reads", prompt_of(400, 3), max_tokens=4)
    layered.step()

    layers = len(store.layers)
    assert built == [1] * layers + [0]
    layered.run()
    assert layered.outcomes.pop("reads") == wanted


def test_an_accelerator_measures_a_step_when_rows_begin_to_decode_and_now_and_then(
    demo: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits for a step, the device has nothing to do."""
    monkeypatch.setattr(interleaving, "on_cpu", lambda: False)
    monkeypatch.setattr(demo.engine._rates, "_measured", {"prefill": 1e-6, "decode": 1e9})
    monkeypatch.setattr(demo.engine._prompts._interleaving, "_measured_rows", 0)
    measured: list[bool] = []
    measure = interleaving.Interleaving._measure_step

    def noted(self: interleaving.Interleaving, rows: int) -> None:
        before = self._step_seconds
        measure(self, rows)
        measured.append(self._step_seconds > before)

    monkeypatch.setattr(interleaving.Interleaving, "_measure_step", noted)
    demo.submit("runs", prompt_of(70, 1), max_tokens=2000, ignore_eos=True)
    demo.run(until=lambda: len(demo.outcomes["runs"].tokens) > 2)
    demo.submit("reads", prompt_of(256 * 10, 2), max_tokens=1)
    demo.run(until=lambda: len(measured) == 10)

    often = interleaving.MEASURED_PASSES
    assert measured == [number % often == 0 for number in range(10)]
    demo.engine.cancel("runs")
    demo.run()


def test_an_accelerator_measures_few_steps_while_rows_join_one_by_one(
    demo: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interleaving, "on_cpu", lambda: False)
    demo.submit("runs", prompt_of(70, 1), max_tokens=8, ignore_eos=True)
    demo.run(until=lambda: demo.engine._batch.in_flight)
    one = demo.engine._prompts._interleaving
    monkeypatch.setattr(one, "_measured_rows", 0)
    measured = []
    for rows in range(1, 13):
        one._step_seconds = 0.0
        one._measure_step(rows)
        measured += [rows] if one._step_seconds else []

    assert measured == [1, 2, 4, 7, 11]
    demo.run()


def test_pages_that_rows_commit_between_stages_are_written_before(layered: Driver) -> None:
    """Between stages nothing can be written, because the pass refers to the pools."""
    prompt = prompt_of(70, 1)
    expected = layered.alone(prompt, max_tokens=90)
    layered.engine._prefix_cache.tree.clear()
    layered.submit("runs", prompt, max_tokens=90)
    layered.run(until=lambda: len(layered.outcomes["runs"].tokens) > 1)
    (completion,) = layered.engine._batch.requests["runs"].completions
    (row,) = completion.row.rows
    layered.run(until=lambda: row.tail_length == 126)
    assert not row.written_ahead
    pages, before = len(row.pages), len(layered.outcomes["runs"].tokens)
    layered.submit("reads", prompt_of(400, 2), max_tokens=1)
    layered.step()

    layers = len(layered.engine._runner.cache.stores[0].layers)
    assert len(row.pages) == pages + 1
    assert len(layered.outcomes["runs"].tokens) == before + layers
    layered.run()
    assert layered.outcomes.pop("runs") == expected


def failures(driver: Driver, requests: dict[str, Outcome], fails: Any, text: str) -> int:
    """Let a prompt join a row that decodes, with failed evaluations; return how many there were."""
    driver.submit("runs", prompt_of(100, 1), max_tokens=40)
    driver.run(until=lambda: len(driver.outcomes["runs"].tokens) > 2)
    driver.submit("reads", prompt_of(700, 2), max_tokens=10)
    with memory_runs_out(fails, text) as seen:
        driver.run()
    assert driver.outcomes == requests
    driver.outcomes.clear()
    driver.engine._prefix_cache.tree.clear()
    driver.engine._out_of_memory.calm_steps = out_of_memory.CALM_STEPS
    return seen.failed


@pytest.mark.parametrize("text", [UNABLE, LATE])
def test_a_shortage_in_any_stage_loses_nothing(layered: Driver, text: str) -> None:
    expected = {
        "runs": layered.alone(prompt_of(100, 1), max_tokens=40),
        "reads": layered.alone(prompt_of(700, 2), max_tokens=10),
    }
    layered.engine._prefix_cache.tree.clear()
    tries = 1 if text == LATE else shortage.TRIES + 1
    for first in range(1, 30, 2):
        times = range(first, first + tries)
        assert failures(layered, expected, times.__contains__, text) == tries


def test_steps_are_measured_while_prompts_are_read(
    demo: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise stages would stay as short as the steps of an earlier, smaller batch."""
    rates = demo.engine._rates
    demo.submit("runs", prompt_of(70, 1), max_tokens=200)
    demo.run(until=lambda: len(demo.outcomes["runs"].tokens) > 2)
    monkeypatch.setattr(rates, "_measured", {"prefill": 1e-6, "decode": 1e9})
    demo.submit("reads", prompt_of(700, 2), max_tokens=1)
    passes = 0
    demo.step()
    while in_prefill(demo, "reads"):
        before = rates.seconds("decode", 1)
        demo.step()
        passes += 1
        assert rates.seconds("decode", 1) > before
    assert passes > 1
    demo.run()


def test_a_page_committed_between_stages_copies_no_other_tails(layered: Driver) -> None:
    """A pass that was built and not evaluated held the tails, so that a step copied them all."""
    for number in range(12):
        layered.submit(f"r{number}", prompt_of(70, number), max_tokens=90)
    layered.run(until=lambda: all(outcome.tokens for outcome in layered.outcomes.values()))
    cache = layered.engine._runner.cache
    row = layered.engine._batch.requests["r0"].completions[0].row.rows[0]
    layered.run(until=lambda: row.tail_length >= 110)
    layered.submit("reads", prompt_of(3000, 99), max_tokens=1)
    peaks: dict[bool, list[int]] = {False: [], True: []}
    layered.run(until=lambda: in_prefill(layered, "reads"))
    while in_prefill(layered, "reads"):
        pages = len(row.pages)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        layered.step()
        peaks[len(row.pages) > pages].append(mx.get_peak_memory() - before)
    tails = cache.usage.tails_bytes
    layered.run()

    assert peaks[True]
    assert max(peaks[True]) - max(peaks[False]) < 0.35 * tails
