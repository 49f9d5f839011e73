"""The lifecycle's rules that are not in its table: deadlines, suspects, the restart budget."""

from __future__ import annotations

import pytest

from actors.machines import lifecycle as lc
from actors.machines import lifecycle_events as ev
from actors.machines.process_exit import describe
from protocol.worker import OVER_MEMORY_LIMIT
from tests.actors.lifecycle_steps import EXCEEDED, MEMORY, NOW, WHY, feed


@pytest.fixture
def m():
    """A machine whose invariants are checked at the end."""
    subject = lc.Lifecycle("demo")
    yield subject
    subject.check()


def ready(m: lc.Lifecycle, now: float = NOW) -> lc.Lifecycle:
    if not isinstance(m.state, ev.Spawning):
        feed(m, ev.Start(), now=now)
    feed(m, ev.Spawned(7), ev.Started(), ev.SignOfLife(), ev.Loaded(), now=now)
    return m


def crash(m: lc.Lifecycle, now: float, returncode: int = -11) -> float:
    """Crash the ready process; return the restart delay, infinity if the model is given up."""
    feed(m, ev.Exited(returncode), now=now)
    if isinstance(m.state, ev.Failed):
        return float("inf")
    delay = m.state.deadline - now
    assert [ev.Spawn()] == feed(m, ev.AlarmFired(), now=m.state.deadline)
    return delay


def test_a_process_from_start_to_exit(m):
    assert [ev.Spawn()] == feed(m, ev.Start())
    assert [ev.SendLoad()] == feed(m, ev.Spawned(7), ev.Started())
    assert feed(m, ev.SignOfLife(), ev.Loaded()) == []
    assert [ev.SendRequest("a"), ev.SendRequest("b")] == feed(
        m, ev.RequestAssigned("a"), ev.RequestAssigned("b")
    )
    assert feed(m, ev.TokenGenerated(), ev.RequestFinished("a"), ev.Drain(1.5)) == []
    assert [ev.ReturnRequest("c")] == feed(m, ev.RequestAssigned("c"))
    assert [ev.SendStop(1.5)] == feed(m, ev.RequestFinished("b"))
    assert [ev.ReleaseMemory()] == feed(m, ev.Exited(0))
    assert (ev.Stopped(), None) == (m.state, m.deadline)


def test_a_worker_stops_writing_well_before_it_gets_a_signal(m):
    ready(m)
    assert [ev.SendStop(m.timeouts.asked_s / 2)] == feed(m, ev.Drain(1000.0))


def test_a_halted_worker_writes_nothing(m):
    ready(m)
    assert [ev.SendStop(0.0)] == feed(m, ev.Halt())


def test_a_dead_process_reports_its_requests(m):
    ready(m)
    feed(m, ev.RequestAssigned("b"), ev.RequestAssigned("a"))
    lost, release = feed(m, ev.Exited(-11))

    assert (lost.rids, lost.error.code, lost.error.retryable) == (["a", "b"], "worker_died", True)
    assert "SIGSEGV" in lost.error.message
    assert ev.ReleaseMemory() == release


def test_a_death_during_an_unload_ends_requests_with_draining(m):
    ready(m)
    feed(m, ev.RequestAssigned("a"), ev.Drain())
    lost, release = feed(m, ev.Exited(-9))

    assert (lost.rids, lost.error.code, lost.again) == (["a"], "draining", False)
    assert "being unloaded" in lost.error.message
    assert "SIGKILL" in lost.error.message
    assert ev.ReleaseMemory() == release
    assert ev.Stopped() == m.state


@pytest.mark.parametrize(
    "events",
    [
        (EXCEEDED, ev.Exited(-9)),
        (ev.Exited(OVER_MEMORY_LIMIT),),
    ],
    ids=["ended by the daemon", "ended itself"],
)
def test_a_load_that_takes_too_much_memory_fails_once(m, events):
    feed(m, ev.Start(), ev.Spawned(7), ev.Started(), ev.SignOfLife())
    commands = feed(m, *events)

    assert [it for it in commands if not isinstance(it, ev.Kill)] == [ev.ReleaseMemory()]
    assert isinstance(m.state, ev.Failed)
    assert m.state.refused
    assert m.state.error.code == "invalid_model"
    assert "takes more memory than its files need" in m.state.error.message


