"""With ``journal = "disk"``, streams of a killed daemon continue in the next one."""

from __future__ import annotations

import asyncio
import os
import resource
import signal

import pytest

from kvd.client import AsyncClient
from protocol.errors import NotRunning, UnknownRequest
from tests.process.helpers import Daemon, Reader, alive, source, wait_for, write_config

OPTIONS = {"max_tokens": 60, "n": 2, "seed": 5, "temperature": 1.0, "logprobs": 1}
MODEL = f'journal = "disk"\nmodels = [{{source = "{source(tps=40)}", alias = "m"}}]\n'


@pytest.fixture
def killed(home, make_daemon) -> tuple[Daemon, list[Reader]]:
    """Return the next daemon, and two streams that a kill of the first one interrupted."""
    write_config(home, MODEL)
    daemon = make_daemon().start()
    wait_for("the model", lambda: [one for one in daemon.log() if one.get("state") == "ready"])
    readers = [Reader(daemon, "m", prompt, **OPTIONS) for prompt in ("Hi", "Ho")]
    wait_for("tokens", lambda: all(len(one.completion.tokens) > 10 for one in readers))
    worker = daemon.worker_pid("m")
    os.kill(daemon.pid, signal.SIGKILL)
    daemon.wait()
    assert all(isinstance(one.finished().error, NotRunning) for one in readers)
    wait_for("the worker ends", lambda: not alive(worker))
    daemon.start()
    return daemon, readers


def test_streams_continue_after_a_kill_9_of_the_daemon(killed):
    daemon, (hi, ho) = killed
    had = [len(choice.tokens) for choice in hi.completion.choices]
    # The interrupted completion continues where it stopped.
    with daemon.client() as kvd:
        rest = kvd.attach(hi.completion)
        assert rest.text
        expected = kvd.generate("m", "Hi", **OPTIONS)
        assert expected.text
        assert [choice.reason for choice in rest.choices] == ["length", "length"]
        assert (rest.choices, rest.usage) == (expected.choices, expected.usage)
        assert all(
            len(choice.tokens) > before for choice, before in zip(rest.choices, had, strict=True)
        )
        with pytest.raises(UnknownRequest):
            _ = kvd.attach(hi.completion).text

    # The request's id gives the completion from its start.
    name = ho.completion.request
    shown = daemon.kvctl("attach", name, "--n", "2")
    assert shown.returncode == 0, shown.stderr
    assert "choice 1  length, 60 tokens" in shown.stdout

    async def check() -> None:
        async with AsyncClient(home=daemon.home.root) as kvd:
            with pytest.raises(UnknownRequest):
                await (await kvd.attach(name, choices=2)).text()
            expected = await kvd.generate("m", "Ho", **OPTIONS)
            assert await expected.text() in shown.stdout

    asyncio.run(check())
    gone = daemon.kvctl("attach", name)
    assert (gone.returncode, gone.stdout) == (6, "")


@pytest.fixture
def limited_files():
    """Limit the files of the programs that the test starts to 64 KiB, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(start):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
        try:
            return start()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit


def test_a_cut_journal_on_a_full_disk_costs_neither_the_start_nor_the_request(
    home, make_daemon, limited_files
):
    write_config(home, MODEL.replace("tps=40", "tps=100"))
    daemon = make_daemon().start()
    wait_for("the model", lambda: [one for one in daemon.log() if one.get("state") == "ready"])
    worker = daemon.worker_pid("m")
    stops = [f"{number}{'終' * 4000}" for number in range(8)]
    options = OPTIONS | {"max_tokens": 100, "stop": stops}  # a journal longer than the limit
    reader = Reader(daemon, "m", "Ha", **options)
    wait_for("tokens", lambda: len(reader.completion.tokens) > 15)
    os.kill(daemon.pid, signal.SIGKILL)
    daemon.wait()
    reader.finished()
    wait_for("its worker ends", lambda: not alive(worker))
    # A power loss leaves the newest records as zeros: the client is ahead of the journal.
    path = home.journal / "requests"
    size = path.stat().st_size
    os.truncate(path, size - 1500)
    os.truncate(path, size + 4096)

    limited_files(daemon.launch)
    wait_for("the daemon answers", daemon.answers)
    reasons = [one["event"] for one in daemon.log() if one["level"] == "warning"]
    assert any("the journal is damaged" in one for one in reasons), reasons
    assert "the journal cannot be compacted" in reasons
    with daemon.client() as kvd:
        new = kvd.generate("m", "Hi", max_tokens=1)
        assert new.text
        assert new.request == ""
        rest = kvd.attach(reader.completion)
        assert rest.text
        expected = kvd.generate("m", "Ha", **options)
        assert expected.text
        assert (rest.choices, rest.usage) == (expected.choices, expected.usage)
