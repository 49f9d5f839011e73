"""Gangs over several simulated hosts: reservations, in any order of messages and losses."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.host_gangs import Coordinator, HostLedger

BUDGET = 100


class Cluster:
    """Hosts and gangs whose messages keep their order on each connection only."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.hosts = {name: HostLedger(BUDGET) for name in "abcd"}
        self.gangs: dict[str, Coordinator] = {}
        for number in range(5):
            names = self.draw.sample(sorted(self.hosts), self.draw.randint(1, 4))
            self.gangs[f"g{number}"] = Coordinator({it: self.draw.randint(1, 90) for it in names})
        self.links: dict[tuple[str, str], deque[tuple[str, str]]] = {}
        """Messages on their way to and from a gang's host: a kind, and the attempt's name."""
        self.attempts: Counter[str] = Counter()
        self.ran: set[str] = set()

    def attempt(self, gang: str) -> str:
        """Return the name that hosts know: an answer must not be taken for that of a later ask."""
        return f"{gang}/{self.attempts[gang]}"

    def send(self, gang: str, hosts: list[str], kind: str) -> None:
        for host in hosts:
            link = self.links.setdefault((gang, host), deque())
            link.append((kind, self.attempt(gang)))

    def begin(self, gang: str) -> None:
        self.attempts[gang] += 1
        self.send(gang, self.gangs[gang].start(), "ask")

    def deliver(self) -> bool:
        """Deliver the first message of one connection; return whether there was any."""
        full = sorted(key for key, link in self.links.items() if link)
        if not full:
            return False
        gang, name = self.draw.choice(full)
        kind, attempt = self.links[gang, name].popleft()
        it, host = self.gangs[gang], self.hosts[name]
        if kind == "ask":
            self._answer(host.ask(attempt, it.needs[name]), name)
        elif kind == "leave":
            self._answer(host.leave(attempt), name)
        elif attempt == self.attempt(gang):
            ask, leave = it.answered(name, "reserved" if kind == "reserved" else "refused")
            self.send(gang, ask, "ask")
            self.send(gang, leave, "leave")
        self.check()
        return True

    def _answer(self, answers: list[tuple[str, str]], host: str) -> None:
        for attempt, answer in answers:
            link = self.links.setdefault((attempt.partition("/")[0], host), deque())
            link.append((answer, attempt))

    def lose(self, gang: str, name: str) -> None:
        """Cut a connection: what is on its way is lost, and each side acts alone."""
        self.links.pop((gang, name), None)
        for attempt in [*self.hosts[name].reserved, *self.hosts[name].waiting]:
            if attempt.startswith(f"{gang}/"):
                self._answer(self.hosts[name].leave(attempt), name)
        left = self.gangs[gang].lost(name)
        self.send(gang, [it for it in left if it != name], "leave")
        self.check()

    def check(self) -> None:
        for host in self.hosts.values():
            assert sum(host.reserved.values()) <= BUDGET, "reserved twice"
        for name, gang in self.gangs.items():
            if gang.state == "running":
                self.ran.add(name)
                assert all(
                    self.hosts[it].reserved.get(self.attempt(name)) == need
                    for it, need in gang.needs.items()
                ), "runs without all its reservations"

    def stop_one(self) -> bool:
        running = [name for name, it in self.gangs.items() if it.state == "running"]
        if running:
            name = self.draw.choice(running)
            self.send(name, self.gangs[name].stop(), "leave")
        return bool(running)


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_every_gang_runs_and_no_reservation_is_left(seed: int) -> None:
    cluster = Cluster(seed)
    for name in cluster.gangs:
        cluster.begin(name)
    for _ in range(1000):
        if not cluster.deliver() and not cluster.stop_one():
            break
    assert cluster.ran == set(cluster.gangs), "a gang waits without end"
    assert not any(host.reserved or host.waiting for host in cluster.hosts.values())


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_connections_may_be_lost_at_any_time(seed: int) -> None:
    cluster = Cluster(seed)
    draw = cluster.draw
    for name in cluster.gangs:
        cluster.begin(name)
    for _ in range(100):
        gang = draw.choice(sorted(cluster.gangs))
        match draw.choice(["deliver", "deliver", "deliver", "lose", "stop", "again"]):
            case "deliver":
                cluster.deliver()
            case "lose":
                cluster.lose(gang, draw.choice(sorted(cluster.gangs[gang].needs)))
            case "stop":
                cluster.send(gang, cluster.gangs[gang].stop(), "leave")
            case "again" if cluster.gangs[gang].state == "idle":
                cluster.begin(gang)
    for name, it in cluster.gangs.items():
        cluster.send(name, it.stop(), "leave")
    while cluster.deliver():
        pass
    assert not any(host.reserved or host.waiting for host in cluster.hosts.values())


def test_a_gang_that_can_never_fit_is_refused_and_holds_nothing() -> None:
    cluster = Cluster(1)
    cluster.gangs = {"g": Coordinator({"a": 10, "b": BUDGET + 1, "c": 10})}
    cluster.begin("g")
    while cluster.deliver():
        pass
    assert cluster.gangs["g"].state == "refused"
    assert not any(host.reserved or host.waiting for host in cluster.hosts.values())


@pytest.mark.parametrize("ordered", [True, False])
def test_the_order_of_names_prevents_that_gangs_wait_for_each_other(ordered: bool) -> None:
    hosts = {name: HostLedger(BUDGET) for name in "ab"}
    order = {"x": ("a", "b"), "y": ("a", "b") if ordered else ("b", "a")}
    held = {gang: hosts[names[0]].ask(gang, 60) for gang, names in order.items()}
    first = [gang for gang, answers in held.items() if (gang, "reserved") in answers]
    second = [gang for gang in first if hosts[order[gang][1]].ask(gang, 60)]
    assert (len(first), len(second)) == ((1, 1) if ordered else (2, 0))