@pytest.mark.parametrize("state", [ev.Spawning, ev.Loading, ev.Ready, ev.Draining])
def test_a_measurement_of_an_earlier_process_ends_no_other(m, state):
    m.state, m.requests = state(pid=8, deadline=99.0), {"a"} if state is ev.Draining else set()
    before = m.state

    assert feed(m, EXCEEDED) == []
    assert m.state == before


@pytest.mark.parametrize(
    ("events", "how"),
    [
        ((EXCEEDED, ev.Exited(-9)), "held 900 MiB, above its limit"),
        ((ev.Exited(OVER_MEMORY_LIMIT),), "ended itself at its memory limit"),
    ],
    ids=["ended by the daemon", "ended itself"],
)
def test_requests_in_a_process_that_takes_too_much_memory_are_suspects(m, events, how):
    ready(m)
    feed(m, ev.RequestAssigned("a"))
    lost = next(it for it in feed(m, *events) if isinstance(it, ev.LoseRequests))

    assert (lost.rids, lost.attributable, lost.again) == (["a"], True, True)
    assert how in lost.error.message
    assert lost.error.detail["cause"] == "memory_limit"
    assert isinstance(m.state, ev.Backoff)


def test_deadlines_of_the_phases(m):
    feed(m, ev.Start())
    assert m.deadline == NOW + 60
    feed(m, ev.Spawned(7), ev.Started(), now=NOW + 1)
    assert m.deadline == NOW + 601
    feed(m, ev.SignOfLife(), now=NOW + 100)
    assert m.deadline == NOW + 700
    feed(m, ev.Loaded(), now=NOW + 200)
    assert m.deadline == NOW + 320
    feed(m, ev.SignOfLife(), now=NOW + 300)
    feed(m, ev.RequestAssigned("a"), ev.RequestAssigned("b"), now=NOW + 310)
    assert m.deadline == NOW + 420
    feed(m, ev.TokenGenerated(), now=NOW + 400)
    assert m.deadline == NOW + 520
    feed(m, ev.PhaseEntered("prefill"), now=NOW + 405)
    assert m.deadline == NOW + 1005
    feed(m, ev.SignOfLife(), now=NOW + 406)
    assert m.deadline == NOW + 1006
    feed(m, ev.PhaseEntered("decode"), now=NOW + 407)
    assert m.deadline == NOW + 707
    feed(
        m, ev.RequestFinished("a"), ev.RequestFinished("b"), ev.PhaseEntered("pools"), now=NOW + 410
    )
    assert m.deadline == NOW + 710


def test_an_idle_worker_that_hangs_is_replaced(m):
    """It would keep its memory, and never answer a reclaim."""
    ready(m)
    deadline = m.deadline
    assert feed(m, ev.AlarmFired(), now=deadline - 1) == []
    assert feed(m, ev.AlarmFired(), now=deadline) == [ev.Terminate()]
    assert feed(m, ev.Exited(-15), now=deadline + 1) == [ev.ReleaseMemory()]
    assert isinstance(m.state, ev.Backoff)
    assert m.state.error.detail["cause"] == "hung"


def test_the_error_of_a_hung_process_names_its_phase_and_the_next_process_starts_idle(m):
    ready(m)
    feed(m, ev.RequestAssigned("a"), ev.PhaseEntered("flush"))
    assert feed(m, ev.AlarmFired(), now=NOW + 299) == []
    assert feed(m, ev.AlarmFired(), now=NOW + 300) == [ev.Terminate()]
    assert feed(m, ev.AlarmFired(), now=NOW + 305) == [ev.Kill()]
    lost, release = feed(m, ev.Exited(-9), now=NOW + 306)

    assert (lost.rids, release) == (["a"], ev.ReleaseMemory())
    assert lost.error.code == "worker_died"
    assert lost.error.retryable
    assert lost.error.detail == {"phase": "flush", "patience_s": 300.0, "cause": "hung"}
    feed(m, ev.AlarmFired(), now=m.deadline)
    ready(m, now=NOW + 400)
    assert m.phase == "idle"


