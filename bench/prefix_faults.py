"""Damage stored prefixes, kill processes while they write, and let the disk fail.

A real daemon serves the embedded model with a prefix store. Files are damaged in eight ways and the
index in three; the worker and the daemon get ``SIGKILL`` at random moments during writes; calls of
both fail with ``ENOSPC`` or ``EIO`` (`bench/faulty_disk.c`, if there is a C compiler). Every answer
must have the tokens of the first one, which was computed. After the next start, no incomplete file
is left, every file is complete and in the index, and the stored bytes are within the limit.

    python -m bench.prefix_faults --corruptions 500 --kills 50 [--prefill-s 1] --out bench/results/…

The seed determines the faults; what the processes do at these times depends on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import mmap
import os
import random
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from bench.chaos import WORDS, connected
from bench.report import machine, publish
from kvd.client import AsyncClient
from protocol import segment_file
from protocol.record_file import DamagedFile, RecordWriter
from protocol.record_format import PLAIN
from protocol.segments import PART_SUFFIX, SUFFIX

MODEL = "demo"
CONFIG = f"""models = ["{MODEL}"]
[prefix_store]
limit = {{limit_bytes}}
keep_free = 0
"""
FIRST_WORDS = 560
DAMAGE = ("flip", "cut", "zero", "swap", "version", "empty", "gone", "end")
INDEX_DAMAGE = ("flip", "cut", "zero")
SOURCE = Path(__file__).with_name("faulty_disk.c")


_EXPECTED_CODES = (None, 0, -signal.SIGKILL)


class _LogLine(msgspec.Struct):
    """The fields of a line of the daemon's log that are read."""

    event: str = ""
    returncode: int | None = None


@dataclass(frozen=True)
class Limits:
    """What a run depends on besides its faults. The command line has an option for each."""

    limit_mb: int = 192
    """Limit of the store: about 35 segments of the longest prompts. With fewer, each new worker
    finds few files to read."""
    wait_s: float = 60.0
    """Longest wait for the store to settle."""
    prefill_s: float = 1.0
    """Least seconds of prefill of a prompt, four times what is worth a segment. Most of a run's
    time is prefill."""

    @property
    def limit_bytes(self) -> int:
        return self.limit_mb * 10**6


@dataclass
class Found:
    """What the run counted."""

    corruptions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DAMAGE, 0))
    index_corruptions: int = 0
    worker_kills: int = 0
    daemon_kills: int = 0
    kills_during_a_write: int = 0
    """Kills while an incomplete file was there."""
    unexpected_exits: int = 0
    """Workers that ended by an error, and actors that failed."""
    failed_calls: int = 0
    answers: int = 0
    restored: int = 0
    """Answers of which a part came from the store."""
    damage_events: int = 0
    unread: int = 0
    """Damaged files that no answer needed: the worker expected prefill to be as fast."""
    store_off_events: int = 0
    wrong: list[str] = field(default_factory=list)


class FaultyDisk:
    """The control of `bench/faulty_disk.c`."""

    def __init__(self, root: Path) -> None:
        self.library = root / "faulty_disk.so"
        flags = ["-shared", "-fPIC", "-O1", "-o", str(self.library), str(SOURCE), "-ldl"]
        subprocess.run([compiler() or "cc", *flags], check=True, capture_output=True)
        path = root / "control"
        path.write_bytes(bytes(16))
        with path.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), 16)
        self.variables = {
            "LD_PRELOAD": ":".join(filter(None, [str(self.library), os.environ.get("LD_PRELOAD")])),
            "KVD_FAULTY_FOLDER": str(root / "h" / "prefixes"),
            "KVD_FAULTY_CONTROL": str(path),
        }

    def fail(self, per_mille: int, error: int = 0) -> None:
        self._control[:8] = struct.pack("<II", per_mille, error)

    @property
    def failures(self) -> int:
        (count,) = struct.unpack("<Q", self._control[8:])
        return int(count)


