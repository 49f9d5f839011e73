"""How the ranks of a worker end, in any order of exits."""

from __future__ import annotations

from signal import SIGKILL, SIGSEGV, SIGTERM

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.daemon.gang import GRACE_S, Gang
from protocol.gang import DIVERGED, PEER_LOST

STATUSES = st.sampled_from(
    [0, 1, DIVERGED, PEER_LOST, PEER_LOST, -SIGKILL, -SIGKILL, -SIGSEGV, -SIGTERM]
)


def test_the_end_of_a_single_process_is_its_own():
    gang = Gang(1)
    assert gang.exited(0, -SIGKILL, 1.0) == []
    assert (gang.deadline, gang.cause.returncode, gang.cause.by_daemon) == (None, -SIGKILL, False)


def test_a_kill_by_the_daemon_is_the_end_of_a_single_process():
    gang = Gang(1)
    assert gang.kill() == [0]
    gang.exited(0, -SIGKILL, 1.0)
    assert (gang.cause.returncode, gang.cause.by_daemon) == (-SIGKILL, True)


@pytest.mark.parametrize("status", [1, DIVERGED, -SIGKILL, -SIGSEGV, -SIGTERM])
def test_any_first_exit_ends_all_at_once(status):
    gang = Gang(3)
    assert gang.exited(1, status, 1.0) == [0, 2]
    assert gang.exited(2, -SIGKILL, 1.1) == []
    assert gang.exited(0, PEER_LOST, 1.2) == []
    assert (gang.cause.rank, gang.cause.returncode) == (1, status)


def test_the_leaders_ordered_exit_ends_the_followers():
    gang = Gang(2)
    assert gang.exited(0, 0, 1.0) == [1]
    gang.exited(1, -SIGKILL, 1.1)
    assert (gang.cause.rank, gang.cause.returncode) == (0, 0)


@pytest.mark.parametrize("status", [0, PEER_LOST])
def test_a_follower_that_left_after_its_leader_gives_it_time_to_exit_itself(status):
    gang = Gang(3)
    assert gang.exited(1, status, 1.0) == []
    assert gang.time_out(1.0 + GRACE_S / 2) == []
    assert gang.exited(0, 0, 1.0 + GRACE_S / 2) == [2]
    gang.exited(2, -SIGKILL, 2.0)
    assert (gang.cause.rank, gang.cause.returncode) == (0, 0)


def test_ranks_that_stay_are_killed_after_the_grace():
    gang = Gang(3)
    gang.exited(2, PEER_LOST, 1.0)
    assert gang.deadline == 1.0 + GRACE_S
    gang.exited(1, PEER_LOST, 1.5)
    assert gang.deadline == 1.0 + GRACE_S, "later exits do not extend it"
    assert gang.time_out(1.0 + GRACE_S) == [0]
    assert gang.deadline is None
    gang.exited(0, -SIGKILL, 2.1)
    assert (gang.cause.rank, gang.cause.returncode) == (2, PEER_LOST)


def test_a_kill_from_outside_explains_what_was_observed_first():
    gang = Gang(3)
    gang.exited(0, PEER_LOST, 1.0)
    assert gang.exited(1, -SIGKILL, 1.01) == [2]
    gang.exited(2, -SIGKILL, 1.02)
    assert (gang.cause.rank, gang.cause.by_daemon) == (1, False)


@given(data=st.data(), ranks=st.integers(1, 8))
def test_every_end_kills_whatever_lives_and_has_one_cause(data, ranks):
    gang, now = Gang(ranks), 0.0
    ordered = False
    while gang.alive:
        now += data.draw(st.floats(0.001, 2 * GRACE_S))
        alive, deadline = gang.alive, gang.deadline
        if data.draw(st.sampled_from(["exit", "exit", "kill", "wait"])) == "kill":
            assert gang.kill() == sorted(alive)
            ordered = True
        elif deadline is not None and now >= deadline:
            assert gang.time_out(now) == sorted(alive)
            assert gang.time_out(now + GRACE_S) == []
        else:
            rank = data.draw(st.sampled_from(sorted(alive)))
            status = data.draw(STATUSES)
            kills = gang.exited(rank, status, now)
            assert set(kills) in (set(), gang.alive)
        rest = gang.alive
        # Whatever lives beside a dead rank is killed already, or will be within the grace.
        assert not rest or len(rest) == ranks or rest <= gang.killed or gang.deadline is not None
        assert gang.deadline is None or gang.deadline <= now + GRACE_S
    assert gang.deadline is None
    reasons = [it for it in gang.exits if not it.follows]
    assert gang.cause == (reasons or gang.exits)[0]
    assert not gang.cause.by_daemon or ordered or all(it.follows for it in gang.exits)
    assert {it.rank for it in gang.exits} == set(range(ranks))
