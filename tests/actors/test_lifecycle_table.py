"""The lifecycle table: every state with every event."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from actors.machines import lifecycle as lc
from actors.machines import lifecycle_events as ev
from actors.machines.machine import InvalidTransition
from tests.actors.lifecycle_steps import EXCEEDED, NOW, WHY, feed

STATES: dict[str, ev.State] = {
    "Stopped": ev.Stopped(),
    "Spawning": ev.Spawning(NOW + 60),
    "Spawning+pid": ev.Spawning(NOW + 60, 7),
    "Loading": ev.Loading(7, NOW + 600),
    "Ready": ev.Ready(7, NOW + 120),
    "Ready+rows": ev.Ready(7, NOW + 120),
    "Draining": ev.Draining(7, NOW + 120),
    "Stopping": ev.Stopping(7, "asked", NOW + 10, "stopped"),
    "Stopping+no pid": ev.Stopping(None, "asked", NOW + 10, "stopped"),
    "Stopping+restart": ev.Stopping(7, "terminated", NOW + 5, "restart", WHY),
    "Stopping+failed": ev.Stopping(7, "asked", NOW + 10, "failed", WHY),
    "Backoff": ev.Backoff(NOW + 1, WHY),
    "Failed": ev.Failed(WHY),
}
EVENTS: dict[str, ev.Event] = {
    "start": ev.Start(),
    "drain": ev.Drain(),
    "halt": ev.Halt(),
    "spawned": ev.Spawned(7),
    "spawn failed": ev.SpawnFailed("no"),
    "up": ev.Started(),
    "alive": ev.SignOfLife(),
    "entered": ev.PhaseEntered("prefill"),
    "loaded": ev.Loaded(),
    "cannot load": ev.LoadFailed(WHY),
    "admit": ev.RequestAssigned("r"),
    "gained": ev.TokenGenerated(),
    "row over": ev.RequestFinished("a"),
    "blamed": ev.RequestBlamed(),
    "exit": ev.Exited(1),
    "kill": ev.Exited(-9),
    "fault": ev.Fault("nonsense"),
    "too large": EXCEEDED,
    "tick": ev.AlarmFired(),
}
NOT = None  # an invalid transition
# By state and event: the name of the next state, then the names of the commands.
EXPECTED: dict[str, dict[str, str | None]] = {
    "Stopped": {
        "start": "Spawning Spawn",
        "drain": "Stopped",
        "halt": "Stopped",
        "admit": "Stopped ReturnRequest",
        "blamed": "Stopped",
        "fault": "Stopped",
        "too large": "Stopped",
        "tick": "Stopped",
    },
    "Spawning": {
        "start": "Spawning",
        "drain": "Stopping",
        "halt": "Stopping",
        "spawned": "Spawning",
        "spawn failed": "Backoff ReleaseMemory",
        "admit": "Spawning ReturnRequest",
        "exit": "Backoff ReleaseMemory",
        "kill": "Backoff ReleaseMemory",
        "blamed": "Spawning",
        "fault": "Stopping",
        "too large": "Spawning",
        "tick": "Spawning",
    },
    "Spawning+pid": {
        "start": "Spawning",
        "drain": "Stopping SendStop",
        "halt": "Stopping SendStop",
        "spawned": "Spawning",
        "spawn failed": "Backoff ReleaseMemory",
        "up": "Loading SendLoad",
        "admit": "Spawning ReturnRequest",
        "exit": "Backoff ReleaseMemory",
        "kill": "Backoff ReleaseMemory",
        "blamed": "Spawning",
        "fault": "Stopping Kill",
        "too large": "Stopping Kill",
        "tick": "Spawning",
    },
    "Loading": {
        "start": "Loading",
        "drain": "Stopping SendStop",
        "halt": "Stopping SendStop",
        "alive": "Loading",
        "loaded": "Ready",
        "cannot load": "Stopping",
        "admit": "Loading ReturnRequest",
        "exit": "Backoff ReleaseMemory",
        "kill": "Backoff ReleaseMemory",
        "blamed": "Loading",
        "fault": "Stopping Kill",
        "too large": "Stopping Kill",
        "tick": "Loading",
    },
    "Ready": {
        "start": "Ready",
        "drain": "Stopping SendStop",
        "halt": "Stopping SendStop",
        "alive": "Ready",
        "entered": "Ready",
        "admit": "Ready SendRequest",
        "gained": "Ready",
        "row over": "Ready",
        "exit": "Backoff ReleaseMemory",
        "kill": "Backoff ReleaseMemory",
        "blamed": "Ready",
        "fault": "Stopping Kill",
        "too large": "Stopping Kill",
        "tick": "Ready",
    },
    "Ready+rows": {
        "start": "Ready",
        "drain": "Draining",
        "halt": "Stopping SendStop",
        "alive": "Ready",
        "entered": "Ready",
        "admit": "Ready SendRequest",
        "gained": "Ready",
        "row over": "Ready",
        "exit": "Backoff LoseRequests ReleaseMemory",
        "kill": "Backoff LoseRequests ReleaseMemory",
        "blamed": "Ready",
        "fault": "Stopping Kill",
        "too large": "Stopping Kill",
        "tick": "Ready",
    },
    "Draining": {
        "drain": "Draining",
        "halt": "Stopping SendStop",
        "alive": "Draining",
        "entered": "Draining",
        "admit": "Draining ReturnRequest",
        "gained": "Draining",
        "row over": "Stopping SendStop",
        "exit": "Stopped LoseRequests ReleaseMemory",
        "kill": "Stopped LoseRequests ReleaseMemory",
        "blamed": "Draining",
        "fault": "Stopping Kill",
        "too large": "Stopping Kill",
        "tick": "Draining",
    },
    "Stopping": {
        "drain": "Stopping",
        "halt": "Stopping SendStop",
        "spawned": "Stopping Kill",
        "spawn failed": "Stopped ReleaseMemory",
        "up": "Stopping",
        "alive": "Stopping",
        "entered": "Stopping",
        "loaded": "Stopping",
        "cannot load": "Stopping",
        "admit": "Stopping ReturnRequest",
        "gained": "Stopping",
        "row over": "Stopping",
        "exit": "Stopped ReleaseMemory",
        "kill": "Stopped ReleaseMemory",
        "blamed": "Stopping",
        "fault": "Stopping Kill",
        "too large": "Stopping",
        "tick": "Stopping",
    },
    "Backoff": {
        "start": "Backoff",
        "drain": "Stopped",
        "halt": "Stopped",
        "admit": "Backoff ReturnRequest",
        "blamed": "Backoff",
        "fault": "Backoff",
        "too large": "Backoff",
        "tick": "Backoff",
    },
    "Failed": {
        "start": "Spawning Spawn",
        "drain": "Stopped",
        "halt": "Stopped",
        "admit": "Failed ReturnRequest",
        "blamed": "Failed",
        "fault": "Failed",
        "too large": "Failed",
        "tick": "Failed",
    },
}
EXPECTED["Stopping+no pid"] = EXPECTED["Stopping"] | {"halt": "Stopping", "fault": "Stopping"}
EXPECTED["Stopping+restart"] = EXPECTED["Stopping"] | {
    "halt": "Stopping",
    "spawn failed": "Backoff ReleaseMemory",
    "exit": "Backoff ReleaseMemory",
    "kill": "Backoff ReleaseMemory",
}
EXPECTED["Stopping+failed"] = EXPECTED["Stopping"] | {
    "spawn failed": "Backoff ReleaseMemory",
    "exit": "Failed ReleaseMemory",
    "kill": "Failed ReleaseMemory",
}


def machine(state: str) -> lc.Lifecycle:
    rows = {"a"} if state in {"Ready+rows", "Draining"} else set()
    return lc.Lifecycle("demo", state=STATES[state], requests=rows)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(STATES, EVENTS)))
def test_every_event_in_every_state(state: str, event: str):
    expected = EXPECTED[state].get(event, NOT)
    m = machine(state)
    before = msgspec.json.encode(m)
    if expected is NOT:
        with pytest.raises(InvalidTransition):
            m.handle(EVENTS[event], NOW)
        assert before == msgspec.json.encode(m)
        return
    commands = feed(m, EVENTS[event])

    assert expected == " ".join([type(m.state).__name__, *(type(c).__name__ for c in commands)])


def test_the_expected_table_is_complete():
    assert set(STATES) == set(EXPECTED)
    assert (
        {type(state) for state in STATES.values()} == set(lc.TRANSITIONS) == set(ev.State.__args__)
    )
    assert {type(event) for event in EVENTS.values()} == set(ev.Event.__subclasses__())
