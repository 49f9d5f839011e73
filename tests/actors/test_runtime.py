"""The actor runtime: asks always end, failures reach the right place, restarts are limited."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref

import msgspec
import pytest

from actors.machines.machine import InvalidTransition
from actors.ports import Notice
from actors.runtime.actor import Actor, ActorDead, Ask, AskTimeout, DeferredReply, MailboxFull, Ref
from actors.runtime.history import EventHistory
from actors.runtime.supervision import Child, RestartLimit, SupervisionTree
from actors.runtime.timers import TIMER_SLACK_S, Alarm
from tests.sim.loop import DeadlockError, run, simulated, until


class Question(Ask[str], frozen=True):
    about: str


class QuestionError(ValueError):
    """A ValueError that supports weak references."""


class Parrot(Actor[object]):
    """Records its messages in a list that survives its restarts."""

    mailbox_limit = 5

    def __init__(self, received: list[object]) -> None:
        self.received = received
        self.deferred: dict[str, DeferredReply[str]] = {}

    def on_start(self):
        self.received.append("start")

    def on_restart(self, error):
        self.received.append(f"restart {error}")

    def on_stop(self):
        self.received.append("stop")

    def receive(self, message):
        match message:
            case Question(about="later" | "never" as about):
                self.deferred[about] = DeferredReply()
                return self.deferred[about]
            case Question(about="error"):
                raise QuestionError("asked for it")
            case Question(about=about):
                return f"{about}!"
            case "answer":
                self.deferred["later"].answer("first answer")
                self.deferred["later"].answer("second answer")
            case "stop":
                self.stop()
            case "fail":
                raise ValueError("failed")
            case other:
                self.received.append(other)
        return None


class Recorder:
    def __init__(self) -> None:
        self.received: list[object] = []
        self.faults: list[BaseException] = []
        self.notices: list[Notice] = []
        self.tree = SupervisionTree(self.faults.append, self.notices.append)

    def start(self, **kwargs) -> Ref[object]:
        return self.tree.start(Child("parrot", lambda: Parrot(self.received), **kwargs))


@pytest.fixture
def recorder():
    return Recorder()


# -- messages and replies -----------------------------------------------------------------------


@simulated
async def test_messages_come_in_order(recorder):
    ref = recorder.start()
    for number in range(5):
        ref.tell(number)
    await recorder.tree.stop_all()

    assert recorder.received == ["start", 0, 1, 2, 3, 4, "stop"]


@simulated
async def test_an_ask_is_answered_at_once_or_later(recorder):
    ref = recorder.start()
    later = asyncio.ensure_future(ref.ask(Question("later")))

    assert await ref.ask(Question("polly")) == "polly!"
    assert not later.done()
    ref.tell("answer")
    assert await later == "first answer"


@simulated
async def test_a_failed_ask_raises_at_the_asker(recorder):
    ref = recorder.start()
    with pytest.raises(ValueError, match="asked for it"):
        await ref.ask(Question("error"))

    assert await ref.ask(Question("alive")) == "alive!"
    assert recorder.received == ["start"]
    assert not recorder.notices


@simulated
async def test_a_failed_ask_leaves_no_reference_cycle(recorder):
    ref = recorder.start()
    gc.disable()
    try:
        with contextlib.suppress(QuestionError):
            try:
                await ref.ask(Question("error"))
            except QuestionError as error:
                failure = weakref.ref(error)
                raise
        await asyncio.sleep(0)  # until its next pass the event loop refers to the error
        assert failure() is None, "held by a reference cycle"
    finally:
        gc.enable()


@simulated
async def test_every_pending_ask_ends_with_the_actor(recorder):
    ref = recorder.start()
    held = asyncio.ensure_future(ref.ask(Question("later")))
    await asyncio.sleep(0.1)
    ref.tell("stop")
    waiting = asyncio.ensure_future(ref.ask(Question("behind the stop")))
    for ask in (held, waiting):
        with pytest.raises(ActorDead):
            await ask
    with pytest.raises(ActorDead):
        await ref.ask(Question("after the end"))

    ref.tell("after the end")
    assert not ref.alive
    assert recorder.received == ["start", "stop"]


@simulated
async def test_an_ask_times_out(recorder):
    ref = recorder.start()
    start = asyncio.get_running_loop().time()
    with pytest.raises(AskTimeout):
        await ref.ask(Question("later"), timeout_s=3.0)

    assert asyncio.get_running_loop().time() - start == pytest.approx(3.0)
    ref.tell("answer")  # after the timeout
    assert await ref.ask(Question("alive")) == "alive!"


@simulated
async def test_a_mailbox_is_bounded_except_for_messages_sent_beyond_its_limit(recorder):
    ref = recorder.start()
    for number in range(5):
        ref.tell(number)
    with pytest.raises(MailboxFull):
        ref.tell("too much")
    with pytest.raises(MailboxFull):
        await ref.ask(Question("too much"))
    ref.tell("final message", beyond_limit=True)
    await asyncio.sleep(0.1)

    assert recorder.received == ["start", 0, 1, 2, 3, 4, "final message"]


@simulated
async def test_slow_work_comes_back_as_a_message(recorder):
    ref = recorder.start()
    parrot = recorder.tree.actors()[0]

    async def work(fails: bool) -> str:
        await asyncio.sleep(5)
        if fails:
            raise OSError("broken")
        return "done"

    for fails in (False, True):
        parrot.pipe(work(fails), ref.tell, lambda error: ref.tell(str(error)))
    await recorder.tree.wait_for_pipes(10)
    await asyncio.sleep(0)

    assert recorder.received == ["start", "done", "broken"]


# -- supervision --------------------------------------------------------------------------------


@simulated
async def test_a_permanent_child_is_replaced_and_keeps_its_ref_and_mailbox(recorder):
    ref = recorder.start()
    held = asyncio.ensure_future(ref.ask(Question("later")))
    await asyncio.sleep(0.1)
    ref.tell("fail")
    ref.tell("next")
    with pytest.raises(ActorDead):
        await held

    assert await ref.ask(Question("alive")) == "alive!"
    assert recorder.received == ["start", "start", "restart failed", "next"]
    (notice,) = recorder.notices
    assert (notice.event, notice.fields["actor"]) == ("actor_failed", "parrot")


@simulated
async def test_a_temporary_child_is_not_restarted(recorder):
    ref = recorder.start(restart="temporary")
    ref.tell("fail")
    await until(lambda: not ref.alive, 1)

    assert recorder.received == ["start", "stop"]
    assert not recorder.faults


@simulated
async def test_too_many_failures_are_a_fault_of_the_tree(recorder):
    ref = recorder.start(max_failures=2, period_s=10)
    for _ in range(2):
        ref.tell("fail")
    await asyncio.sleep(11)
    for _ in range(2):
        ref.tell("fail")
    assert await ref.ask(Question("alive")) == "alive!"
    ref.tell("fail")
    await until(lambda: not ref.alive, 1)

    assert [str(fault) for fault in recorder.faults] == ["failed"]


@simulated
async def test_a_child_that_cannot_be_recreated_is_a_fault_of_the_tree(recorder):
    made = []

    def make() -> Parrot:
        if made:
            raise AssertionError("contradiction")
        made.append(1)
        return Parrot(recorder.received)

    recorder.tree.start(Child("parrot", make)).tell("fail")
    await until(lambda: recorder.faults, 1)

    assert [str(fault) for fault in recorder.faults] == ["contradiction"]
    assert [notice.event for notice in recorder.notices] == ["actor_failed", "actor_lost"]


@simulated
async def test_children_stop_in_reverse_order_after_their_messages():
    order: list[object] = []
    tree = SupervisionTree(order.append, order.append)
    refs = []
    for name in ("first", "second"):
        received: list[object] = []

        class Named(Parrot):
            def on_stop(self, name=name, received=received):
                order.append((name, received[-1]))

        refs.append(tree.start(Child(name, lambda kind=Named, received=received: kind(received))))
    for ref in refs:
        ref.tell("mail")
    await tree.stop_all()

    assert order == [("second", "mail"), ("first", "mail")]


def test_the_restart_limit_counts_in_a_sliding_window():
    limit = RestartLimit(2, 10.0)

    assert [limit.allows_restart(at) for at in (0.0, 1.0, 9.9)] == [True, True, False]
    assert limit.allows_restart(11.1)


# -- alarms -------------------------------------------------------------------------------------


@simulated
async def test_an_alarm_fires_once_after_the_earliest_time_that_was_set():
    loop = asyncio.get_running_loop()
    start, fired = loop.time(), []
    alarm = Alarm(lambda: fired.append(loop.time() - start))
    alarm.set(start + 5)
    alarm.set(start + 9)  # later: the earlier timer stays
    alarm.set(start + 2)  # earlier: replaces the timer
    await asyncio.sleep(20)

    assert fired == [pytest.approx(2 + TIMER_SLACK_S)]
    alarm.set(loop.time() + 1)
    alarm.set(None)
    await asyncio.sleep(20)
    assert len(fired) == 1


# -- histories ----------------------------------------------------------------------------------


class Add(msgspec.Struct, frozen=True, tag=True):
    number: int


class Tick(msgspec.Struct, frozen=True, tag=True):
    """An event without fields."""


class Sum(msgspec.Struct):
    total: int = 0

    def handle(self, event: Add | Tick, now: float) -> list[Add]:
        if isinstance(event, Tick):
            return []
        if event.number < 0:
            raise InvalidTransition(self, event)
        self.total += event.number
        return [Add(self.total)]

    def check(self) -> None:
        assert self.total >= 0


def test_a_history_keeps_the_newest_events():
    history = EventHistory(Sum(), limit=4)
    for number in range(11):
        history.handle(Add(number), float(number))

    assert history.story() == [
        "7.000 Add(number=7) -> Add(number=28)",
        "8.000 Add(number=8) -> Add(number=36)",
        "9.000 Add(number=9) -> Add(number=45)",
        "10.000 Add(number=10) -> Add(number=55)",
    ]


def test_equal_merged_events_in_a_row_become_one_entry():
    history = EventHistory(Sum(), merged=(Tick,), limit=4)
    history.handle(Add(1), 1.0)
    for second in range(100):
        history.handle(Tick(), float(second))

    assert history.story() == ["1.000 Add(number=1) -> Add(number=1)", "99.000 Tick() x100"]


def test_an_invalid_transition_carries_the_story():
    history = EventHistory(Sum())
    history.handle(Add(1), 1.0)
    with pytest.raises(InvalidTransition) as error:
        history.handle(Add(-1), 2.0)

    assert "Add(number=-1) is not possible in Sum(total=1" in str(error.value)
    assert "1.000 Add(number=1)" in str(error.value)


# -- the simulated loop itself ------------------------------------------------------------------


def test_the_clock_jumps_and_a_deadlock_is_detected():
    async def sleepy() -> float:
        start = asyncio.get_running_loop().time()
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(86_400))
        return asyncio.get_running_loop().time() - start

    assert run(sleepy()) == pytest.approx(86_400)
    with pytest.raises(DeadlockError):
        run(asyncio.Event().wait())
