"""The lifecycle's invariants after any order of events."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.machines import lifecycle as lc
from actors.machines import lifecycle_events as ev
from tests.actors.lifecycle_steps import NOW, WHY


class Walk(RuleBasedStateMachine):
    """Random events, as a process and its actor could cause them: the invariants hold, and every
    lost request is reported."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = lc.Lifecycle("demo")
        self.now = NOW
        self.rids = itertools.count()
        self.inside: set[str] = set()
        self.process = False
        self.spawning = False

    def feed(self, event: ev.Event) -> None:
        for command in self.machine.handle(event, self.now):
            match command:
                case ev.Spawn():
                    assert not self.process
                    assert not self.spawning
                    self.spawning = True
                case ev.SendRequest(rid=rid):
                    assert self.process
                    self.inside.add(rid)
                case ev.LoseRequests(rids=rids):
                    assert set(rids) == self.inside
                    self.inside.clear()
                case ev.Terminate() | ev.Kill() | ev.SendStop():
                    assert self.process
                case ev.ReleaseMemory():
                    assert not self.process

    @rule(event=st.sampled_from([ev.Drain(), ev.Halt(), ev.Fault("x"), ev.AlarmFired()]))
    def anytime(self, event):
        self.feed(event)

    @precondition(lambda self: not isinstance(self.machine.state, ev.Draining | ev.Stopping))
    @rule()
    def start(self):
        self.feed(ev.Start())

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0, 200.0]))
    def wait(self, seconds):
        self.now += seconds
        self.feed(ev.AlarmFired())

    @rule()
    def admit(self):
        self.feed(ev.RequestAssigned(str(next(self.rids))))

    @precondition(lambda self: self.spawning)
    @rule(spawned=st.booleans())
    def spawn(self, spawned):
        self.spawning, self.process = False, spawned
        self.feed(ev.Spawned(7) if spawned else ev.SpawnFailed("no"))

    @precondition(lambda self: self.process)
    @rule(returncode=st.sampled_from([0, 1, -9, -11]))
    def leave(self, returncode):
        self.process = False
        self.feed(ev.Exited(returncode))

    @precondition(lambda self: self.process)
    @rule(data=st.data())
    def report(self, data):
        reports: dict[type, list[ev.Event]] = {
            ev.Spawning: [ev.Started()],
            ev.Loading: [ev.SignOfLife(), ev.Loaded(), ev.LoadFailed(WHY)],
        }
        rows = [ev.RequestFinished(rid) for rid in sorted(self.inside)]
        event = data.draw(
            st.sampled_from(
                reports.get(
                    type(self.machine.state), [ev.SignOfLife(), ev.PhaseEntered("flush"), *rows] * 2
                )
            )
        )
        if isinstance(event, ev.RequestFinished):
            self.inside.discard(event.rid)
        if ev.TokenGenerated in lc.TRANSITIONS[type(self.machine.state)] and data.draw(
            st.booleans()
        ):
            self.feed(ev.TokenGenerated())
        self.feed(event)

    @invariant()
    def consistent(self):
        self.machine.check()
        assert self.machine.requests == self.inside
        assert (self.machine.pid is not None) == self.process


TestWalk = Walk.TestCase


TestWalk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
