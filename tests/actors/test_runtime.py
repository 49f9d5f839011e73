"""The actor runtime: an ask always ends, a failure goes to the right one, restarts are bounded."""

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
from actors.runtime.history import EventHistory, ReplayDiffers, replay
from actors.runtime.supervision import Child, RestartLimit, SupervisionTree
from actors.runtime.timers import TIMER_SLACK_S, Alarm
from tests.sim.loop import DeadlockError, run, simulated, until


class Question(Ask[str], frozen=True):
    about: str


class Wrong(ValueError):
    """As ValueError, but that one cannot be referred to weakly."""


class Parrot(Actor[object]):
    """Remembers what it hears in a list that outlives it."""

    mailbox_limit = 5

    def __init__(self, heard: list[object]) -> None:
        self.heard = heard
        self.later: dict[str, DeferredReply[str]] = {}

    def on_start(self):
        self.heard.append("start")

    def on_restart(self, error):
        self.heard.append(f"restart {error}")

    def on_stop(self):
        self.heard.append("stop")

    def receive(self, message):
        match message:
            case Question(about="later" | "never" as about):
                self.later[about] = DeferredReply()
                return self.later[about]
            case Question(about="error"):
                raise Wrong("asked for it")
            case Question(about=about):
                return f"{about}!"
            case "answer":
                self.later["later"].answer("at last")
                self.later["later"].answer("again")
            case "stop":
                self.stop()
            case "fail":
                raise ValueError("told to")
            case other:
                self.heard.append(other)
        return None


class House:
    def __init__(self) -> None:
        self.heard: list[object] = []
        self.faults: list[BaseException] = []
        self.notices: list[Notice] = []
        self.tree = SupervisionTree(self.faults.append, self.notices.append)

    def start(self, **kwargs) -> Ref[object]:
        return self.tree.start(Child("parrot", lambda: Parrot(self.heard), **kwargs))


@pytest.fixture
def house():
    return House()


# -- tell and ask -------------------------------------------------------------------------------


@simulated
async def test_messages_come_in_order(house):
    ref = house.start()
    for number in range(5):
        ref.tell(number)
    await house.tree.stop_all()

    assert house.heard == ["start", 0, 1, 2, 3, 4, "stop"]


@simulated
async def test_an_ask_is_answered_at_once_or_later(house):
    ref = house.start()
    later = asyncio.ensure_future(ref.ask(Question("later")))

    assert await ref.ask(Question("polly")) == "polly!"
    assert not later.done()
    ref.tell("answer")
    assert await later == "at last"


@simulated
async def test_a_failure_in_an_ask_belongs_to_the_asker(house):
    ref = house.start()
    with pytest.raises(ValueError, match="asked for it"):
        await ref.ask(Question("error"))

    assert await ref.ask(Question("alive")) == "alive!"
    assert house.heard == ["start"]
    assert not house.notices


@simulated
async def test_a_failure_keeps_nothing_of_what_was_asked(house):
    ref = house.start()
    gc.disable()
    try:
        with contextlib.suppress(Wrong):
            try:
                await ref.ask(Question("error"))
            except Wrong as error:
                failure = weakref.ref(error)
                raise
        await asyncio.sleep(0)  # the loop has it in this very step
        assert failure() is None, "held by a ring of references"
    finally:
        gc.enable()


@simulated
async def test_asks_end_with_the_actor_wherever_they_are(house):
    ref = house.start()
    held = asyncio.ensure_future(ref.ask(Question("later")))
    await asyncio.sleep(0.1)
    ref.tell("stop")
    waiting = asyncio.ensure_future(ref.ask(Question("behind the stop")))
    for ask in (held, waiting):
        with pytest.raises(ActorDead):
            await ask
    with pytest.raises(ActorDead):
        await ref.ask(Question("after the end"))

    ref.tell("into the void")
    assert not ref.alive
    assert house.heard == ["start", "stop"]


@simulated
async def test_an_ask_ends_in_time(house):
    ref = house.start()
    start = asyncio.get_running_loop().time()
    with pytest.raises(AskTimeout):
        await ref.ask(Question("later"), timeout_s=3.0)

    assert asyncio.get_running_loop().time() - start == pytest.approx(3.0)
    ref.tell("answer")  # to nobody
    assert await ref.ask(Question("alive")) == "alive!"


@simulated
async def test_a_mailbox_is_bounded_but_for_last_words(house):
    ref = house.start()
    for number in range(5):
        ref.tell(number)
    with pytest.raises(MailboxFull):
        ref.tell("too much")
    with pytest.raises(MailboxFull):
        await ref.ask(Question("too much"))
    ref.tell("last word", beyond_limit=True)
    await asyncio.sleep(0.1)

    assert house.heard == ["start", 0, 1, 2, 3, 4, "last word"]


@simulated
async def test_slow_work_comes_back_as_a_message(house):
    ref = house.start()
    parrot = house.tree.actors()[0]

    async def work(fails: bool) -> str:
        await asyncio.sleep(5)
        if fails:
            raise OSError("broken")
        return "done"

    for fails in (False, True):
        parrot.pipe(work(fails), ref.tell, lambda error: ref.tell(str(error)))
    await house.tree.settle(10)
    await asyncio.sleep(0)

    assert house.heard == ["start", "done", "broken"]


# -- supervision --------------------------------------------------------------------------------


