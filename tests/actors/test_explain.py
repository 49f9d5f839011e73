"""The `explain` operation: numbers from a worker or from a model's files, and errors."""

from __future__ import annotations

import msgspec
import pytest

from actors.status import KnownModel
from protocol.costs import Costs, Estimate, KVCost
from protocol.errors import InvalidRequest, UnknownModel
from protocol.explain_messages import Explain
from protocol.forecast import Forecast
from protocol.kv import KVSpec
from protocol.policy import ModelPolicy
from tests.sim import fakes
from tests.sim.loop import simulated
from tests.sim.world import World, world

COSTS = Costs(
    weights_bytes=60,
    base_bytes=100,
    unit_bytes=10,
    row_bytes=10,
    first_units=2,
    step=64,
    levels=2,
    kinds=[KVCost(layers=1, page_bytes=(9, 6), charges=(10, 7))],
)
ESTIMATE = Estimate(costs=COSTS, schemes=["k8v8", "k8v4"], context_length=640)


async def estimate_model(source: str, kv: KVSpec, ranks: int) -> Estimate:
    if source == "/no":
        raise UnknownModel("there is no folder /no", source=source)
    assert kv in (KVSpec(), KVSpec(v_bits=4))
    costs = msgspec.structs.replace(COSTS, base_bytes=ranks * COSTS.base_bytes)
    return msgspec.structs.replace(ESTIMATE, costs=costs)


async def ask(it: World, **fields) -> Forecast:
    answer = await it.client().ask(Explain, **fields)
    return answer.forecast


@simulated
async def test_a_model_that_is_not_loaded_is_estimated_from_its_files():
    known = {"known": KnownModel("/known", KVSpec(v_bits=4), ModelPolicy(max_context=320))}
    async with world(load=(), known=known, estimate_model=estimate_model) as it:
        found = await ask(it, model="/m", rows=2)
        assert (found.state, found.measured, found.source) == ("not loaded", False, "/m")
        assert (found.context, found.rows, found.verdict) == (640, 2, "fits")
        assert [level.total_bytes for level in found.levels] == [100 + 220, 100 + 160]
        short = await ask(it, model="/m", rows=2, context=128)
        assert short.levels[0].total_bytes == 100 + 60

        found = await ask(it, model="known", rows=2)
        assert (found.state, found.source, found.context) == ("comes on demand", "/known", 320)


@simulated
async def test_ranks_are_those_of_the_known_model_or_of_the_question():
    known = {"known": KnownModel("/known", policy=ModelPolicy(ranks=3))}
    async with world(load=(), known=known, estimate_model=estimate_model) as it:
        once = await ask(it, model="/m", rows=2)
        twice = await ask(it, model="/m", rows=2, ranks=2)
        thrice = await ask(it, model="known", rows=2)
        base = COSTS.base_bytes
        other = await ask(it, model="known", rows=2, ranks=2)
        totals = [one.levels[0].total_bytes for one in (once, twice, thrice, other)]
        assert totals == [totals[0] + more * base for more in (0, 1, 2, 1)]


@simulated
async def test_other_ranks_of_a_loaded_model_are_estimated(monkeypatch):
    info = msgspec.structs.replace(fakes.INFO, costs=COSTS, kv_schemes=["k8v8", "k4v4"])
    monkeypatch.setattr(fakes, "INFO", info)
    async with world(estimate_model=estimate_model) as it:
        found = [await ask(it, model="demo", rows=2, ranks=ranks) for ranks in (None, 1, 2)]
        assert [one.measured for one in found] == [True, True, False]


@simulated
async def test_a_loaded_models_numbers_come_from_its_worker(monkeypatch):
    costs = msgspec.structs.replace(COSTS, base_bytes=50)
    info = msgspec.structs.replace(fakes.INFO, costs=costs, kv_schemes=["k8v8", "k4v4"])
    monkeypatch.setattr(fakes, "INFO", info)
    async with world() as it:
        found = await ask(it, model="demo", rows=3, context=640)

        assert (found.state, found.measured, found.held_bytes) == ("ready", True, 100)
        assert [level.scheme for level in found.levels] == ["k8v8", "k4v4"]
        assert found.levels[0].total_bytes == 50 + 3 * 110


@simulated
async def test_if_the_worker_reports_no_costs_the_files_are_used():
    async with world(estimate_model=estimate_model) as it:
        found = await ask(it, model="demo")

        assert (found.state, found.measured) == ("ready", False)


@simulated
async def test_rows_and_context_are_at_most_what_can_run():
    async with world(load=(), estimate_model=estimate_model) as it:
        found = await ask(it, model="/m", rows=100, context=100_000)
        assert (found.rows, found.context) == (32, 640)
        assert found.levels[0].total_bytes == 100 + 32 * 110
        short = await ask(it, model="/m", context=1)
        assert [level.max_rows for level in short.levels] == [32, 32]


@simulated
async def test_errors_name_the_problem():
    async with world(estimate_model=estimate_model) as it:
        with pytest.raises(UnknownModel, match="no folder"):
            await ask(it, model="/no")
        with pytest.raises(InvalidRequest, match="rows"):
            await ask(it, model="demo", rows=-1)
        with pytest.raises(InvalidRequest, match="context"):
            await ask(it, model="demo", context=0)
    async with world(load=()) as it:
        with pytest.raises(UnknownModel, match="not loaded"):
            await ask(it, model="demo")
