"""A daemon's day in miniature: everything is real except time, the network and the tensors.

Supervisor, governor, router, sessions, journal and HTTP, and the loop and the scheduler of every
worker run on simulated time. The seed draws the models, what clients and operators do, and the
faults: workers killed or stopped at any moment, spawns that fail, connections that are cut or not
read, delays that change the order between connections, memory readings that lie, clocks that jump,
and daemons that are killed. In the end every request must have ended once, with the tokens that it
would have had alone.

A seed replays, with a line for each thing that happens: ``python -m tests.sim.daemon_day SEED``.
``FIRST LAST [PROCESSES]`` runs many seeds and prints counts, and the seeds that fail.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import structlog.testing

from actors.ports import Notice
from protocol import messages
from tests.sim.asked import Asked
from tests.sim.day_clients import HttpClient, SocketClient
from tests.sim.day_config import BUDGET, MIB, DayConfig
from tests.sim.loop import run, until
from tests.sim.loop_process import LoopProcess
from tests.sim.sim_daemon import WATCHDOG, SimDaemon

ACTIONS = 20
PATIENCE_S = 1000.0
"""Simulated seconds after the last fault in which every request ends."""
STEP_S = 1.0
"""Simulated seconds: more than any step of a worker and the requantization before it."""
MODELS = ("a", "b", "c")
PAUSES_S = (0.0, 0.0, 0.01, 0.1, 0.3, 1.0)
"""Seconds between two actions."""

FAULTS = ("killed", "stopped", "follower killed", "follower stopped")

ENDS: dict[str, tuple[str, ...]] = {
    "length": ("settles",),
    "stop": ("settles",),
    "overloaded": ("settles",),
    "draining": ("unload", "drain", "daemon restarts"),
    "model_failed": (*FAULTS, "spawn fails"),
    "quarantined": FAULTS,
    "insufficient_memory": ("budget", "pin", "load of removed {model}"),
    # The real daemon's clock leaves out the time in which it was stopped; the simulated one jumps.
    "aborted": ("stopped reading", "slow network", "clock jumped"),
    "invalid_model": ("broken model",),
    "unknown_model": ("model removed",),
    "request_timeout": ("clock jumped",),  # while the body was on its way
    "unknown_request": ("clock jumped",),  # saved requests expire
    "closed": ("daemon restarts",),
    "reset": ("reset", "HTTP reset"),
    "daemon killed": ("daemon killed",),
}
"""How requests end, and what must have happened that day.