@pytest.mark.parametrize("events", [[], [ev.Spawned(7)], [ev.Spawned(7), ev.Started()]])
def test_silence_escalates_from_sigterm_to_sigkill(m, events):
    feed(m, ev.Start(), *events)
    pressed = []
    for _ in range(4):
        assert feed(m, ev.AlarmFired(), now=m.deadline - 0.01) == []
        pressed += feed(m, ev.AlarmFired(), now=m.deadline)

    assert pressed == ([ev.Terminate(), *[ev.Kill()] * 3] if events else [])


def test_a_process_spawned_after_a_halt_is_killed(m):
    feed(m, ev.Start(), ev.Halt())

    assert [ev.Kill()] == feed(m, ev.Spawned(7))
    assert [ev.ReleaseMemory()] == feed(m, ev.Exited(-9))
    assert ev.Stopped() == m.state


def test_a_drain_cancels_a_restart(m):
    ready(m)
    feed(m, ev.RequestAssigned("a"))
    assert [ev.Terminate()] == feed(m, ev.AlarmFired(), now=NOW + 120)
    feed(m, ev.Drain(), now=NOW + 121)
    lost, _ = feed(m, ev.Exited(-15), now=NOW + 122)

    assert lost.error.code == "draining"
    assert ev.Stopped() == m.state


def test_missing_memory_is_final_for_a_new_model_only(m):
    feed(m, ev.Start(), ev.Spawned(7), ev.Started(), ev.LoadFailed(MEMORY), ev.Exited(0))
    assert ev.Failed(MEMORY, refused=True) == m.state

    ready(m)
    crash(m, NOW, -9)
    delays = []
    now = NOW
    for _ in range(10):
        feed(m, ev.Spawned(7), ev.Started(), ev.LoadFailed(MEMORY), ev.Exited(0), now=now)
        assert isinstance(m.state, ev.Backoff)
        assert m.state.error == MEMORY
        delays.append(m.state.deadline - now)
        now = m.state.deadline
        feed(m, ev.AlarmFired(), now=now)
    assert delays[:3] == [1.0, 2.0, 4.0]
    assert delays[-1] == 30.0
    assert m.restart_budget.crashes == 0

    feed(m, ev.Spawned(7), ev.Started(), ev.LoadFailed(WHY), ev.Exited(0), now=now)
    assert ev.Failed(WHY, refused=True) == m.state


def test_a_start_after_a_failed_load_is_refused_like_a_first_one(m):
    ready(m)
    crash(m, NOW, -9)
    feed(m, ev.Spawned(7), ev.Started(), ev.LoadFailed(WHY), ev.Exited(0))
    feed(m, ev.Start(), ev.Spawned(7), ev.Started(), ev.LoadFailed(MEMORY), ev.Exited(0))

    assert ev.Failed(MEMORY, refused=True) == m.state


@pytest.mark.parametrize("events", [[], [ev.AlarmFired()]])
@pytest.mark.parametrize(
    ("order", "message"),
    [(ev.Halt("the daemon stops"), "the daemon stops"), (ev.Halt(), "demo was stopped")],
)
def test_requests_get_the_reason_of_a_halt(m, events, order, message):
    ready(m)
    feed(m, ev.RequestAssigned("a"))
    feed(m, *events, order, ev.Drain(), now=NOW + 120)
    lost, _ = feed(m, ev.Exited(-9), now=NOW + 121)

    assert lost.error.code == "draining"
    assert lost.error.message.startswith(message)


def hang(m: lc.Lifecycle, now: float) -> list[ev.Command]:
    """Let the process hang with a request until the watchdog ends it."""
    ready(m, now)
    feed(m, ev.RequestAssigned("a"), now=now)
    feed(m, ev.AlarmFired(), now=now + 120)
    return feed(m, ev.Exited(-15), now=now + 121)


def test_requests_are_suspected_of_a_hang_that_the_watchdog_ended(m):
    [lost, _] = hang(m, NOW)

    assert isinstance(lost, ev.LoseRequests)
    assert (lost.rids, lost.attributable, lost.again) == (["a"], True, True)
    assert m.restart_budget.crashes == 0


