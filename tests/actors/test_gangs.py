"""Models over several ranks: one lifecycle, one grant, one stream."""

from __future__ import annotations

import asyncio

import pytest

from actors.machines.governor_events import EndWorker, LoadRequested
from actors.machines.watchdog import WatchdogTimeouts
from actors.readings import FRESH_S
from protocol.errors import InvalidModel, ModelExists
from protocol.gang import DIVERGED
from protocol.memory_bounds import STARTING_BYTES, limit_bytes
from protocol.policy import ModelPolicy, PolicyChange
from protocol.types import MemoryUse, RankStatus, WorkerStats
from protocol.worker import LoadModel, Stats
from tests.actors.governor_simulation import Simulation
from tests.actors.test_governor_limits import PID, measured
from tests.sim.fakes import SLOW, Script, expected
from tests.sim.loop import simulated, until
from tests.sim.world import world

MIB = 2**20
THREE = PolicyChange(ranks=3)


@simulated
async def test_a_gang_is_one_model_whose_status_shows_its_ranks():
    async with world({"demo": [Script(start_s=2.0)]}, load=(), budget=4096 * MIB) as w:
        loading = asyncio.create_task(w.system.load("demo", policy=THREE))
        await until(lambda: w.model() and w.model().ranks)
        process = w.spawn.last("demo")
        for place, pid in enumerate(process.pids):
            w.system._memory.sizes[pid] = (10 + place) * MIB
        assert [it.state for it in w.model().ranks] == ["starting"] * 3
        await loading
        await until(lambda: w.model().ranks[2].footprint_bytes, FRESH_S + 2)

        model = w.model()
        assert model.ranks == [
            RankStatus(pid=pid, state="running", footprint_bytes=(10 + place) * MIB)
            for place, pid in enumerate(process.pids)
        ]
        assert (model.worker_pid, model.stats.memory.footprint) == (process.pid, 33 * MIB)
        assert w.system._governor.machine.devices[0].accounts["demo"].measured_bytes == 33 * MIB
        load = next(it for it in process.commands if isinstance(it, LoadModel))
        assert load.ranks == 3
        text = await w.metrics.text()
        (line,) = [it for it in text.splitlines() if 'demo",rank="2"' in it]
        name, value = line.split()
        assert (name.partition("{")[0], float(value)) == ("kvd_rank_footprint_bytes", 12 * MIB)


@simulated
async def test_a_load_keeps_the_ranks_of_the_model_unless_it_names_others():
    async with world(load=()) as w:
        await w.system.load("demo", policy=THREE)
        await w.system.load("demo", policy=PolicyChange(pinned=True))
        assert w.model().pinned
        assert len(w.model().ranks) == 3
        with pytest.raises(ModelExists, match="different ranks"):
            await w.system.load("demo", policy=PolicyChange(ranks=1))
        await w.system.unload("demo")
        await w.system.load("demo", policy=PolicyChange(pinned=True))
        await w.system.load("demo", policy=PolicyChange(ranks=1))
        assert w.model().ranks == []


@simulated
async def test_a_model_of_one_process_has_no_ranks():
    async with world() as w:
        assert w.model().ranks == []
        assert "kvd_rank_footprint_bytes{" not in await w.metrics.text()


@simulated
@pytest.mark.parametrize("stuck", [0, 1, 2])
async def test_a_rank_that_never_starts_costs_a_new_start(stuck):
    scripts = {"demo": [Script(stuck_rank=stuck), Script()]}
    async with world(scripts, load=()) as w:
        loading = asyncio.create_task(w.system.load("demo", policy=THREE))
        await until(lambda: w.spawn.processes["demo"])
        first = w.spawn.last("demo")
        await until(lambda: [it.state for it in w.model().ranks].count("running") == 2)
        assert w.state() == "spawning"
        assert w.model().ranks[stuck].state == "starting"
        await until(lambda: w.spawn.last("demo") is not first, WatchdogTimeouts().spawning_s + 30)
        await loading
        assert not first.commands, "the load began without all ranks"
        assert (w.model().restarts, w.state()) == (1, "ready")
        assert not set(first.pids) & set(w.spawn.last("demo").pids)


@simulated
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("returncode", [-9, -11, DIVERGED])
async def test_requests_of_a_dead_gang_continue_token_for_token(rank, returncode):
    async with world({"demo": [SLOW]}, load=()) as w:
        await w.system.load("demo", policy=THREE)
        client = w.client()
        key = client.generate(max_tokens=8)
        await until(lambda: client.count(key) == 3)
        first = w.spawn.last("demo")
        first.die(returncode, rank)
        await until(lambda: w.state() == "backoff")
        assert not first.alive
        message = w.model().error.message
        assert f"rank {rank} of the worker of demo" in message
        assert ("compute something else" in message) == (returncode == DIVERGED)
        assert (await client.end(key)).reason == "length"
        assert client.tokens(key) == expected(8)
        (exit_notice,) = w.notices_of("worker_exit")
        assert (exit_notice.fields["rank"], exit_notice.fields["returncode"]) == (rank, returncode)
        assert exit_notice.fields["pid"] == first.pids[rank]


@simulated
async def test_memory_counts_as_free_after_the_last_ranks_exit():
    async with world({"demo": [Script(kill_s=5.0), Script()]}, load=()) as w:
        await w.system.load("demo", policy=THREE)
        first = w.spawn.last("demo")
        first.die(-11, 1)
        await until(lambda: len(first._gang.alive) == 2, 6)
        assert w.system.status().granted_bytes == 100
        assert w.state() == "ready"
        await until(lambda: w.state() == "backoff", 6)
        assert not first._gang.alive
        assert w.system.status().granted_bytes == 0


@simulated
async def test_a_gang_above_its_limit_is_ended():
    policy = PolicyChange(ranks=2)
    async with world({"big": [Script(load_s=300.0)]}, budget=4096 * MIB) as w:
        loading = asyncio.create_task(w.system.load("big", policy=policy))
        await until(lambda: w.spawn.processes["big"])
        sizes, pids = w.system._memory.sizes, w.spawn.last("big").pids
        sizes[pids[0]] = sizes[pids[1]] = 380 * MIB  # each below the limit of one process
        await asyncio.sleep(20)
        assert w.state("big") == "loading"
        sizes[pids[1]] = 390 * MIB
        with pytest.raises(InvalidModel, match="above its limit of 768 MiB"):
            await loading


@simulated
async def test_idle_gangs_are_read_rarely():
    async with world(load=()) as w:
        await w.system.load("demo", policy=THREE)
        process, before = w.spawn.last("demo"), 0
        for second in range(90):
            process.report(Stats(stats=WorkerStats(memory=MemoryUse(footprint=1000))))
            await asyncio.sleep(1.0)
            before = w.system._memory.reads if second == 30 else before
        assert 5 <= w.system._memory.reads - before <= 10


def test_the_limit_before_the_first_grant_counts_each_process():
    sim = Simulation(a=5000)
    sim.apply(LoadRequested("b", ModelPolicy(ranks=2)))
    assert not sim.apply(measured(b=2 * STARTING_BYTES))
    assert sim.governor.ledger.excess_bytes == 0
    over = 2 * STARTING_BYTES + 5
    sim.apply(measured(b=over))
    assert sim.apply(measured(b=over)) == [EndWorker("b", PID, over, limit_bytes(0, 2))]
    assert limit_bytes(0, 2) == 2 * STARTING_BYTES
