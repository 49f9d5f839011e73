"""Forecasts: the steps that the governor would take, computed on a copy of its state."""

from __future__ import annotations

from copy import deepcopy

import pytest

from actors.machines.forecast import Question, forecast
from actors.machines.governor import Governor
from actors.machines.governor_events import (
    AlarmFired,
    Evict,
    LoadRequested,
    ModelReady,
    Reclaim,
    ReclaimableReported,
    ReclaimFinished,
)
from actors.machines.ledger import GrantDecision, Ledger, MemoryRequest, WorkerExited
from protocol.costs import Costs, KVCost
from protocol.forecast import Forecast
from protocol.policy import ModelPolicy
from protocol.types import Reclaimable

BUDGET = 100_000
SCHEMES = ["k8v8", "k8v4", "k4v4"]


def costs(base: int = 10_000) -> Costs:
    """A page takes 100 bytes at level 0. A row of 950 tokens: 14 pages and a tail of 100 bytes."""
    kind = KVCost(layers=1, page_bytes=(90, 60, 45), charges=(100, 66, 50))
    return Costs(
        weights_bytes=base // 2,
        base_bytes=base,
        unit_bytes=100,
        row_bytes=100,
        first_units=20,
        step=256,
        levels=3,
        kinds=[kind],
    )


class Simulation:
    """A governor with models.

    It can also carry out the governor's commands, to check a forecast against what happens.
    """

    def __init__(self) -> None:
        self.governor = Governor(Ledger(BUDGET))
        self.now = 1000.0
        self.freed: list[tuple[str, str]] = []

    def add_model(
        self, name: str, granted: int, policy: ModelPolicy | None = None, **reclaimable
    ) -> None:
        self.governor.handle(LoadRequested(name, policy or ModelPolicy()), self.now)
        self.governor.handle(MemoryRequest(name, 1, granted), self.now)
        self.governor.handle(ModelReady(name), self.now)
        self.governor.handle(ReclaimableReported(name, Reclaimable(**reclaimable)), self.now)
        self.now += 60.0
        self.governor.handle(ReclaimableReported(name, Reclaimable(**reclaimable)), self.now)

    def ask(self, rows: int, context: int = 950, model: str = "new") -> Forecast:
        before = deepcopy(self.governor)
        question = Question(model, costs(), SCHEMES, rows, context, max_rows=512)
        found = forecast(
            question, self.governor, self.now, source="/m", state="not loaded", measured=True
        )
        assert self.governor == before, "the forecast changed the governor"
        return found

    def is_granted(self, total: int, model: str = "new") -> bool:
        """Request memory for real, perform the commands, and return whether it was granted."""
        self.governor.handle(LoadRequested(model, ModelPolicy()), self.now)
        pending = self.governor.handle(MemoryRequest(model, 1, total), self.now)
        for _ in range(50):
            self.now += 1.0
            for command in pending:
                if (
                    isinstance(command, GrantDecision)
                    and command.model == model
                    and command.granted
                ):
                    return True
            pending = [
                event for command in pending for event in self._perform(command)
            ] or self._fire_alarm()
        return False

    def _perform(self, command):
        governor, now = self.governor, self.now
        match command:
            case Reclaim(model=model):
                self.freed.append((command.method, model))
                held = governor.ledger.grants[model]
                request = MemoryRequest(model, 99 + command.seq, held - command.wanted_bytes)
                over = ReclaimFinished(model, command.seq, command.wanted_bytes, exhausted=False)
                return [*governor.handle(request, now), *governor.handle(over, now)]
            case Evict(model=model):
                self.freed.append(("idle", model))
                return governor.handle(WorkerExited(model), now)
        return []

    def _fire_alarm(self):
        return self.governor.handle(AlarmFired(), self.now)


def test_rows_that_fit_need_no_steps():
    simulation = Simulation()
    found = simulation.ask(rows=10)

    assert found.verdict == "fits"
    assert found.missing_bytes == 0
    assert not found.steps
    assert [level.total_bytes for level in found.levels] == [
        10_000 + 10 * 15 * 100,
        10_000 + 10 * 11 * 100,  # 14 pages of 66 bytes take ten units of 100
        10_000 + 10 * 8 * 100,
    ]
    assert [level.max_rows for level in found.levels] == [60, 81, 112]
    assert found.idle_bytes == 10_000 + 20 * 100


def test_the_governor_takes_the_forecast_steps():
    simulation = Simulation()
    simulation.add_model(
        "busy", 50_000, base=20_000, rows=4, spare=3_000, levels=(8_000, 4_000), preempt=5_000
    )
    simulation.add_model("idle", 30_000, base=30_000)
    found = simulation.ask(rows=14)

    assert found.missing_bytes == 31_000 - 20_000
    assert [(it.method, it.model, it.nbytes) for it in found.steps] == [
        ("spare", "busy", 3_000),
        ("precision", "busy", 8_000),
    ]
    assert found.steps[1].level == 1
    assert found.verdict == "makes_room"
    assert simulation.is_granted(found.levels[0].total_bytes)
    assert simulation.freed == [(it.method, it.model) for it in found.steps]


def test_idle_models_are_evicted_before_rows_are_preempted():
    simulation = Simulation()
    simulation.add_model("busy", 60_000, base=20_000, rows=4, preempt=20_000)
    simulation.add_model("idle", 30_000, base=30_000)
    found = simulation.ask(rows=26)

    assert [(it.method, it.model, it.nbytes) for it in found.steps] == [
        ("precision", "new", 10_400),
        ("idle", "idle", 30_000),
    ], "with the eviction, the second step down is not needed"
    # 79,000 bytes at level 0. Level 1 saves 18,400 of them, level 2 another 13,800.
    preempting = simulation.ask(rows=46)
    assert [it.method for it in preempting.steps] == ["precision", "precision", "idle"]
    assert preempting.shortfall_bytes == 79_000 - 10_000 - 18_400 - 13_800 - 30_000
    assert preempting.verdict == "waits", "no row is preempted beyond a fair share"


def test_the_models_own_rows_start_lower_before_rows_of_others_are_preempted():
    simulation = Simulation()
    simulation.add_model("busy", 70_000, base=20_000, rows=4, preempt=30_000)
    found = simulation.ask(rows=20)

    assert [(it.method, it.model, it.nbytes, it.level) for it in found.steps] == [
        ("precision", "new", 8_000, 1),
        ("precision", "new", 2_000, 2),
    ]
    assert found.verdict == "makes_room"


@pytest.mark.parametrize(("rows", "verdict"), [(10, "fits"), (500, "never"), (61, "waits")])
def test_verdicts(rows, verdict):
    simulation = Simulation()
    if verdict == "waits":
        simulation.add_model("kept", 60_000, ModelPolicy(pinned=True), base=60_000)

    assert simulation.ask(rows=rows).verdict == verdict


def test_new_rows_of_a_loaded_model_are_added_to_its_running_ones():
    simulation = Simulation()
    simulation.add_model("new", 40_000, base=12_000, rows=3, spare=5_000)
    found = simulation.ask(rows=10)

    assert found.held_bytes == 40_000
    assert found.levels[0].total_bytes == 35_000 + 10 * 15 * 100
    assert found.missing_bytes == 0


def test_a_row_reserves_its_first_tokens_and_grows_to_its_most() -> None:
    level = Simulation().ask(1, context=950).levels[0]
    assert (level.start_bytes, level.row_bytes) == ((8 + 1) * 100, (14 + 1) * 100)
    short = Simulation().ask(1, context=100).levels[0]
    assert short.start_bytes == short.row_bytes