def test_an_out_of_memory_kill_is_attributable(m):
    ready(m)
    feed(m, ev.RequestAssigned("a"))
    [lost, _] = feed(m, ev.Exited(-9, out_of_memory=True))

    assert isinstance(lost, ev.LoseRequests)
    assert lost.attributable
    assert "memory ran out" in lost.error.message


def test_blamed_requests_count_however_far_apart(m):
    for at in range(3):
        hang(m, NOW + 1000 * at)
        # Deaths 1000 s apart do not lengthen the delay.
        assert m.deadline == NOW + 1000 * at + 121 + 0.5
        feed(m, ev.RequestBlamed(), now=NOW + 1000 * at + 121)
        feed(m, ev.AlarmFired(), now=NOW + 1000 * at + 130)

    assert isinstance(m.state, ev.Failed)
    assert "3 crashes" in m.error.message
    assert "no sign of life" in m.error.message
    assert m.restarts == 3


def test_a_token_resets_blame(m):
    for at in range(4):
        hang(m, NOW + 1000 * at)
        feed(m, ev.RequestBlamed(), ev.AlarmFired(), now=NOW + 1000 * at + 130)
        ready(m, NOW + 1000 * at + 140)
        feed(m, ev.TokenGenerated(), ev.Exited(-9), now=NOW + 1000 * at + 141)
        feed(m, ev.AlarmFired(), now=NOW + 1000 * at + 150)

    assert not isinstance(m.state, ev.Failed)


@pytest.mark.parametrize(
    ("returncode", "own"),
    [
        *((status, True) for status in (0, 1, 70, -11, -6, -7)),
        *((status, False) for status in (-9, -15, -2, -1, -12, -64)),
    ],
)
def test_only_self_inflicted_exits_are_attributable(m, returncode, own):
    ready(m)
    feed(m, ev.RequestAssigned("a"))
    [lost, _] = feed(m, ev.Exited(returncode))

    assert isinstance(lost, ev.LoseRequests)
    assert lost.attributable == own


def test_three_crashes_in_a_minute_give_a_model_up(m):
    delays = [crash(ready(m, NOW + t), NOW + t) for t in (0, 20, 59)]

    assert [0.5, 1.0, float("inf")] == delays
    assert (m.error.code, m.error.retryable) == ("model_failed", False)
    assert "SIGSEGV" in m.error.message


def test_crashes_31_s_apart_do_not_give_a_model_up(m):
    delays = [crash(ready(m, NOW + t), NOW + t) for t in range(0, 900, 31)]

    assert delays[:8] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert float("inf") not in delays


def test_a_token_resets_the_restart_budget(m):
    for second in range(10):
        ready(m, NOW + second)
        feed(m, ev.RequestAssigned(str(second)), ev.TokenGenerated(), now=NOW + second)

        assert crash(m, NOW + second) == 0.5


@pytest.mark.parametrize("returncode", [-9, -15])
def test_kills_from_outside_do_not_give_a_model_up(m, returncode):
    delays = [crash(ready(m, NOW + t), NOW + t, returncode) for t in range(6)]

    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]


def test_the_delay_is_short_again_after_ten_minutes(m):
    crash(ready(m), NOW, -9)
    crash(ready(m), NOW + 1, -9)

    assert crash(ready(m), NOW + 700, -9) == 0.5


@pytest.mark.parametrize("gap", [1, 1000])
def test_crashes_during_loads_count_however_far_apart(m, gap):
    feed(m, ev.Start())
    for attempt in range(3):
        at = NOW + attempt * gap
        feed(m, ev.Spawned(7), ev.Started(), now=at)
        feed(m, ev.Exited(1), now=at)
        if attempt < 2:
            feed(m, ev.AlarmFired(), now=m.deadline)

    assert isinstance(m.state, ev.Failed)


def test_a_restarted_failed_model_has_a_new_budget(m):
    for t in range(3):
        crash(ready(m, NOW + t), NOW + t)
    ready(m, NOW + 10)

    assert crash(m, NOW + 10) == 0.5


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exited with status 0"), (-9, "was ended by SIGKILL"), (-99, "was ended by signal 99")],
)
def test_describe_names_the_exit(code, text):
    assert text == describe(code)
