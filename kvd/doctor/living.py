"""Trials with a daemon in a separate home: completions, a worker's crash, and the daemon's end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvd.client import Client
from kvd.config import config
from kvd.doctor.finding import REPORT, Finding, fail, ok
from kvd.doctor.system import guarded, short_folder
from kvd.host.environment import environment
from kvd.host.home import Home
from kvd.service import installer
from kvd.service.describe import describe
from protocol.errors import KvdError, NotRunning

_UP_S = 60.0
_PROMPT = "To open a file,"
_TOKENS = 96
_ORPHAN_S = 5.0
_BUDGET = "2GiB"
_CONFIG = f'budget = "{_BUDGET}"\nhttp = {{enabled = false}}\n'


def daemon() -> Iterator[str | Finding]:
    """Start a daemon, load the demo model, and test it."""
    with tempfile.TemporaryDirectory(prefix="kvd-", dir=short_folder()) as folder:
        home = _home(Path(folder))
        yield "load"
        with _serving(home) as process:
            loads = guarded("load", lambda: _load(home, process))
            yield loads
            if loads.verdict == "ok":
                yield "completions"
                yield guarded("completions", lambda: _complete(home))
                yield "a crash"
                yield guarded("a crash", lambda: _crash(home))
            yield "SIGTERM"
            yield guarded("SIGTERM", lambda: _stop(process))
        yield "an orphan"
        with _serving(home, "--fake") as process:
            yield guarded("an orphan", lambda: _orphan(home, process))


@contextlib.contextmanager
def _serving(home: Home, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a daemon, and kill it at the end if it still runs."""
    # KVD_PORT and KVD_BUDGET apply to the user's daemon; these options override both.
    options = ["--home", str(home.root), "--no-http", "--budget", _BUDGET, *arguments]
    process = subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-P", "-m", "kvd", "serve", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(None),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _home(folder: Path) -> Home:
    home = Home(folder / "h")
    home.create()
    home.config.write_text(_CONFIG)
    return home


def _load(home: Home, process: subprocess.Popen[bytes]) -> Finding:
    started = time.monotonic()
    _wait_until_up(home, process)
    up = time.monotonic() - started
    with Client(home=home.root) as client:
        loading = time.monotonic()
        model = client.load("demo").result
        took = time.monotonic() - loading
        status = client.status()
    assert model.info is not None
    observed = (
        f"up in {up:.1f} s, demo loaded in {took:.1f} s on {model.info.device}, attention "
        f"{model.info.attention_path}"
    )
    numbers = {"up_s": round(up, 2), "load_s": round(took, 2)}
    used = status.footprint_bytes
    return ok("load", observed, **numbers, daemon_bytes=used, path=model.info.attention_path)


def _wait_until_up(home: Home, process: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + _UP_S
    while True:
        try:
            with Client(home=home.root) as client:
                client.hello()  # the socket accepts connections before the daemon serves
                return
        except NotRunning:
            ended = process is not None and process.poll() is not None
            if ended or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _complete(home: Home) -> Finding:
    """Check that a request gets the same tokens alone and in a batch."""

    def one(seed: int) -> str:
        with Client(home=home.root) as client:
            done = client.generate("demo", _PROMPT, max_tokens=_TOKENS, temperature=0.8, seed=seed)
            return done.text

    alone = one(7)
    started = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(one, (7, 8, 9, 10)))  # raises the first error
    rate = 4 * _TOKENS / (time.monotonic() - started)
    if texts[0] != alone:
        return fail("completions", "a request got different tokens in a batch than alone", REPORT)
    observed = f"four requests at once, with the same tokens as alone, {rate:.0f} tokens/s in total"
    return ok("completions", observed, tokens_per_s=round(rate, 1))


def _crash(home: Home) -> Finding:
    """Kill the worker during a completion, and check that the stream continues."""
    with Client(home=home.root) as client, Client(home=home.root) as other:
        whole = client.generate("demo", _PROMPT, max_tokens=4 * _TOKENS, ignore_eos=True).text
        running = client.generate("demo", _PROMPT, max_tokens=4 * _TOKENS, ignore_eos=True)
        killed = False
        for _ in running:
            if not killed and len(running.tokens) >= 8:
                pid = other.status().models[0].worker_pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                killed = True
        after = other.status().models[0].worker_pid
    if not killed or after == pid:
        return fail("a crash", "the completion ended before its worker could be killed", REPORT)
    if running.text != whole:
        return fail("a crash", "after the crash, a completion continued differently", REPORT)
    return ok("a crash", "the worker was killed, and the completion continued identically")


def _stop(process: subprocess.Popen[bytes]) -> Finding:
    started = time.monotonic()
    process.terminate()
    status = process.wait(_UP_S)
    took = time.monotonic() - started
    if status:
        return fail("SIGTERM", f"the daemon ended with {status}", REPORT)
    return ok("SIGTERM", f"drained and exited 0 in {took:.1f} s", seconds=round(took, 2))


def _orphan(home: Home, process: subprocess.Popen[bytes]) -> Finding:
    """Kill the daemon, and check that its busy worker ends too."""
    _wait_until_up(home, process)
    with Client(home=home.root) as client:
        client.load("fake:tps=20", alias="m").result  # noqa: B018 - waits for the load
        pid = client.status().models[0].worker_pid
        assert pid is not None
        running = client.generate("m", _PROMPT, max_tokens=10_000)
        next(iter(running))
        process.kill()
        process.wait()
    started = time.monotonic()
    while _lives(pid):
        if time.monotonic() - started > _ORPHAN_S:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return fail("an orphan", f"a worker outlived its daemon by {_ORPHAN_S:g} s", REPORT)
        time.sleep(0.01)
    took = round(time.monotonic() - started, 3)
    observed = f"the daemon was killed, and its worker ended within {took:.2f} s"
    return ok("an orphan", observed, seconds=took)


def _lives(pid: int) -> bool:
    """Return whether a process runs; zombies do not count."""
    command = ["ps", "-o", "stat=", "-p", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return bool(done.stdout.strip()) and not done.stdout.strip().startswith("Z")


def service() -> Iterator[str | Finding]:
    """Install a separate service, check that it serves, and remove it."""
    with tempfile.TemporaryDirectory(prefix="kvd-", dir=short_folder()) as folder:
        home = _home(Path(folder))
        for on_demand in (False, True):
            name = "service on demand" if on_demand else "service"
            yield name
            yield guarded(name, lambda: _serve(home, name, on_demand=on_demand))  # noqa: B023 - at once


def _serve(home: Home, name: str, *, on_demand: bool) -> Finding:
    manager = installer.manager_of(describe(home, config.load(home.config), on_demand=on_demand))
    started = time.monotonic()
    try:
        installer.install(manager)
        _wait_until_up(home)
        took = time.monotonic() - started
        with Client(home=home.root) as client:
            pid = client.status().pid
        state = manager.state()
        if state.status != "running" or state.pid != pid:
            observed = f"the daemon's pid is {pid}, but {manager.name} reports {state}"
            return fail(name, observed, REPORT)
        manager.reload()
        manager.restart()
        _wait_until_up(home)
    except KvdError as error:
        return fail(name, error.message, REPORT)
    finally:
        installer.uninstall(manager)
    return ok(name, f"{manager.name} started the daemon in {took:.1f} s, reloaded and restarted it")