def compiler() -> str | None:
    """Return the command of a C compiler, if there is one."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


class Store:
    """A daemon with a prefix store, in a temporary home."""

    def __init__(self, seed: int, limits: Limits) -> None:
        self.limits = limits
        self.root = Path(tempfile.mkdtemp(prefix="kvd-faults-"))
        self.home = self.root / "h"
        self.home.mkdir(mode=0o700)
        (self.home / "config.toml").write_text(CONFIG.format(limit_bytes=limits.limit_bytes))
        self.prefixes = self.home / "prefixes"
        self.random = random.Random(seed)
        self.found = Found()
        self.began = time.monotonic()
        usable = sys.platform == "linux" and compiler() is not None
        self.disk = FaultyDisk(self.root) if usable else None
        self.answers: dict[str, tuple[int, ...]] = {}
        """The tokens that each prompt had at first."""
        self._words = FIRST_WORDS
        """Least words of a prompt."""
        self._process: subprocess.Popen[bytes] | None = None
        self._client: AsyncClient | None = None

    def note(self, text: str) -> None:
        """Print how far the run is."""
        seconds = time.monotonic() - self.began
        print(
            f"{seconds:.0f} s: {text}; {len(self.found.wrong)} wrong", file=sys.stderr, flush=True
        )

    # -- the processes ----------------------------------------------------------------------------

    async def start(self) -> None:
        command = [sys.executable, "-m", "kvd", "serve", "--home", str(self.home)]
        variables = os.environ | (self.disk.variables if self.disk else {})
        with (self.root / "log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs now
                command, stdout=log, stderr=log, env=variables, start_new_session=True
            )
        self._client = await connected(self.home)

    async def kill_daemon(self) -> None:
        """Kill the daemon only: its worker must end by itself."""
        assert self._process is not None
        await self.note_events()
        self._process.kill()
        self._process.wait()
        await self.client.close()
        self.found.daemon_kills += 1

    async def kill_worker(self) -> None:
        for model in (await self.client.status()).models:
            if model.worker_pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(model.worker_pid, signal.SIGKILL)
                self.found.worker_kills += 1

    async def end(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def client(self) -> AsyncClient:
        assert self._client is not None
        return self._client

    # -- what is asked and checked ----------------------------------------------------------------

    def prompts(self, count: int) -> list[str]:
        """Return new prompts of one to three times `calibrate`'s length; some continue others."""
        words, made = WORDS.split(), []
        for number in range(count):
            base = self.random.choice(made) if number % 3 == 2 and made else ""
            length = self.random.randrange(self._words, 3 * self._words // 2)
            more = " ".join(self.random.choice(words) for _ in range(length))
            made.append(f"{base} {more}".strip())
        return made

    async def calibrate(self) -> None:
        """Make prompts as long as this machine needs for segments of them to be written."""
        await self.ask(self.prompts(1))  # loads the model
        (prompt,) = self.prompts(1)
        begun = time.monotonic()
        await self.ask([prompt])
        faster = self.limits.prefill_s / (time.monotonic() - begun)
        self._words = min(int(self._words * max(1.0, faster)), 4 * FIRST_WORDS)
        self.note(f"prompts have at least {self._words} words")

    async def ask(self, prompts: list[str]) -> None:
        """Ask all prompts, four at a time, and compare the tokens with those of the first time."""
        places = asyncio.Semaphore(4)

        async def one(prompt: str) -> None:
            async with places:
                completion = await self.client.generate(
                    MODEL, prompt, max_tokens=6, ignore_eos=True
                )
                async for _ in completion:
                    pass
            (choice,) = completion.choices
            tokens, usage = tuple(choice.tokens), completion.usage
            self.found.answers += 1
            self.found.restored += bool(usage and usage.cached_tokens)
            if self.answers.setdefault(prompt, tokens) != tokens:
                self.found.wrong.append(f"other tokens for a prompt of {len(prompt.split())} words")

        await asyncio.gather(*map(one, prompts))

    async def written(self, least: int = 1) -> None:
        """Wait until the store is on and idle with some segments."""
        quiet, before, end = 0, None, time.monotonic() + self.limits.wait_s
        while quiet < 4:
            if time.monotonic() > end:
                self.found.wrong.append(f"the store does not settle: {before}")
                return
            await asyncio.sleep(0.3)
            store = (await self.client.cache()).store
            now = (store.state, store.segments, store.stored_bytes, not self.parts())
            usable = store.state == "on" and store.segments >= least and not self.parts()
            quiet = quiet + 1 if usable and now == before else 0
            before = now

    def files(self) -> list[Path]:
        return sorted(self.prefixes.glob(f"??/*{SUFFIX}"))

    def parts(self) -> list[Path]:
        return sorted(self.prefixes.glob(f"??/*{PART_SUFFIX}"))

    def damaged(self) -> list[str]:
        """Return what is wrong with the damaged files that are left."""
        problems = []
        for path in self.files():
            try:
                for _ in segment_file.read_records(path, PLAIN):
                    pass
            except DamagedFile as error:
                problems.append(str(error))
        return problems

    async def check(self) -> None:
        """Check the folder and the index. An idle worker may be writing."""
        wrong = self.found.wrong
        wrong += [f"an incomplete file is left: {path.name}" for path in await self.left_parts()]
        wrong += [f"a damaged file is left: {problem}" for problem in self.damaged()]
        # A worker that may write has its bytes in the index before it creates the file.
        found, end = await self.sizes(), time.monotonic() + self.limits.wait_s
        while len(set(found)) > 1 and time.monotonic() < end:
            await asyncio.sleep(0.3)
            found = await self.sizes()
        if len(set(found)) > 1:
            wrong.append(f"segments and bytes: {found[0]} in the index, {found[1]} in the folder")
        if (size := found[1][1]) > (limit := self.limits.limit_bytes):
            wrong.append(f"{size} bytes are stored, at most {limit} are allowed")

    async def left_parts(self) -> list[Path]:
        """Return the incomplete files that are neither completed nor deleted in `Limits.wait_s`.

        After `kvctl cache drop`, an idle worker writes what it has in memory again.
        """
        left, end = set(self.parts()), time.monotonic() + self.limits.wait_s
        while left and time.monotonic() < end:
            await asyncio.sleep(0.3)
            left &= set(self.parts())
        return sorted(left)

    async def sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the number of segments and their bytes: in the index, and in the folder."""
        store, files = (await self.client.cache()).store, self.files()
        folder = len(files), sum(it.stat().st_size for it in files)
        return (store.segments, store.stored_bytes), folder

    async def note_events(self) -> None:
        async for event in self.client.events():
            self.found.damage_events += event.kind == "segment_damaged"
            self.found.store_off_events += event.kind == "prefix_store_off"

    def note_exits(self) -> None:
        """Count what ended by an error, as the daemon's log says; kills are not counted."""
        for line in (self.root / "log").read_text(errors="replace").splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                found = msgspec.json.decode(line, type=_LogLine)
                crashed = found.event == "worker_exit" and found.returncode not in _EXPECTED_CODES
                if crashed or found.event == "actor_failed":
                    self.found.unexpected_exits += 1
                    self.found.wrong.append(line[:300])

    # -- faults -----------------------------------------------------------------------------------

    def damage(self, path: Path) -> None:
        """Damage a stored file in one of several ways."""
        how = self.random.choice(DAMAGE)
        content = bytearray(path.read_bytes())
        if not content:
            return
        at = self.random.randrange(len(content))
        if how == "flip":
            content[at] ^= 1 << self.random.randrange(8)
        elif how == "zero":
            content[at : at + 512] = bytes(len(content[at : at + 512]))
            content[at] = 255
        elif how == "end":
            content += bytes(content[-48:])
        elif how == "swap":
            other = self.random.choice(self.files())
            if other == path:
                return
            path.write_bytes(other.read_bytes())
            other.write_bytes(content)
            self.found.corruptions[how] += 2
            return
        self.found.corruptions[how] += 1
        if how == "gone":
            path.unlink()
        elif how == "version":
            with contextlib.suppress(DamagedFile):  # it is one of two that were swapped
                _write_version(path)
        else:
            sizes = {"cut": at, "empty": 0}
            path.write_bytes(content[: sizes.get(how, len(content))])

    def damage_index(self) -> None:
        path = self.prefixes / "index.sqlite"
        content, how = bytearray(path.read_bytes()), self.random.choice(INDEX_DAMAGE)
        at = self.random.randrange(len(content))
        if how == "flip":
            for _ in range(20):
                content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
        elif how == "zero":
            content[at : at + 4096] = bytes(len(content[at : at + 4096]))
        path.write_bytes(content[:at] if how == "cut" else content)
        self.found.index_corruptions += 1

    async def corrupt(self, count: int, corruptions: int, each: int) -> None:
        """Damage files, ``each`` before each new worker, until there were so many corruptions.

        ``count``: prompts, whose files are damaged.
        """
        if not corruptions:
            return
        prompts = self.prompts(count)
        await self.ask(prompts)
        await self.written(2)
        self.note("files to damage are written")
        rounds = 0
        while sum(self.found.corruptions.values()) < corruptions:
            files = self.files()
            for path in self.random.sample(files, min(each, len(files))):
                if path.exists():
                    self.damage(path)
            rounds += 1
            if rounds % 4:
                await self.kill_worker()
            else:
                await self.kill_daemon()
                self.damage_index()
                await self.start()
            await self.ask(prompts)
            await self.written(1)
            self.note(f"{sum(self.found.corruptions.values())} corruptions")
        for _ in range(6):  # what was not read above
            await self.kill_worker()
            before = self.files()
            await self.ask(prompts)
            await self.written(1)
            if self.files() == before:
                break
        self.found.unread = len(self.damaged())
        await self.client.cache_drop()
        await self.check()

    async def kill(self, kills: int) -> None:
        """Kill the worker or the daemon at random moments of writes.

        A kill counts if a file was incomplete. Half of the kills may come too late for that.
        """
        for number in range(2 * kills):
            if self.found.kills_during_a_write >= kills:
                break
            prompts = self.prompts(3)
            await self.ask(prompts)
            end = time.monotonic() + 3
            while not self.parts() and time.monotonic() < end:  # noqa: ASYNC110 - other processes
                await asyncio.sleep(0.001)
            await asyncio.sleep(self.random.choice([0, 0, 0, 0.002, 0.005, 0.3]))
            self.found.kills_during_a_write += bool(self.parts())
            if number % 2:
                await self.kill_worker()
            else:
                await self.kill_daemon()
                await self.start()
            await self.ask(prompts)
            if number % 5 == 4:
                await self.written(1)
                await self.check()
            self.note(f"{number + 1} kills, {self.found.kills_during_a_write} during a write")
        if kills:
            await self.written(1)
            await self.check()

    async def fail(self, rounds: int) -> None:
        """Let calls fail until one has, at least for some seconds; then start the daemon again."""
        if self.disk is None:
            return
        for number in range(rounds):
            error = (errno.ENOSPC, errno.EIO)[number % 2]
            prompts = self.prompts(4)
            await self.ask(prompts[:2])
            await self.written(1)
            await self.kill_worker()
            before = self.disk.failures
            self.disk.fail(self.random.choice([30, 100, 300, 1000]), error)
            await self.ask(prompts)
            await asyncio.sleep(1.5)
            await self.ask(prompts)
            # At 3 % it takes some 30 calls on average, more than these prompts may need.
            end = time.monotonic() + self.limits.wait_s
            while self.disk.failures == before and time.monotonic() < end:
                await self.ask(self.prompts(2))
                await asyncio.sleep(1.5)
            await self.kill_daemon()
            self.disk.fail(0)
            await self.start()
            await self.ask(prompts)
            await self.written(1)
            await self.check()
            self.note(f"{number + 1} rounds with {self.disk.failures} failed calls")
        self.found.failed_calls = self.disk.failures


def _write_version(path: Path) -> None:
    """Replace a file by a complete one of another version."""
    header = segment_file.read_header(path, PLAIN)
    header = msgspec.structs.replace(header, version=segment_file.VERSION + 1, nbytes=0)
    file = RecordWriter(path, PLAIN, sync=False)
    file.add(msgspec.msgpack.encode(header))
    file.finish()


@contextlib.asynccontextmanager
async def store(seed: int, limits: Limits) -> AsyncIterator[Store]:
    made = Store(seed, limits)
    try:
        await made.start()
        yield made
    finally:
        await made.end()


async def run(
    *,
    prompts: int,
    corruptions: int,
    each: int,
    kills: int,
    failures: int,
    seed: int,
    limits: Limits = Limits(),
) -> Found:
    """Run all parts with one daemon, one after the other."""
    async with store(seed, limits) as made:
        await made.calibrate()
        await made.corrupt(prompts, corruptions, each)
        await made.kill(kills)
        await made.fail(failures)
        await made.note_events()
        made.note_exits()
        return made.found


def main() -> int:
    """Run with the command line's options; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefix_faults")
    parser.add_argument("--prompts", type=int, default=30, help="prompts whose files are damaged")
    parser.add_argument("--corruptions", type=int, default=500)
    parser.add_argument("--each", type=int, default=30, help="corruptions before each new worker")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--failures", type=int, default=8, help="rounds with failing calls")
    parser.add_argument("--seed", type=int, default=1)
    for one in fields(Limits):
        option = f"--{one.name.replace('_', '-')}"
        parser.add_argument(option, type=type(one.default), default=one.default)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    asked: dict[str, Any] = {name: it for name, it in vars(given).items() if name != "out"}
    limits = Limits(**{one.name: asked.pop(one.name) for one in fields(Limits)})
    began = time.monotonic()
    found = asyncio.run(run(**asked, limits=limits))
    report = {
        "command": shlex.join(["python", "-m", "bench.prefix_faults", *sys.argv[1:]]),
        "asked": asked | asdict(limits),
        "machine": machine(),
        "seconds": round(time.monotonic() - began, 1),
        **asdict(found),
    }
    publish(report, given.out)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