@simulated
async def test_a_permanent_child_is_replaced_and_keeps_its_address_and_mail(house):
    ref = house.start()
    held = asyncio.ensure_future(ref.ask(Question("later")))
    await asyncio.sleep(0.1)
    ref.tell("fail")
    ref.tell("next")
    with pytest.raises(ActorDead):
        await held

    assert await ref.ask(Question("alive")) == "alive!"
    assert house.heard == ["start", "start", "restart told to", "next"]
    (notice,) = house.notices
    assert (notice.event, notice.fields["actor"]) == ("actor_failed", "parrot")


@simulated
async def test_a_temporary_child_just_ends(house):
    ref = house.start(restart="temporary")
    ref.tell("fail")
    await until(lambda: not ref.alive, 1)

    assert house.heard == ["start", "stop"]
    assert not house.faults


@simulated
async def test_too_many_failures_are_a_fault_of_the_tree(house):
    ref = house.start(intensity=2, period_s=10)
    for _ in range(2):
        ref.tell("fail")
    await asyncio.sleep(11)
    for _ in range(2):
        ref.tell("fail")
    assert await ref.ask(Question("alive")) == "alive!"
    ref.tell("fail")
    await until(lambda: not ref.alive, 1)

    assert [str(fault) for fault in house.faults] == ["told to"]


@simulated
async def test_a_child_that_cannot_be_made_again_is_a_fault_of_the_tree(house):
    made = []

    def make() -> Parrot:
        if made:
            raise AssertionError("contradiction")
        made.append(1)
        return Parrot(house.heard)

    house.tree.start(Child("parrot", make)).tell("fail")
    await until(lambda: house.faults, 1)

    assert [str(fault) for fault in house.faults] == ["contradiction"]
    assert [notice.event for notice in house.notices] == ["actor_failed", "actor_lost"]


@simulated
async def test_children_stop_in_reverse_order_and_after_their_mail():
    order: list[object] = []
    tree = SupervisionTree(order.append, order.append)
    refs = []
    for name in ("first", "second"):
        heard: list[object] = []

        class Named(Parrot):
            def on_stop(self, name=name, heard=heard):
                order.append((name, heard[-1]))

        refs.append(tree.start(Child(name, lambda kind=Named, heard=heard: kind(heard))))
    for ref in refs:
        ref.tell("mail")
    await tree.stop_all()

    assert order == [("second", "mail"), ("first", "mail")]


def test_intensity_is_a_sliding_window():
    intensity = RestartLimit(2, 10.0)

    assert [intensity.again(at) for at in (0.0, 1.0, 9.9)] == [True, True, False]
    assert intensity.again(11.1)


# -- alarms -------------------------------------------------------------------------------------


@simulated
async def test_an_alarm_rings_once_and_never_before_its_time():
    loop = asyncio.get_running_loop()
    start, rings = loop.time(), []
    alarm = Alarm(lambda: rings.append(loop.time() - start))
    alarm.set(start + 5)
    alarm.set(start + 9)  # later: may ring too early
    alarm.set(start + 2)  # earlier: must ring then
    await asyncio.sleep(20)

    assert rings == [pytest.approx(2 + TIMER_SLACK_S)]
    alarm.set(loop.time() + 1)
    alarm.set(None)
    await asyncio.sleep(20)
    assert len(rings) == 1


# -- journals -----------------------------------------------------------------------------------


class Add(msgspec.Struct, frozen=True, tag=True):
    number: int


class Sign(msgspec.Struct, frozen=True, tag=True):
    """Only says when."""


class Sum(msgspec.Struct):
    total: int = 0
    seen: float = 0.0

    def handle(self, event: Add | Sign, now: float) -> list[Add]:
        self.seen = now
        if isinstance(event, Sign):
            return []
        if event.number < 0:
            raise InvalidTransition(self, event)
        self.total += event.number
        return [Add(self.total)]

    def check(self) -> None:
        assert self.total >= 0


def test_a_journal_replays_from_where_its_ring_begins():
    machine = Sum()
    journal = EventHistory(machine, segment=4)
    for number in range(11):
        journal.handle(Add(number), float(number))
    again = replay(journal.dump(), Sum, Add | Sign)

    assert machine == again
    assert 4 <= len(journal.story()) < 8


def test_of_the_signs_in_a_row_the_last_one_is_kept():
    machine = Sum()
    journal = EventHistory(machine, signs=(Sign,), segment=4)
    journal.handle(Add(1), 1.0)
    for second in range(100):
        journal.handle(Sign(), float(second))

    assert journal.story() == ["1.000 Add(number=1) -> Add(number=1)", "99.000 Sign() x100"]
    assert machine == replay(journal.dump(), Sum, Add | Sign)


def test_a_replay_that_differs_says_where():
    journal = EventHistory(Sum())
    journal.handle(Add(1), 1.0)
    forged = journal.dump().replace(b'"total":0', b'"total":7')

    with pytest.raises(ReplayDiffers, match=r"now: .*8"):
        replay(forged, Sum, Add | Sign)


def test_an_invalid_transition_tells_the_story():
    journal = EventHistory(Sum())
    journal.handle(Add(1), 1.0)
    with pytest.raises(InvalidTransition) as error:
        journal.handle(Add(-1), 2.0)

    assert "Add(number=-1) is not possible in Sum(total=1" in str(error.value)
    assert "1.000 Add(number=1)" in str(error.value)


# -- the simulated loop itself ------------------------------------------------------------------


def test_the_clock_jumps_and_a_deadlock_is_seen():
    async def sleepy() -> float:
        start = asyncio.get_running_loop().time()
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(86_400))
        return asyncio.get_running_loop().time() - start

    assert run(sleepy()) == pytest.approx(86_400)
    with pytest.raises(DeadlockError):
        run(asyncio.Event().wait())
