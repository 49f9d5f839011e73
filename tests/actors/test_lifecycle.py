"""The lifecycle table: every state with every event, then the rules that are not in a table."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.machines import lifecycle as lc
from actors.machines.machine import InvalidTransition
from actors.runtime.history import EventHistory, replay
from protocol.errors import ErrorInfo

NOW = 1000.0
WHY = ErrorInfo("worker_died", "why")
MEMORY = ErrorInfo("insufficient_memory", "no room")

STATES: dict[str, lc.State] = {
    "Stopped": lc.Stopped(),
    "Spawning": lc.Spawning(NOW + 60),
    "Spawning+pid": lc.Spawning(NOW + 60, 7),
    "Loading": lc.Loading(7, NOW + 600),
    "Ready": lc.Ready(7),
    "Ready+rows": lc.Ready(7, NOW + 120),
    "Draining": lc.Draining(7, NOW + 120),
    "Stopping": lc.Stopping(7, "asked", NOW + 10, "stopped"),
    "Stopping+no pid": lc.Stopping(None, "asked", NOW + 10, "stopped"),
    "Stopping+restart": lc.Stopping(7, "terminated", NOW + 5, "restart", WHY),
    "Stopping+failed": lc.Stopping(7, "asked", NOW + 10, "failed", WHY),
    "Backoff": lc.Backoff(NOW + 1, WHY),
    "Failed": lc.Failed(WHY),
}
EVENTS: dict[str, lc.Event] = {
    "start": lc.Start(),
    "drain": lc.Drain(),
    "halt": lc.Halt(),
    "spawned": lc.Spawned(7),
    "spawn failed": lc.SpawnFailed("no"),
    "up": lc.Up(),
    "alive": lc.Alive(),
    "entered": lc.Entered("prefill"),
    "loaded": lc.Loaded(),
    "cannot load": lc.CannotLoad(WHY),
    "admit": lc.Admit("r"),
    "gained": lc.Gained(),
    "row over": lc.RowOver("a"),
    "blamed": lc.Blamed(),
    "exit": lc.Exited(1),
    "kill": lc.Exited(-9),
    "fault": lc.Fault("nonsense"),
    "tick": lc.Tick(),
}
NOT = None  # an invalid transition

# What follows: the name of the next state, then the names of the commands.
EXPECTED: dict[str, dict[str, str | None]] = {
    "Stopped": {
        "start": "Spawning Spawn",
        "drain": "Stopped",
        "halt": "Stopped",
        "admit": "Stopped Bounce",
        "blamed": "Stopped",
        "fault": "Stopped",
        "tick": "Stopped",
    },
    "Spawning": {
        "start": "Spawning",
        "drain": "Stopping",
        "halt": "Stopping",
        "spawned": "Spawning",
        "spawn failed": "Backoff Release",
        "admit": "Spawning Bounce",
        "exit": "Backoff Release",
        "kill": "Backoff Release",
        "blamed": "Spawning",
        "fault": "Stopping",
        "tick": "Spawning",
    },
    "Spawning+pid": {
        "start": "Spawning",
        "drain": "Stopping SendStop",
        "halt": "Stopping SendStop",
        "spawned": "Spawning",
        "spawn failed": "Backoff Release",
        "up": "Loading SendLoad",
        "admit": "Spawning Bounce",
        "exit": "Backoff Release",
        "kill": "Backoff Release",
        "blamed": "Spawning",
        "fault": "Stopping Kill",
        "tick": "Spawning",
    },
    "Loading": {
        "start": "Loading",
        "drain": "Stopping SendStop",
        "halt": "Stopping SendStop",
        "alive": "Loading",
        "loaded": "Ready",
        "cannot load": "Stopping",
        "admit": "Loading Bounce",
        "exit": "Backoff Release",
        "kill": "Backoff Release",
        "blamed": "Loading",
        "fault": "Stopping Kill",
        "tick": "Loading",
    },
    "Ready": {
        "start": "Ready",
        "drain": "Stopping SendStop",
        "halt": "Stopping SendStop",
        "alive": "Ready",
        "entered": "Ready",
        "admit": "Ready SendRow",
        "gained": "Ready",
        "row over": "Ready",
        "exit": "Backoff Release",
        "kill": "Backoff Release",
        "blamed": "Ready",
        "fault": "Stopping Kill",
        "tick": "Ready",
    },
    "Ready+rows": {
        "start": "Ready",
        "drain": "Draining",
        "halt": "Stopping SendStop",
        "alive": "Ready",
        "entered": "Ready",
        "admit": "Ready SendRow",
        "gained": "Ready",
        "row over": "Ready",
        "exit": "Backoff LoseRows Release",
        "kill": "Backoff LoseRows Release",
        "blamed": "Ready",
        "fault": "Stopping Kill",
        "tick": "Ready",
    },
    "Draining": {
        "drain": "Draining",
        "halt": "Stopping SendStop",
        "alive": "Draining",
        "entered": "Draining",
        "admit": "Draining Bounce",
        "gained": "Draining",
        "row over": "Stopping SendStop",
        "exit": "Stopped LoseRows Release",
        "kill": "Stopped LoseRows Release",
        "blamed": "Draining",
        "fault": "Stopping Kill",
        "tick": "Draining",
    },
    "Stopping": {
        "drain": "Stopping",
        "halt": "Stopping",
        "spawned": "Stopping Kill",
        "spawn failed": "Stopped Release",
        "up": "Stopping",
        "alive": "Stopping",
        "entered": "Stopping",
        "loaded": "Stopping",
        "cannot load": "Stopping",
        "admit": "Stopping Bounce",
        "gained": "Stopping",
        "row over": "Stopping",
        "exit": "Stopped Release",
        "kill": "Stopped Release",
        "blamed": "Stopping",
        "fault": "Stopping Kill",
        "tick": "Stopping",
    },
    "Backoff": {
        "start": "Backoff",
        "drain": "Stopped",
        "halt": "Stopped",
        "admit": "Backoff Bounce",
        "blamed": "Backoff",
        "fault": "Backoff",
        "tick": "Backoff",
    },
    "Failed": {
        "start": "Spawning Spawn",
        "drain": "Stopped",
        "halt": "Stopped",
        "admit": "Failed Bounce",
        "blamed": "Failed",
        "fault": "Failed",
        "tick": "Failed",
    },
}
EXPECTED["Stopping+no pid"] = EXPECTED["Stopping"] | {"fault": "Stopping"}
EXPECTED["Stopping+restart"] = EXPECTED["Stopping"] | {
    "spawn failed": "Backoff Release",
    "exit": "Backoff Release",
    "kill": "Backoff Release",
}
EXPECTED["Stopping+failed"] = EXPECTED["Stopping"] | {
    "spawn failed": "Backoff Release",
    "exit": "Failed Release",
    "kill": "Failed Release",
}


def machine(state: str) -> lc.Lifecycle:
    rows = {"a"} if state in {"Ready+rows", "Draining"} else set()
    return lc.Lifecycle("demo", state=STATES[state], rows=rows)


def feed(m: lc.Lifecycle, *events: lc.Event, now: float = NOW) -> list[lc.Command]:
    commands = [command for event in events for command in m.handle(event, now)]
    m.check()
    return commands


@pytest.fixture
def m():
    """A machine whose invariants are checked at the end, and whose journal replays."""
    subject = lc.Lifecycle("demo")
    yield subject
    subject.check()


@pytest.mark.parametrize(("state", "event"), list(itertools.product(STATES, EVENTS)))
def test_the_table(state: str, event: str):
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


def test_the_table_of_this_test_is_whole():
    assert set(STATES) == set(EXPECTED)
    assert {type(state) for state in STATES.values()} == set(lc.TABLE) == set(lc.State.__args__)
    assert {type(event) for event in EVENTS.values()} == set(lc.Event.__args__)


# -- ways through the table -----------------------------------------------------------------------


def ready(m: lc.Lifecycle, now: float = NOW) -> lc.Lifecycle:
    if not isinstance(m.state, lc.Spawning):
        feed(m, lc.Start(), now=now)
    feed(m, lc.Spawned(7), lc.Up(), lc.Alive(), lc.Loaded(), now=now)
    return m


def crash(m: lc.Lifecycle, now: float, returncode: int = -11) -> float:
    """Let it crash when ready; return how long it waits, infinity for ever."""
    feed(m, lc.Exited(returncode), now=now)
    if isinstance(m.state, lc.Failed):
        return float("inf")
    delay = m.state.until - now
    assert [lc.Spawn()] == feed(m, lc.Tick(), now=m.state.until)
    return delay


def test_a_whole_life(m):
    assert [lc.Spawn()] == feed(m, lc.Start())
    assert [lc.SendLoad()] == feed(m, lc.Spawned(7), lc.Up())
    assert feed(m, lc.Alive(), lc.Loaded()) == []
    assert [lc.SendRow("a"), lc.SendRow("b")] == feed(m, lc.Admit("a"), lc.Admit("b"))
    assert feed(m, lc.Gained(), lc.RowOver("a"), lc.Drain()) == []
    assert [lc.Bounce("c")] == feed(m, lc.Admit("c"))
    assert [lc.SendStop()] == feed(m, lc.RowOver("b"))
    assert [lc.Release()] == feed(m, lc.Exited(0))
    assert (lc.Stopped(), None) == (m.state, m.deadline)


def test_rows_die_with_their_process_and_are_named(m):
    ready(m)
    feed(m, lc.Admit("b"), lc.Admit("a"))
    lost, release = feed(m, lc.Exited(-11))

    assert (lost.rids, lost.error.code, lost.error.retryable) == (["a", "b"], "worker_died", True)
    assert "SIGSEGV" in lost.error.message
    assert lc.Release() == release


def test_who_dies_while_it_is_unloaded_says_so(m):
    ready(m)
    feed(m, lc.Admit("a"), lc.Drain())
    lost, release = feed(m, lc.Exited(-9))

    assert (lost.rids, lost.error.code, lost.again) == (["a"], "draining", False)
    assert "being unloaded" in lost.error.message
    assert "SIGKILL" in lost.error.message
    assert lc.Release() == release
    assert lc.Stopped() == m.state


def test_deadlines_of_the_phases(m):
    feed(m, lc.Start())
    assert m.deadline == NOW + 60
    feed(m, lc.Spawned(7), lc.Up(), now=NOW + 1)
    assert m.deadline == NOW + 601
    feed(m, lc.Alive(), now=NOW + 100)
    assert m.deadline == NOW + 700
    feed(m, lc.Loaded(), now=NOW + 200)
    assert m.deadline is None
    feed(m, lc.Admit("a"), now=NOW + 300)
    feed(m, lc.Admit("b"), now=NOW + 310)
    assert m.deadline == NOW + 420
    feed(m, lc.Gained(), now=NOW + 400)
    assert m.deadline == NOW + 520
    feed(m, lc.Entered("prefill"), now=NOW + 405)
    assert m.deadline == NOW + 1005
    feed(m, lc.Alive(), now=NOW + 406)
    assert m.deadline == NOW + 1006
    feed(m, lc.Entered("decode"), now=NOW + 407)
    assert m.deadline == NOW + 707
    feed(m, lc.RowOver("a"), lc.RowOver("b"), lc.Entered("pools"), now=NOW + 410)
    assert m.deadline is None


def test_the_error_of_a_stuck_process_names_its_phase_and_the_next_one_starts_idle(m):
    ready(m)
    feed(m, lc.Admit("a"), lc.Entered("flush"))
    assert feed(m, lc.Tick(), now=NOW + 299) == []
    assert feed(m, lc.Tick(), now=NOW + 300) == [lc.Terminate()]
    assert feed(m, lc.Tick(), now=NOW + 305) == [lc.Kill()]
    lost, release = feed(m, lc.Exited(-9), now=NOW + 306)

    assert (lost.rids, release) == (["a"], lc.Release())
    assert lost.error.code == "worker_died"
    assert lost.error.retryable
    assert lost.error.detail == {"phase": "flush", "patience_s": 300.0, "cause": "hung"}
    feed(m, lc.Tick(), now=m.deadline)
    ready(m, now=NOW + 400)
    assert m.phase == "idle"


@pytest.mark.parametrize("events", [[], [lc.Spawned(7)], [lc.Spawned(7), lc.Up()]])
def test_silence_is_pressed_harder_and_harder(m, events):
    feed(m, lc.Start(), *events)
    pressed = []
    for _ in range(4):
        assert feed(m, lc.Tick(), now=m.deadline - 0.01) == []
        pressed += feed(m, lc.Tick(), now=m.deadline)

    assert pressed == ([lc.Terminate(), *[lc.Kill()] * 3] if events else [])


def test_a_process_that_comes_too_late_is_killed(m):
    feed(m, lc.Start(), lc.Halt())

    assert [lc.Kill()] == feed(m, lc.Spawned(7))
    assert [lc.Release()] == feed(m, lc.Exited(-9))
    assert lc.Stopped() == m.state


def test_an_order_to_stop_wins_over_a_restart(m):
    ready(m)
    feed(m, lc.Admit("a"))
    assert [lc.Terminate()] == feed(m, lc.Tick(), now=NOW + 120)
    feed(m, lc.Drain(), now=NOW + 121)
    lost, _ = feed(m, lc.Exited(-15), now=NOW + 122)

    assert lost.error.code == "draining"
    assert lc.Stopped() == m.state


def test_missing_memory_is_final_for_a_new_model_only(m):
    feed(m, lc.Start(), lc.Spawned(7), lc.Up(), lc.CannotLoad(MEMORY), lc.Exited(0))
    assert lc.Failed(MEMORY, refused=True) == m.state

    ready(m)
    crash(m, NOW, -9)
    delays = []
    now = NOW
    for _ in range(10):
        feed(m, lc.Spawned(7), lc.Up(), lc.CannotLoad(MEMORY), lc.Exited(0), now=now)
        assert isinstance(m.state, lc.Backoff)
        assert m.state.error == MEMORY
        delays.append(m.state.until - now)
        now = m.state.until
        feed(m, lc.Tick(), now=now)
    assert delays[:3] == [1.0, 2.0, 4.0]
    assert delays[-1] == 30.0
    assert m.budget.crashes == 0

    feed(m, lc.Spawned(7), lc.Up(), lc.CannotLoad(WHY), lc.Exited(0), now=now)
    assert lc.Failed(WHY, refused=True) == m.state


def test_an_order_to_start_a_given_up_model_is_answered_like_a_first_one(m):
    ready(m)
    crash(m, NOW, -9)
    feed(m, lc.Spawned(7), lc.Up(), lc.CannotLoad(WHY), lc.Exited(0))
    feed(m, lc.Start(), lc.Spawned(7), lc.Up(), lc.CannotLoad(MEMORY), lc.Exited(0))

    assert lc.Failed(MEMORY, refused=True) == m.state


@pytest.mark.parametrize("events", [[], [lc.Tick()]])
@pytest.mark.parametrize(
    ("order", "says"),
    [(lc.Halt("the daemon stops"), "the daemon stops"), (lc.Halt(), "demo was stopped")],
)
def test_those_inside_are_told_why_the_model_was_stopped(m, events, order, says):
    ready(m)
    feed(m, lc.Admit("a"))
    feed(m, *events, order, lc.Drain(), now=NOW + 120)
    lost, _ = feed(m, lc.Exited(-9), now=NOW + 121)

    assert lost.error.code == "draining"
    assert lost.error.message.startswith(says)


def hang(m: lc.Lifecycle, now: float) -> list[lc.Command]:
    """Let it be silent with a request, and be ended for it."""
    ready(m, now)
    feed(m, lc.Admit("a"), now=now)
    feed(m, lc.Tick(), now=now + 120)
    return feed(m, lc.Exited(-15), now=now + 121)


def test_requests_are_suspected_of_a_hang_though_we_killed_it(m):
    [lost, _] = hang(m, NOW)

    assert isinstance(lost, lc.LoseRows)
    assert (lost.rids, lost.attributable, lost.again) == (["a"], True, True)
    assert m.budget.crashes == 0


def test_what_the_kernel_kills_for_want_of_memory_would_take_it_again(m):
    ready(m)
    feed(m, lc.Admit("a"))
    [lost, _] = feed(m, lc.Exited(-9, starved=True))

    assert isinstance(lost, lc.LoseRows)
    assert lost.attributable
    assert "for want of memory" in lost.error.message


def test_requests_that_were_blamed_count_however_far_they_lie_apart(m):
    for at in range(3):
        hang(m, NOW + 1000 * at)
        assert m.deadline == NOW + 1000 * at + 121 + 0.5  # the suspects become fewer
        feed(m, lc.Blamed(), now=NOW + 1000 * at + 121)
        feed(m, lc.Tick(), now=NOW + 1000 * at + 130)

    assert isinstance(m.state, lc.Failed)
    assert "3 crashes" in m.error.message
    assert "no sign of life" in m.error.message
    assert m.restarts == 3


def test_a_token_wipes_blame_away(m):
    for at in range(4):
        hang(m, NOW + 1000 * at)
        feed(m, lc.Blamed(), lc.Tick(), now=NOW + 1000 * at + 130)
        ready(m, NOW + 1000 * at + 140)
        feed(m, lc.Gained(), lc.Exited(-9), now=NOW + 1000 * at + 141)
        feed(m, lc.Tick(), now=NOW + 1000 * at + 150)

    assert not isinstance(m.state, lc.Failed)


@pytest.mark.parametrize(
    ("returncode", "own"),
    [
        *((status, True) for status in (0, 1, 70, -11, -6, -7)),
        *((status, False) for status in (-9, -15, -2, -1, -12, -64)),
    ],
)
def test_only_what_a_process_may_do_to_itself_is_attributable(m, returncode, own):
    ready(m)
    feed(m, lc.Admit("a"))
    [lost, _] = feed(m, lc.Exited(returncode))

    assert isinstance(lost, lc.LoseRows)
    assert lost.attributable == own


# -- the restart budget ---------------------------------------------------------------------------


def test_three_crashes_in_a_minute_are_enough(m):
    delays = [crash(ready(m, NOW + t), NOW + t) for t in (0, 20, 59)]

    assert [0.5, 1.0, float("inf")] == delays
    assert (m.error.code, m.error.retryable) == ("model_failed", False)
    assert "SIGSEGV" in m.error.message


def test_crashes_that_lie_apart_are_not(m):
    delays = [crash(ready(m, NOW + t), NOW + t) for t in range(0, 900, 31)]

    assert delays[:8] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert float("inf") not in delays


def test_a_token_wipes_the_slate(m):
    for second in range(10):
        ready(m, NOW + second)
        feed(m, lc.Admit(str(second)), lc.Gained(), now=NOW + second)

        assert crash(m, NOW + second) == 0.5


@pytest.mark.parametrize("returncode", [-9, -15])
def test_kills_from_outside_do_not_count(m, returncode):
    delays = [crash(ready(m, NOW + t), NOW + t, returncode) for t in range(6)]

    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]


def test_after_ten_quiet_minutes_the_delay_is_short_again(m):
    crash(ready(m), NOW, -9)
    crash(ready(m), NOW + 1, -9)

    assert crash(ready(m), NOW + 700, -9) == 0.5


@pytest.mark.parametrize("gap", [1, 1000])
def test_crashes_before_it_ever_worked_count_however_far_apart(m, gap):
    feed(m, lc.Start())
    for attempt in range(3):
        at = NOW + attempt * gap
        feed(m, lc.Spawned(7), lc.Up(), now=at)
        feed(m, lc.Exited(1), now=at)
        if attempt < 2:
            feed(m, lc.Tick(), now=m.deadline)

    assert isinstance(m.state, lc.Failed)


def test_a_failed_model_starts_afresh(m):
    for t in range(3):
        crash(ready(m, NOW + t), NOW + t)
    ready(m, NOW + 10)

    assert crash(m, NOW + 10) == 0.5


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exited with status 0"), (-9, "was ended by SIGKILL"), (-99, "was ended by signal 99")],
)
def test_an_exit_in_words(code, words):
    assert words == lc.describe(code)


# -- any order of events --------------------------------------------------------------------------


class Walk(RuleBasedStateMachine):
    """Random events, as a process and its owner could cause them: the invariants hold, rows are
    never lost without a word, and the journal replays."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = lc.Lifecycle("demo")
        self.journal: EventHistory[lc.Event, lc.Command] = EventHistory(
            self.machine, signs=lc.SIGNS, segment=8
        )
        self.now = NOW
        self.rids = itertools.count()
        self.inside: set[str] = set()
        self.process = False
        self.spawning = False

    def feed(self, event: lc.Event) -> None:
        for command in self.journal.handle(event, self.now):
            match command:
                case lc.Spawn():
                    assert not self.process
                    assert not self.spawning
                    self.spawning = True
                case lc.SendRow(rid=rid):
                    assert self.process
                    self.inside.add(rid)
                case lc.LoseRows(rids=rids):
                    assert set(rids) == self.inside
                    self.inside.clear()
                case lc.Terminate() | lc.Kill() | lc.SendStop():
                    assert self.process
                case lc.Release():
                    assert not self.process

    @rule(event=st.sampled_from([lc.Drain(), lc.Halt(), lc.Fault("x"), lc.Tick()]))
    def anytime(self, event):
        self.feed(event)

    @precondition(lambda self: not isinstance(self.machine.state, lc.Draining | lc.Stopping))
    @rule()
    def start(self):
        self.feed(lc.Start())

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0, 200.0]))
    def wait(self, seconds):
        self.now += seconds
        self.feed(lc.Tick())

    @rule()
    def admit(self):
        self.feed(lc.Admit(str(next(self.rids))))

    @precondition(lambda self: self.spawning)
    @rule(works=st.booleans())
    def spawn(self, works):
        self.spawning, self.process = False, works
        self.feed(lc.Spawned(7) if works else lc.SpawnFailed("no"))

    @precondition(lambda self: self.process)
    @rule(returncode=st.sampled_from([0, 1, -9, -11]))
    def leave(self, returncode):
        self.process = False
        self.feed(lc.Exited(returncode))

    @precondition(lambda self: self.process)
    @rule(data=st.data())
    def speak(self, data):
        words: dict[type, list[lc.Event]] = {
            lc.Spawning: [lc.Up()],
            lc.Loading: [lc.Alive(), lc.Loaded(), lc.CannotLoad(WHY)],
        }
        rows = [lc.RowOver(rid) for rid in sorted(self.inside)]
        event = data.draw(
            st.sampled_from(
                words.get(type(self.machine.state), [lc.Alive(), lc.Entered("flush"), *rows] * 2)
            )
        )
        if isinstance(event, lc.RowOver):
            self.inside.discard(event.rid)
        if lc.Gained in lc.TABLE[type(self.machine.state)] and data.draw(st.booleans()):
            self.feed(lc.Gained())
        self.feed(event)

    @invariant()
    def whole(self):
        self.machine.check()
        assert self.machine.rows == self.inside
        assert (self.machine.pid is not None) == self.process
        again = replay(self.journal.dump(), lc.Lifecycle, lc.Event)
        assert self.machine == again


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