A cancelled request, and one whose deadline passed, explain their own end. A slow reader's client
has checked how much it left unread. A load that a user ordered is refused if models in use hold
the memory; requests that wait for it go on only if the model is in the configuration."""


class DaemonDay:
    """One seeded day. After `run`, `counts` has the number of each event."""

    def __init__(self, seed: int, folder: Path, trace: Callable[[str], None] | None = None) -> None:
        self.draw = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.asked: list[Asked] = []
        self.clients: list[SocketClient] = []
        self.web: list[HttpClient] = []
        self._trace = trace
        self._slowest_s = self.draw.choice([0.002, 0.02, 0.5])
        self._config = DayConfig(self.draw, folder)
        self._drawn = self._config.known()
        journal = folder / "journal" if self.draw.random() < 0.6 else None
        self.daemon = SimDaemon(self.draw, self.delay_s, self._config, journal, self._notify)
        self._slow: list[tuple[float, SocketClient | HttpClient]] = []
        """Clients that do not read, and when they do so again."""
        self._ordered: set[str] = set()
        """Models that a client has loaded."""
        self._removed: set[str] = set()
        """Models that were removed from the configuration."""

    def delay_s(self) -> float:
        return self.draw.random() * self._slowest_s

    def note(self, what: str, detail: object = "") -> None:
        self.counts[what] += 1
        self._write(f"{what}: {detail}" if detail != "" else what)

    def _notify(self, notice: Notice) -> None:
        assert notice.event not in {"actor_failed", "actor_lost"}, notice
        self._write(f"    {notice.event} {notice.fields}")

    def _write(self, line: str) -> None:
        if self._trace is not None:
            self._trace(f"{asyncio.get_running_loop().time() - 1000.0:10.3f}  {line}")

    # Clients.

    def _connect(self) -> SocketClient:
        self.clients.append(SocketClient(self.daemon.connect))
        return self.clients[-1]

    def _client(self) -> SocketClient:
        alive = [client for client in self.clients if client.link.open]
        if not alive or (len(alive) < 3 and self.draw.random() < 0.1):
            return self._connect()
        return self.draw.choice(alive)

    def _open(self) -> list[SocketClient | HttpClient]:
        return [client for client in (*self.clients, *self.web) if client.link.open]

    def _draw_asked(self, *, chat: bool = False, tools: bool = False) -> Asked:
        draw = self.draw
        start = draw.choice(["once upon a time ", f"{draw.random()} "])
        text = start * draw.choice([1, 1, 4, 12])
        n, most = draw.choice([1, 1, 1, 1, 3]), draw.choice([1, 3, 8, 8, 20, 20, 300, 500])
        asked = Asked(
            number=len(self.asked) + 1,
            model=draw.choice("aaabbc"),
            prompt=f"user: {text}\n" if chat or tools else text,
            seed=draw.randrange(100),
            max_tokens=draw.choice([3, 8, 20, 60]) if tools else max(1, most // n),
            n=n,
            stop="" if tools else draw.choice(["", "", "", "a k", "o di"]),
            tools=tools,
            logprobs=draw.choice([None, None, None, 2]),
            priority=draw.choice([0, 0, 0, 1]),
            deadline_s=draw.choice([None] * 9 + [3.0]),
        )
        self.asked.append(asked)
        return asked

    def ask_socket(self) -> None:
        asked = self._draw_asked(tools=self.draw.random() < 0.3)
        self.note("asked", asked)
        self._client().ask(asked)

    def ask_http(self) -> None:
        chat, stream = self.draw.random() < 0.5, self.draw.random() < 0.6
        asked = self._draw_asked(chat=chat, tools=chat and self.draw.random() < 0.5)
        self.note("asked over HTTP", asked)
        self.web.append(HttpClient(self.daemon.connect_http, asked, chat=chat, stream=stream))

    def cancel(self) -> None:
        client = self._client()
        if client.asked:
            key = self.draw.choice(list(client.asked))
            self.note("cancel", client.asked[key])
            client.cancel(key)

    def disconnect(self) -> None:
        over_http = [client for client in self.web if client.waits]
        if over_http and self.draw.random() < 0.5:
            web = self.draw.choice(over_http)
            self.note("HTTP reset", web.asked)
            web.reset("reset")
        else:
            client = self._client()
            self.note("reset", list(client.asked.values()))
            client.reset("reset")

    def stop_reading(self) -> None:
        if clients := self._open():
            client = self.draw.choice(clients)
            seconds = self.draw.choice([0.5, 5.0, 100.0])
            self.note("stopped reading", f"{seconds} s")
            client.link.read(on=False)
            self._slow.append((asyncio.get_running_loop().time() + seconds, client))

    def _read_again(self) -> None:
        now = asyncio.get_running_loop().time()
        for due, client in self._slow:
            if due <= now:
                client.link.read(on=True)
        self._slow = [it for it in self._slow if it[0] > now]

    def look(self) -> None:
        kind = self.draw.choice([messages.Status, messages.Hello, messages.Events, None])
        client = self._client()
        if kind is not None:
            client.send(kind)
        elif client.followed:
            client.unfollow()
        else:
            self.note("follow")
            client.follow()

    def tokenize(self) -> None:
        name = self.draw.choice("abcd")
        self.note("tokenize", name)
        self._client().send(messages.Tokenize, model=name, prompt="a text")

    # Operators.

    def load(self) -> None:
        name = self.draw.choice("abc")
        known = self._drawn[name]
        self.note("load", name)
        self._ordered.add(name)
        self._client().send(messages.Load, model=known.source, alias=name, kv=known.kv)

    def unload(self) -> None:
        name, force = self.draw.choice("abc"), self.draw.random() < 0.3
        self.note("unload", f"{name}, {force=}")
        self._client().send(messages.Unload, model=name, force=force)

    def pin(self) -> None:
        kind = self.draw.choice([messages.Pin, messages.Unpin, messages.Unpin])
        name = self.draw.choice("abc")
        self.note("pin", f"{kind.__name__} {name}")
        self._client().send(kind, model=name)

    def set_budget(self) -> None:
        budget = self.draw.choice([64, 80, 100, 120]) * MIB
        self.note("budget", f"{budget // MIB} MiB")
        self._client().send(messages.Configure, budget_bytes=budget)

    def reload(self) -> None:
        """Remove a model from the configuration, or list it with another policy; reload that."""
        name = self.draw.choice("abc")
        if self.draw.random() < 0.3:
            self.note("model removed", name)
            self._removed.add(name)
            self._config.remove(name)
        else:
            ttl_s, priority = self.draw.choice([None, 5.0]), self.draw.choice([0, 1, -1])
            self.note("policy", f"{name}: {ttl_s=}, {priority=}")
            self._config.change(name, idle_ttl_s=ttl_s, priority=priority)
        self._client().send(messages.Reload)

    # Faults.

    def _process(self) -> LoopProcess | None:
        alive = self.daemon.spawn.alive()
        return self.draw.choice(alive) if alive else None

    def kill(self) -> None:
        if (process := self._process()) is not None:
            rank = self.draw.randrange(len(process.pids))
            self.note("follower killed" if rank else "killed", process)
            process.die(self.draw.choice([-9, -9, -9, -11]), rank)

    def pause(self) -> None:
        if (process := self._process()) is not None:
            seconds = self.draw.choice([0.3, 3.0, float("inf")])
            rank = self.draw.randrange(len(process.pids))
            self.note("follower stopped" if rank else "stopped", f"{process}, {seconds} s")
            process.pause(seconds, rank)

    def fail_spawn(self) -> None:
        self.daemon.spawn.failing = self.draw.randint(1, 2)
        self.note("spawn fails", self.daemon.spawn.failing)

    def lie(self) -> None:
        if (process := self._process()) is not None:
            process.lie = self.draw.choice([0.0, 0.5, 1.0, 1.1, 1.5])
            self.note("lie", f"{process}, {process.lie}")

    def press(self) -> None:
        memory = self.daemon.world.memory
        memory.pressure = self.draw.choice(["normal", "normal", "warning", "critical"])
        self.note("pressure", memory.pressure)

    def jump(self) -> None:
        loop: Any = asyncio.get_running_loop()
        seconds = self.draw.choice([1.0, 30.0, 3600.0])
        loop.now += seconds
        for asked in self.asked:
            asked.cancelled_at += seconds
        self.daemon.wall_s += self.draw.choice([0.0, -7200.0, 7200.0])
        self.note("clock jumped", f"{seconds} s")

    def _named(self) -> list[Asked]:
        """Return the open requests that their clients could attach to."""
        return [it for client in self.clients for it in client.asked.values() if it.name]

    async def restart(self) -> None:
        """Kill or stop the daemon, start the next one, and attach to most of what was left."""
        if self.daemon.journaled:
            self.ask_socket()
            for _ in range(50):
                if self._named():  # most often, some request is running then
                    break
                await asyncio.sleep(0.1)
        if self.draw.random() < 0.2:
            self.note("drain")
            self._client().send(messages.Drain)
            self.ask_socket()
            await asyncio.sleep(self.draw.choice(PAUSES_S))
        named = self._named()
        if self.draw.random() < 0.7:
            self.note("daemon killed")
            for client in self._open():
                client.reset("daemon killed")
            await self.daemon.kill()
        else:
            force = self.draw.random() < 0.5
            self.note("daemon restarts", f"{force=}")
            await self._stop(force=force)
            await asyncio.sleep(10 * self._slowest_s)
            named = [asked for asked in named if asked.ended == "draining"]
        await self.daemon.start()
        self.note("daemon started")
        for asked in named:
            if self.daemon.journaled and not asked.cancelled and self.draw.random() < 0.8:
                self.note("attach", asked)
                self._client().attach(asked)

    # The day.

    async def run(self) -> None:
        acts: list[tuple[int, Callable[[], Awaitable[None] | None]]] = [
            (30, self.ask_socket),
            (12, self.ask_http),
            (5, self.cancel),
            (3, self.disconnect),
            (3, self.stop_reading),
            (2, self.look),
            (1, self.tokenize),
            (2, self.load),
            (2, self.unload),
            (1, self.pin),
            (2, self.set_budget),
            (2, self.reload),
            (4, self.kill),
            (2, self.pause),
            (1, self.fail_spawn),
            (1, self.lie),
            (1, self.press),
            (1, self.jump),
            (2, self.restart),
        ]
        weights = [weight for weight, _ in acts]
        await self.daemon.start()
        self.counts["slow network"] = int(self._slowest_s > 0.1)
        broken = ("load_error" in known.source for known in self._drawn.values())
        self.counts["broken model"] = sum(broken)
        for _ in range(ACTIONS):
            if (work := self.draw.choices(acts, weights)[0][1]()) is not None:
                await work
            await asyncio.sleep(self.draw.choice(PAUSES_S))
            self._read_again()
            self.daemon.check()
        await self._settle()

    async def _settle(self) -> None:
        """End the faults; then everything ends, and nothing is left."""
        await asyncio.sleep(self._slowest_s)  # other operators' commands arrive before these
        self.daemon.spawn.failing = 0
        self.daemon.world.memory.pressure = "normal"
        for process in self.daemon.spawn.alive():
            process.lie = 1.0
        for client in self._open():
            client.link.read(on=True)
        for client in self.clients:
            client.unfollow()
        operator = self._connect()
        for name in self._drawn:
            operator.send(messages.Unpin, model=name)
        self._config.reset()
        operator.send(messages.Reload)
        operator.send(messages.Configure, budget_bytes=BUDGET)
        self.note("settles")
        await until(self._is_over, PATIENCE_S, every_s=0.25)
        self.daemon.check()
        assert self.daemon.known == self._drawn, "other models than those of the configuration"
        await self.daemon.stop(force=False)
        await asyncio.sleep(10 * self._slowest_s)
        self._check_ends()
        self._check_nothing_left()

    def _is_over(self) -> bool:
        return not any(client.waits for client in self._open())

    def _check_ends(self) -> None:
        """Every request has ended in a way that something in this day explains."""
        for name in self._ordered & self._removed:
            self.note(f"load of removed {name}")
        for asked in self.asked:
            how = asked.ended or asked.abandoned
            took_s = asked.cancel_took_s
            assert took_s < self._cancel_limit_s, f"{asked} ended {took_s} s after its cancel"
            self.note(f"ended: {how}", asked)
            assert how, f"{asked} never ended"
            match how:
                case "cancelled":
                    known = asked.cancelled or asked.disconnected
                    assert known, f"{asked} was cancelled by nobody"
                case "deadline_exceeded":
                    assert asked.deadline_s is not None, f"{asked} has no deadline"
                case "slow_reader":
                    pass
                case _:
                    causes = [cause.format(model=asked.model) for cause in ENDS[how]]
                    explained = any(self.counts[cause] for cause in causes)
                    assert explained, f"{asked} ended with {how}, and none of {causes}"

    async def _stop(self, *, force: bool) -> None:
        """Stop the daemon; after a while by force, as it does itself after `drain_timeout_s`.

        That may be necessary if a reading lies: what a worker seems to use beyond its grant is
        withheld from the loads that a drain waits for.
        """
        try:
            await self.daemon.stop(force=force)
        except TimeoutError:
            assert not force, "the daemon does not stop by force"
            assert self.counts["lie"], "the daemon does not stop"
            self.note("the drain takes too long")
            await self.daemon.stop(force=True)

    @property
    def _cancel_limit_s(self) -> float:
        """Seconds in which a cancel takes effect: a step of the model, and six messages.

        It does not wait for a time slice. A process that was stopped is first ended by the
        watchdog.
        """
        return (
            STEP_S
            + 6 * self._slowest_s
            + (WATCHDOG.idle_s + 3.0)
            * any(self.counts[it] for it in ("stopped", "follower stopped"))
        )

    def _check_nothing_left(self) -> None:
        loop: Any = asyncio.get_running_loop()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        assert not tasks, f"tasks are left: {tasks}"
        timers = [timer for timer in loop._scheduled if not timer.cancelled()]
        assert not timers, f"timers are left: {timers}"


def play(seed: int, trace: Callable[[str], None] | None = None) -> DaemonDay:
    """Run one day; raise if the daemon breaks a promise or logs an error."""
    gc.disable()  # a day makes less garbage than a collection costs
    try:
        with tempfile.TemporaryDirectory() as folder, structlog.testing.capture_logs() as logs:
            day = DaemonDay(seed, Path(folder), trace)
            run(day.run())
    finally:
        gc.enable()
    errors = [entry for entry in logs if entry["log_level"] in {"error", "critical"}]
    assert not errors, errors
    return day


def summary(first: int, last: int, processes: int = 1) -> dict[str, Any]:
    """Run the seeds from ``first`` to ``last``; return what happened, and the seeds that failed."""
    started = time.perf_counter()
    total: Counter[str] = Counter()
    failed: dict[str, str] = {}
    with ProcessPoolExecutor(processes) as pool:
        for counts, failures in pool.map(_play_some, _parts(first, last)):
            total.update(counts)
            failed |= failures
    return {
        "command": "python -m tests.sim.daemon_day FIRST LAST PROCESSES",
        "seeds": [first, last],
        "failed": failed,
        "processes": processes,
        "seconds": round(time.perf_counter() - started, 1),
        "counts": dict(sorted(total.items())),
    }


def _parts(first: int, last: int) -> list[range]:
    return [range(it, min(it + 100, last + 1)) for it in range(first, last + 1, 100)]


def _play_some(seeds: range) -> tuple[Counter[str], dict[str, str]]:
    total: Counter[str] = Counter()
    failed: dict[str, str] = {}
    for seed in seeds:
        try:
            total.update(play(seed).counts)
        except Exception as error:  # noqa: BLE001 - the other seeds run too
            failed[str(seed)] = repr(error)
            sys.stderr.write(f"seed {seed}: {error!r}\n")
    return total, failed


def main(arguments: list[str]) -> None:
    """Replay one seed, or run a range of them."""
    first, *rest = map(int, arguments)
    if rest:
        sys.stdout.write(json.dumps(summary(first, *rest), indent=1) + "\n")
    else:
        play(first, print)


if __name__ == "__main__":
    main(sys.argv[1:])
