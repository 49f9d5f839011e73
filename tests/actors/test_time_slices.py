"""Time slices: shares by weight, no starvation, no waiting for idle, silent or dead workers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.machines.time_slices import (
    GRACE_S,
    SLICE_S,
    AlarmFired,
    Event,
    GiveTimeSlice,
    TimeSliceEnded,
    TimeSliceRequested,
    TimeSlices,
    WeightChanged,
    WorkerExited,
)
from actors.status import KnownModel
from kvd.worker.process.time_slice_gate import TimeSliceGate
from protocol import messages
from protocol import worker as wire
from protocol.policy import ModelPolicy, PolicyChange
from tests.sim.loop import simulated, until
from tests.sim.world import world


def feed(machine: TimeSlices, now: float, *events: Event) -> list[GiveTimeSlice]:
    commands = [give for event in events for give in machine.handle(event, now)]
    machine.check()
    return commands


def test_a_worker_alone_computes_without_limit():
    machine = TimeSlices()

    assert feed(machine, 0.0, TimeSliceRequested("a")) == [GiveTimeSlice("a", 1, None)]
    assert machine.deadline is None
    assert feed(machine, 9.0, TimeSliceEnded("a", 1, 0.0, more=False)) == []


def test_the_second_waits_until_the_first_has_had_a_slice():
    machine = TimeSlices()
    feed(machine, 0.0, TimeSliceRequested("a"))

    assert feed(machine, 5.0, TimeSliceRequested("b")) == [
        GiveTimeSlice("b", 2, 0.0),
        GiveTimeSlice("a", 3, SLICE_S),
    ]
    assert machine.deadline == 5.0 + SLICE_S + GRACE_S
    assert feed(machine, 5.1, TimeSliceEnded("a", 3, SLICE_S, more=True)) == [
        GiveTimeSlice("b", 4, SLICE_S)
    ]


def test_the_last_worker_left_has_no_limit():
    machine = TimeSlices()
    feed(machine, 0.0, TimeSliceRequested("a"), TimeSliceRequested("b"))

    assert feed(machine, 1.0, TimeSliceEnded("b", 2, 0.0, more=False)) == [
        GiveTimeSlice("a", 4, None)
    ]
    assert feed(machine, 1.0, TimeSliceRequested("b"), WorkerExited("a"))[-1] == GiveTimeSlice(
        "b", 7, None
    )


def test_a_worker_waits_as_long_as_it_overran():
    machine = TimeSlices()
    feed(machine, 0.0, TimeSliceRequested("a"), TimeSliceRequested("b"))
    time_slices = feed(machine, 0.5, TimeSliceEnded("a", 3, SLICE_S + 0.2, more=True))
    while time_slices[-1].model == "b":
        time_slices += feed(
            machine, 1.0, TimeSliceEnded("b", time_slices[-1].seq, SLICE_S, more=True)
        )

    assert len(time_slices) - 1 == 1 + 0.2 / SLICE_S


def test_a_debt_is_bounded_and_paid_by_time_without_work():
    machine = TimeSlices()
    feed(
        machine,
        0.0,
        TimeSliceRequested("a"),
        TimeSliceRequested("b"),
        TimeSliceEnded("a", 3, 3600.0, more=False),
    )

    assert machine.debts["a"].seconds < 6
    feed(machine, 3.0, TimeSliceRequested("a"))
    assert -2.1 < machine.members["a"].credit_s < -1.9


def test_a_silent_holder_loses_its_slice_and_gets_another_when_it_reports():
    machine = TimeSlices()
    feed(machine, 0.0, TimeSliceRequested("a"), TimeSliceRequested("b"))

    assert feed(machine, SLICE_S + GRACE_S - 0.01, AlarmFired()) == []
    assert feed(machine, SLICE_S + GRACE_S, AlarmFired()) == [GiveTimeSlice("b", 4, None)]
    assert feed(machine, 9.0, TimeSliceEnded("a", 3, 0.5, more=True)) == [
        GiveTimeSlice("b", 5, SLICE_S)
    ]
    assert feed(machine, 9.1, WorkerExited("b")) == [GiveTimeSlice("a", 6, None)]


def test_a_late_report_does_not_end_a_newer_slice():
    machine = TimeSlices()
    feed(
        machine,
        0.0,
        TimeSliceRequested("a"),
        TimeSliceRequested("b"),
        TimeSliceEnded("b", 2, 0.0, more=False),
    )  # a's slice has seq 3; then a computes alone, seq 4

    assert feed(machine, 1.0, TimeSliceEnded("a", 3, SLICE_S, more=True)) == []
    assert machine.members["a"].unlimited
    assert machine.members["a"].credit_s == 0.0


def test_short_steps_need_no_slices_once_measured():
    machine = TimeSlices()
    feed(machine, 0.0, TimeSliceRequested("a"), TimeSliceRequested("b"))  # a's slice has seq 3

    assert feed(machine, 0.05, TimeSliceEnded("a", 3, SLICE_S, more=True, step_s=0.03)) == [
        GiveTimeSlice("b", 4, SLICE_S)
    ]
    assert feed(machine, 0.1, TimeSliceEnded("b", 4, SLICE_S, more=True, step_s=0.02)) == [
        GiveTimeSlice("a", 5, None),
        GiveTimeSlice("b", 6, None),
    ]
    assert machine.deadline is None


def test_waiting_for_the_last_step_of_another_extends_the_slice():
    machine = TimeSlices()
    feed(machine, 0.0, TimeSliceRequested("a"), TimeSliceRequested("b"))

    assert feed(machine, 0.05, TimeSliceEnded("a", 3, SLICE_S, more=True, left_s=0.004)) == [
        GiveTimeSlice("b", 4, SLICE_S + 0.004)
    ]
    assert feed(machine, 0.1, TimeSliceEnded("b", 4, SLICE_S + 0.004, more=True)) == [
        GiveTimeSlice("a", 5, SLICE_S)
    ]


def test_slices_begin_when_steps_become_long_or_a_worker_joins():
    machine = TimeSlices()
    feed(machine, 0.0, TimeSliceRequested("a", step_s=0.01), TimeSliceRequested("b", step_s=0.02))
    assert [member.unlimited for member in machine.members.values()] == [True, True]

    assert feed(machine, 1.0, TimeSliceRequested("b", step_s=0.3)) == [
        GiveTimeSlice("b", 3, 0.0),
        GiveTimeSlice("a", 4, SLICE_S),
    ]
    feed(machine, 1.1, TimeSliceEnded("a", 4, SLICE_S, more=True, step_s=0.01))  # b's has seq 5
    assert feed(machine, 1.2, TimeSliceEnded("b", 5, SLICE_S, more=True, step_s=0.02)) == [
        GiveTimeSlice("a", 6, None),
        GiveTimeSlice("b", 7, None),
    ]
    assert feed(machine, 2.0, TimeSliceRequested("c", step_s=0.021)) == [
        GiveTimeSlice("b", 8, 0.0),
        GiveTimeSlice("c", 9, 0.0),
        GiveTimeSlice("a", 10, SLICE_S),
    ]
    assert feed(machine, 2.0, WorkerExited("c")) == [
        GiveTimeSlice("b", 11, None),
        GiveTimeSlice("a", 12, None),
    ]


def test_an_overrun_is_paid_even_if_the_next_steps_are_short():
    machine = TimeSlices()
    feed(
        machine, 0.0, TimeSliceRequested("a", step_s=0.01), TimeSliceRequested("b", step_s=0.3)
    )  # a's slice has seq 3
    feed(machine, 0.1, TimeSliceEnded("a", 3, SLICE_S, more=True, step_s=0.01))  # b's has seq 4
    time_slices = feed(machine, 0.4, TimeSliceEnded("b", 4, 0.3, more=True, step_s=0.3))
    assert feed(machine, 0.4, TimeSliceRequested("b", step_s=0.01)) == []

    while time_slices[-1].model == "a":
        time_slices += feed(
            machine, 1.0, TimeSliceEnded("a", time_slices[-1].seq, SLICE_S, more=True, step_s=0.01)
        )
    assert len(time_slices) - 1 == round(0.3 / SLICE_S)
    seq = time_slices[-1].seq
    commands = feed(machine, 1.0, TimeSliceEnded("b", seq, SLICE_S, more=True, step_s=0.01))
    assert commands == [GiveTimeSlice("a", seq + 1, None), GiveTimeSlice("b", seq + 2, None)]


def test_workers_of_different_weights_get_slices_even_with_short_steps():
    machine = TimeSlices()

    assert feed(
        machine, 0.0, TimeSliceRequested("a", 1.0, 0.001), TimeSliceRequested("b", 2.0, 0.001)
    ) == [
        GiveTimeSlice("a", 1, None),
        GiveTimeSlice("b", 2, 0.0),
        GiveTimeSlice("a", 3, SLICE_S),
    ]


names = st.sampled_from(["a", "b", "c"])
step_times = st.none() | st.floats(0, 0.1)
left = st.just(0.0) | st.floats(0, 0.1)
spoken = st.one_of(
    st.builds(TimeSliceRequested, names, st.sampled_from([0.25, 1.0, 1.0, 4.0]), step_times),
    st.builds(
        TimeSliceEnded, names, st.integers(0, 30), st.floats(0, 20), st.booleans(), step_times, left
    ),
    st.builds(WeightChanged, names, st.sampled_from([0.25, 1.0, 4.0])),
    st.builds(WorkerExited, names),
    st.builds(AlarmFired),
)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 2), spoken), max_size=80))
def test_some_worker_computes_after_any_events(history):
    machine = TimeSlices()
    now, last_seq = 0.0, 0
    for passed, event in history:
        now += passed
        for give in machine.handle(event, now):
            assert give.seq > last_seq
            last_seq = give.seq
        machine.check()


class Daemon:
    """The daemon between simulated workers, and the accelerator that they share."""

    def __init__(self) -> None:
        self.machine = TimeSlices()
        self.accelerator = asyncio.Lock()  # first come, first served
        self.workers: dict[str, SimulatedWorker] = {}
        self._alarm: asyncio.TimerHandle | None = None

    def handle(self, event: Event) -> None:
        loop = asyncio.get_running_loop()
        for give in self.machine.handle(event, loop.time()):
            time_slice = wire.TimeSlice(seq=give.seq, slice_s=give.slice_s)
            loop.call_later(HOP_S, self.workers[give.model].take, time_slice)
        self.machine.check()
        if self._alarm is not None:
            self._alarm.cancel()
        if self.machine.deadline is not None:
            self._alarm = loop.call_at(self.machine.deadline, self.handle, AlarmFired())


HOP_S = 0.0003
"""Seconds of a message from a worker to the daemon, or back."""


class SimulatedWorker:
    """A worker with a real `TimeSliceGate`. Its steps take `step_s`, or repeat a `cycle`."""

    def __init__(self, daemon: Daemon, name: str, step_s: float, weight: float = 1.0) -> None:
        self.steps: list[tuple[float, float]] = []
        self.work = 10**9
        """Steps left."""
        self.alive = True
        self.cycle: list[tuple[bool, float]] = []
        """Steps to repeat: for each, whether it prefills, and its seconds."""
        self._daemon, self._name, self._step_s, self._weight = daemon, name, step_s, weight
        self._gate = TimeSliceGate(on=True)
        self._woken = asyncio.Event()
        daemon.workers[name] = self

    def take(self, time_slice: wire.TimeSlice) -> None:
        if self.alive:
            self._send(self._gate.apply(time_slice, asyncio.get_running_loop().time()))
            self._woken.set()

    def give(self, steps: int) -> None:
        self.work = steps
        self._woken.set()

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        while self.alive:
            self._woken.clear()
            if not self.work:
                self._send(self._gate.work_done(clock()))
                await self._woken.wait()
                continue
            reads, step_s = self._next_step
            self._send(self._gate.request_slice(prefills=reads))
            if not self._gate.is_open:
                await self._woken.wait()
                continue
            self._send(self._gate.before_step(clock()))
            async with self._daemon.accelerator:
                start = clock()
                await asyncio.sleep(step_s)
                self.steps.append((start, clock()))
            self.work -= 1
            self._send(self._gate.after_step(clock()))

    @property
    def _next_step(self) -> tuple[bool, float]:
        if not self.cycle:
            return False, self._step_s
        return self.cycle[len(self.steps) % len(self.cycle)]

    def seconds(self, start: float, end: float) -> float:
        return sum(b - a for a, b in self.steps if a >= start and b <= end)

    def _send(self, report: wire.TimeSliceOver | wire.TimeSliceRequested | None) -> None:
        event: Event
        match report:
            case None:
                return
            case wire.TimeSliceRequested():
                event = TimeSliceRequested(self._name, self._weight, report.step_s)
            case wire.TimeSliceOver():
                event = TimeSliceEnded(
                    *(self._name, report.seq, report.used_s, report.more),
                    *(report.step_s, report.left_s),
                )
        if self.alive:
            asyncio.get_running_loop().call_later(HOP_S, self._daemon.handle, event)


async def simulate(
    seconds: float, *steps: tuple[float, float]
) -> tuple[list[SimulatedWorker], float, float]:
    """Simulate workers with these step times and weights; return them, the start and the end."""
    daemon = Daemon()
    workers = [SimulatedWorker(daemon, f"m{i}", *step) for i, step in enumerate(steps)]
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    start = asyncio.get_running_loop().time()
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    return workers, start, start + seconds


@pytest.mark.parametrize(
    "steps",
    [
        ((0.003, 1.0), (0.3, 1.0)),
        ((0.003, 1.0), (0.3, 1.0), (0.02, 1.0)),
        ((0.005, 4.0), (0.12, 1.0), (0.05, 0.5)),
    ],
)
@simulated
async def test_time_is_shared_by_weight_to_within_a_step_and_a_slice(steps):
    workers, start, end = await simulate(60.0, *steps)
    weights = sum(weight for _, weight in steps)
    used = [worker.seconds(start, end) for worker in workers]

    assert sum(used) > 0.97 * 60, "the accelerator was idle"
    for decode_s, (_, weight) in zip(used, steps, strict=True):
        bound = 2 * max(step for step, _ in steps) + 2 * SLICE_S * max(w for _, w in steps)
        assert abs(decode_s - sum(used) * weight / weights) < bound


@simulated
async def test_a_decode_gets_its_slice_between_the_chunks_of_another_prompt():
    (decoder, reader), start, _ = await simulate(30.0, (0.005, 1.0), (0.3, 1.0))
    gaps = [b[0] - a[1] for a, b in pairwise(decoder.steps) if a[0] > start + 1]
    _, *chunks = reader.steps  # the first one began before any answer could arrive
    overlaps = [(a, b) for a in decoder.steps for b in chunks if a[0] < b[1] - 1e-9 and b[0] < a[1]]

    assert max(gaps) < 0.3 + 3 * HOP_S + 0.001, "two chunks in a row"
    assert not overlaps, "both compute at once"


async def shared_with(
    seconds: float, *cycle: tuple[bool, float]
) -> tuple[SimulatedWorker, SimulatedWorker]:
    """Simulate a worker with decode steps of 4 ms, and one that repeats `cycle`; return both."""
    daemon = Daemon()
    decoder, other = SimulatedWorker(daemon, "a", 0.004), SimulatedWorker(daemon, "b", 0.004)
    other.cycle = list(cycle)
    tasks = [asyncio.create_task(worker.run()) for worker in (decoder, other)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    return decoder, other


@pytest.mark.parametrize("chunk_s", [0.06, 0.3, 1.0])
@pytest.mark.parametrize("decodes", [1, 3, 10, 50])
@simulated
async def test_a_worker_that_alternates_prefill_and_decode_does_not_take_all_time(chunk_s, decodes):
    start = asyncio.get_running_loop().time()
    cycle = [(True, chunk_s), *[(False, 0.004)] * decodes]
    decoder, chat = await shared_with(60.0, *cycle)
    decode_s, chat_s = decoder.seconds(start, start + 60), chat.seconds(start, start + 60)

    assert decode_s + chat_s > 0.97 * 60, "the accelerator was idle"
    assert decode_s > 20


@simulated
async def test_many_short_chunks_do_not_hide_the_long_ones_between_them():
    start = asyncio.get_running_loop().time()
    decoder, reader = await shared_with(60.0, *[(True, 0.006)] * 19, (True, 0.3))
    overlaps = [
        (a, b)
        for a in decoder.steps
        for b in reader.steps[20:]  # by then the gate has measured a long chunk
        if a[0] < b[1] - 1e-9 and b[0] < a[1]
    ]

    assert not overlaps, "both compute at once"
    assert decoder.seconds(start, start + 60) > 0.45 * 60


@pytest.mark.parametrize("weight", [1.0, 2.0])
@simulated
async def test_switching_costs_less_than_one_percent(weight):
    workers, start, end = await simulate(20.0, (0.004, weight), (0.004, 1.0))

    assert sum(worker.seconds(start, end) for worker in workers) > 0.99 * 20


@simulated
async def test_workers_with_short_steps_compute_at_once_until_one_prefills():
    daemon = Daemon()
    first, second = SimulatedWorker(daemon, "a", 0.004), SimulatedWorker(daemon, "b", 0.006)
    tasks = [asyncio.create_task(worker.run()) for worker in (first, second)]
    loop = asyncio.get_running_loop()
    await asyncio.sleep(1.0)
    calm, seen = loop.time(), daemon.machine.seq
    await asyncio.sleep(5.0)
    assert daemon.machine.seq == seen, "slices that are not needed"
    gaps = [b[0] - a[1] for a, b in pairwise(first.steps) if a[0] > calm]
    assert max(gaps) < 0.006 + 1e-6, "a worker waits for a slice"

    second._step_s = 0.3
    start = loop.time()
    await asyncio.sleep(10.0)
    assert daemon.machine.seq > seen
    assert first.seconds(start, start + 10.0) > 0.4 * 10, "the prompt takes all time"
    second._step_s = 0.006
    await asyncio.sleep(3.0)
    seen = daemon.machine.seq
    await asyncio.sleep(3.0)
    assert daemon.machine.seq == seen, "slices that are not needed any more"
    for task in tasks:
        task.cancel()


@simulated
async def test_a_stopped_worker_delays_the_others_once_and_returns():
    daemon = Daemon()
    first, second = SimulatedWorker(daemon, "a", 0.005), SimulatedWorker(daemon, "b", 0.005)
    tasks = [asyncio.create_task(worker.run()) for worker in (first, second)]
    loop = asyncio.get_running_loop()
    await asyncio.sleep(1.0)
    stopped, end = loop.time(), loop.time() + 20.0
    first._step_s = 20.0  # a step in which the process is stopped
    await asyncio.sleep(20.0)
    gaps = [b[0] - a[1] for a, b in pairwise(second.steps) if a[1] > stopped - 1]

    assert sorted(gaps)[-2] < 2 * SLICE_S
    assert max(gaps) < GRACE_S + 2 * SLICE_S
    first._step_s = 0.005
    await asyncio.sleep(20.0)
    assert first.seconds(end, end + 20.0) > 5.0
    for task in tasks:
        task.cancel()


@simulated
async def test_a_worker_with_intermittent_work_neither_starves_nor_is_starved():
    daemon = Daemon()
    steady, guest = SimulatedWorker(daemon, "a", 0.1), SimulatedWorker(daemon, "b", 0.004)
    guest.work = 0
    tasks = [asyncio.create_task(worker.run()) for worker in (steady, guest)]
    waits = []
    loop = asyncio.get_running_loop()
    for _ in range(40):
        await asyncio.sleep(0.37)
        start = loop.time()
        guest.give(3)
        await until(lambda: not guest.work)
        waits.append(loop.time() - start)

    assert max(waits) < 0.1 + SLICE_S + 3 * 0.004 + 0.02
    assert len(steady.steps) > 0.5 * 40 * 0.37 / 0.1
    for task in tasks:
        task.cancel()


@simulated
async def test_slices_go_to_the_processes_that_requested_them():
    async with world(load=("a", "b")) as it:
        first, second = it.spawn.last("a"), it.spawn.last("b")
        first.report(wire.TimeSliceRequested())
        second.report(wire.TimeSliceRequested())
        await asyncio.sleep(0.1)
        time_slices = defaultdict(list)
        for process in (first, second):
            time_slices[process] = [c for c in process.commands if isinstance(c, wire.TimeSlice)]

        assert [time_slice.slice_s for time_slice in time_slices[first]] == [None, SLICE_S]
        assert [time_slice.slice_s for time_slice in time_slices[second]] == [0.0]
        first.die(-9)
        await asyncio.sleep(0.1)
        assert second.commands[-1].slice_s is None
        assert it.model("b").state == "ready"


@simulated
async def test_a_model_has_the_weight_of_its_policy():
    known = {"a": KnownModel("a", policy=ModelPolicy(weight=3.0)), "b": KnownModel("b")}
    async with world(load=("b",), known=known) as it:
        await it.client().ask(messages.Load, model="a")
        for name in "ab":
            it.spawn.last(name).report(wire.TimeSliceRequested())
        await asyncio.sleep(0.1)

        assert it.spawn.last("a").commands[-1].slice_s == pytest.approx(3 * SLICE_S)


@simulated
async def test_a_new_weight_takes_effect_with_the_next_slice():
    async with world(load=("a", "b")) as it:
        first, second = it.spawn.last("a"), it.spawn.last("b")
        for process in (first, second):
            process.report(wire.TimeSliceRequested())
        await it.client().ask(messages.Load, model="b", policy=PolicyChange(weight=3.0))
        await asyncio.sleep(0.1)
        time_slice = first.commands[-1]
        first.report(wire.TimeSliceOver(seq=time_slice.seq, used_s=SLICE_S, more=True))
        await asyncio.sleep(0.1)

        assert second.commands[-1].slice_s == pytest.approx(3 * SLICE_S)


def test_different_weights_bring_slices_back():
    machine = TimeSlices()
    feed(machine, 0.0, TimeSliceRequested("a", step_s=0.01), TimeSliceRequested("b", step_s=0.01))

    assert feed(machine, 1.0, WeightChanged("a", 2.0)) == [
        GiveTimeSlice("b", 3, 0.0),
        GiveTimeSlice("a", 4, 2 * SLICE_S),
    ]
    assert feed(machine, 2.0, WeightChanged("a", 1.0)) == [
        GiveTimeSlice("b", 5, None),
        GiveTimeSlice("a", 6, None),
    ]
    assert feed(machine, 2.0, WeightChanged("c", 1.0)) == []


@simulated
async def test_a_process_that_never_ends_its_slice_loses_it():
    async with world(load=("a", "b")) as it:
        for name in "ab":
            it.spawn.last(name).report(wire.TimeSliceRequested())
        await asyncio.sleep(GRACE_S + SLICE_S + 0.1)

        assert it.spawn.last("b").commands[-1].slice_s is None
