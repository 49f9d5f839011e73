"""A disk that fails or hangs, and an engine whose store is on it."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable

import pytest

from kvd.worker.prefix import segment_files
from kvd.worker.prefix.segment_io import BackgroundWriter
from tests.worker.core.prompts import prompt_of
from tests.worker.core.segments import Engine

PROMPT = prompt_of(700, 1)
STORED = 512
OTHERS = [prompt_of(600, seed) for seed in (11, 12)]
PATIENCE_S = 20.0


class Disk:
    """Makes calls of `os` in the threads of segments fail or hang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._works = threading.Event()
        self._works.set()
        self.calls = 0

    def _replace(self, name: str, instead: Callable) -> None:
        plain = getattr(os, name)

        def call(*args, **options):
            if not threading.current_thread().name.startswith("segment-"):
                return plain(*args, **options)
            self.calls += 1
            return instead(plain, *args, **options)

        self._monkeypatch.setattr(os, name, call)

    def fail(self, name: str, error: int, after: int = 0) -> None:
        def fail(plain, *args, **options):
            if self.calls > after:
                raise OSError(error, os.strerror(error))
            return plain(*args, **options)

        self._replace(name, fail)

    def hang(self, name: str) -> None:
        self._works.clear()

        def wait(plain, *args, **options):
            assert self._works.wait(PATIENCE_S)
            return plain(*args, **options)

        self._replace(name, wait)

    def work(self) -> None:
        self._works.set()

    def hang_after_a_record(self) -> None:
        """Hang at once, and let the engine copy only one record meanwhile."""
        writer = functools.partial(BackgroundWriter, staging_bytes=1)
        self._monkeypatch.setattr(segment_files, "BackgroundWriter", writer)
        self.hang("write")

    def shorten(self) -> None:
        """Return at most 1000 bytes from each read."""
        self._replace("preadv", lambda plain, fd, parts, at: plain(fd, [parts[0][:1000]], at))


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("segment-")]


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "the condition does not become true"
        time.sleep(0.0005)


def unread(engine: Engine, rid: str) -> tuple[int, str] | None:
    """Return how many stored tokens a prompt did not read, and why."""
    outcome = engine.found[rid]
    stored = sum(part.tokens for part in outcome.parts if part.reason == "unread")
    return None if outcome.unread is None else (stored, outcome.unread)


def settle(engine: Engine) -> None:
    """Step until the present offer ends."""

    def over() -> bool:
        if engine.engine.has_work:
            engine.step()
        return engine.engine._segments._offer is None

    until(over)


def submit(engine: Engine, rid: str = "r", prompt: list[int] = PROMPT) -> None:
    engine.submit(rid, prompt, max_tokens=12, logprobs=2)


def begin_to_read(engine: Engine, disk: Disk) -> None:
    """Submit `PROMPT` and stop in mid-read; on a busy machine one step could read everything."""
    disk.hang("preadv")
    submit(engine)
    engine.run(until=lambda: engine.engine._transfers.reading)
    assert engine.engine._transfers.reading
    disk.work()
