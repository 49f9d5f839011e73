"""A daemon on simulated time: actors, sessions, journal and HTTP are real, and so are its ends.

It can be stopped, or killed as SIGKILL does, and started again on the same journal. Its clients
connect through `tests.sim.network`, and its workers are `tests.sim.loop_process`.
"""

from __future__ import annotations

import asyncio
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from actors.machines.watchdog import WatchdogTimeouts
from actors.ports import Notice
from actors.saved_requests import SavedRequests
from actors.status import KnownModel
from actors.system import Settings
from kvd.config.http import HttpSettings
from kvd.daemon.journal import DiskJournal
from kvd.host.listen import ClientProtocol
from kvd.http.listeners import Listener
from kvd.http.server import Server
from tests.sim.day_config import BUDGET, MIB, DayConfig
from tests.sim.loop import until
from tests.sim.loop_gang import LoopSpawn
from tests.sim.network import PEER, Link, same_user
from tests.sim.world import World

UNREAD_BYTES = 8 * 1024
"""Unread bytes at which a client is disconnected: more than one reply to ``status``."""
STOP_S = 1000.0
"""Simulated seconds in which a daemon drains."""
WATCHDOG = WatchdogTimeouts(
    spawning_s=5,
    loading_s=10,
    idle_s=12,
    tokenize_s=8,
    prefill_s=8,
    decode_s=8,
    flush_s=8,
    pools_s=8,
    asked_s=1,
    halted_s=0.5,
    terminated_s=1,
)
"""Shorter than the defaults, so that a day is short."""


class SimDaemon:
    """One daemon after another on one home."""

    world: World

    def __init__(
        self,
        draw: random.Random,
        delay_s: Callable[[], float],
        config: DayConfig,
        journal: Path | None,
        notify: Callable[[Notice], None],
    ) -> None:
        self._draw, self._delay_s = draw, delay_s
        self._config = config
        self._folder = journal
        self._notify = notify
        self._journal: DiskJournal | None = None
        self._runs = 0
        self._listener = Listener(PEER, "simulated")
        self.spawn = LoopSpawn(draw, delay_s)
        self.wall_s = 0.0
        """Seconds that the wall clock is ahead of the event loop's."""

    @property
    def journaled(self) -> bool:
        return self._folder is not None

    @property
    def known(self) -> dict[str, KnownModel]:
        return self.world.system._statuses.known

    async def start(self) -> None:
        saved = SavedRequests()
        if self._folder is not None:
            self._journal = DiskJournal(
                self._folder, limit_bytes=10 * MIB, keep_s=600.0, clock=self._wall_clock
            )
            saved = SavedRequests(self._journal, self._journal.saved)
        settings = Settings(
            max_rows=4,
            prefill_chunk=64,
            max_queue=20,
            slow_reader_bytes=UNREAD_BYTES,
            time_slices=self._draw.choice(["on", "off"]),
            patience=WATCHDOG,
        )
        self.world = World(
            {}, BUDGET, settings, saved, self._config.known(), spawn=self.spawn, notify=self._notify
        )
        self.world.system.configuration = self._config.connect(self.world.system)
        await self.world.system.start()
        self._name_requests()
        self.http = Server(
            self.world.system, HttpSettings(), [], unread_limit=UNREAD_BYTES, uid_of=same_user
        )
        await self.http.start()

    def _name_requests(self) -> None:
        """Make request ids unique over all runs, and not random: their order matters to a seed."""
        self._runs += 1
        system = self.world.system
        system._client_services = replace(system._client_services, rid_prefix=f"{self._runs}-")

    def _wall_clock(self) -> float:
        return asyncio.get_running_loop().time() + self.wall_s

    async def stop(self, *, force: bool) -> None:
        """Stop as after a signal, or with ``force`` as after a second one."""
        await asyncio.wait_for(self.world.system.stop(force=force), STOP_S)
        await self.http.close()
        await until(lambda: not self.spawn.alive(), STOP_S)
        self.world.check()
        self._close_journal()

    async def kill(self) -> None:
        """End the daemon as SIGKILL does: no actor runs again, and workers lose their daemon.

        The caller cuts all connections first.
        """
        for process in self.spawn.alive():
            process.orphan()
        self.spawn.levels.daemon_killed()
        if self._journal is not None:
            self._journal.write = lambda _record: None  # type: ignore[method-assign]
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of coroutines that had not begun
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        self._close_journal()

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def connect(self, received: Callable[[bytes], None], ended: Callable[[], None]) -> Link:
        """Connect a client of the protocol."""
        protocol = ClientProtocol(self.world.system.connect, same_user)
        return Link(self._draw, self._delay_s, protocol, received, ended)

    def connect_http(self, received: Callable[[bytes], None], ended: Callable[[], None]) -> Link:
        protocol = self.http._connected(self._listener)
        return Link(self._draw, self._delay_s, protocol, received, ended)

    def check(self) -> None:
        """Check the daemon's invariants, and that its workers hold what they were granted."""
        self.world.check()
        assert not self.world.system.finished.done(), "the daemon ended"
        ledger = self.world.system._governor.machine.devices[0].ledger
        most = max(ledger.budget_bytes, ledger.ceiling_bytes)
        granted = 0
        for process in self.spawn.alive():
            granted += process.granted_bytes
            assert process.held_bytes <= process.granted_bytes, (
                f"{process} holds {process.held_bytes} of {process.granted_bytes} bytes"
            )
            known = ledger.grants.get(process.name, 0)
            assert process.granted_bytes <= known, (
                f"{process} believes in {process.granted_bytes} bytes; the ledger granted {known}"
            )
        assert granted <= most, f"workers may hold {granted} bytes, of {most}"
