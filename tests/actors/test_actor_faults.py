"""Failures of the daemon's own actors: which of them end the daemon."""

from __future__ import annotations

import pytest

from actors.system import SystemFault
from tests.sim.fakes import SLOW
from tests.sim.loop import simulated, until
from tests.sim.world import world


@simulated
async def test_an_inconsistent_core_actor_ends_the_system_and_its_workers():
    async with world(faults=True) as w:
        w.system._governor.machine.devices[0].ledger.grants["ghost"] = 5000
        w.system._worker_services.governor.tell("nonsense")
        with pytest.raises(SystemFault, match="above the budget"):
            await w.system.finished

        assert w.spawn.last("demo").signals == ["kill"]
        w.system._governor.machine.devices[0].ledger.grants.clear()


@simulated
async def test_a_core_actor_with_consistent_state_survives_a_failure():
    async with world(faults=True) as w:
        client = w.client()
        key = client.generate(max_tokens=30)
        await until(lambda: client.count(key) == 1)
        w.system._client_services.router.tell("nonsense")

        assert (await client.end(key)).reason == "length"
        assert w.notices_of("actor_failed")[0].fields["actor"] == "router"
        for _ in range(4):
            w.system._client_services.router.tell("nonsense")
        with pytest.raises(SystemFault):
            await w.system.finished


@simulated
async def test_a_failing_client_actor_ends_its_connection_only():
    async with world({"demo": [SLOW]}, faults=True) as w:
        bad, good = w.client(), w.client()
        lost, kept = bad.generate(max_tokens=1000), good.generate(max_tokens=3)
        await until(lambda: bad.count(lost) == 1)
        bad.connection._client.tell("nonsense")

        assert (await good.end(kept)).reason == "length"
        assert bad.closed
        assert bad.events[""][0].error.code == "internal"
        await until(lambda: w.model().requests == 0, 10)
