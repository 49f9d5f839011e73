"""A daemon that is killed, and the streams that go on in the next one: ``journal = "disk"``."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from kvd.client import AsyncClient
from protocol.errors import NotRunning, UnknownRequest
from tests.process.helpers import Daemon, Reader, alive, source, wait_for, written

OPTIONS = {"max_tokens": 60, "n": 2, "seed": 5, "temperature": 1.0, "logprobs": 1}
MODEL = f'journal = "disk"\nmodels = [{{source = "{source(tps=40)}", alias = "m"}}]\n'


def killed(daemon: Daemon) -> Reader:
    """Start a stream, kill the daemon in the middle of it, and start another daemon."""
    wait_for("the model", lambda: [one for one in daemon.log() if one.get("state") == "ready"])
    reader = Reader(daemon, "m", "Hi", **OPTIONS).begun()
    worker = daemon.worker_pid("m")
    wait_for("some tokens", lambda: len(reader.completion.tokens) > 10)
    os.kill(daemon.pid, signal.SIGKILL)
    daemon.wait()
    assert isinstance(reader.finished().error, NotRunning)
    wait_for("its worker goes with it", lambda: not alive(worker))
    daemon.start()
    return reader


@pytest.fixture
def kept(home, make_daemon) -> Daemon:
    written(home, MODEL)
    return make_daemon().start()


def test_a_stream_goes_on_after_a_kill_9_of_the_daemon(kept: Daemon):
    struck = killed(kept).completion
    had = [len(choice.tokens) for choice in struck.choices]
    with kept.client() as kvd:
        rest = kvd.attach(struck)
        assert rest.text
        right = kvd.generate("m", "Hi", **OPTIONS)
        assert right.text
        assert [choice.reason for choice in rest.choices] == ["length", "length"]
        assert rest.choices == right.choices
        assert rest.usage == right.usage
        assert all(
            len(choice.tokens) > before for choice, before in zip(rest.choices, had, strict=True)
        )
        with pytest.raises(UnknownRequest):
            _ = kvd.attach(struck).text


def test_kvctl_and_the_other_client_fetch_it_from_its_beginning(kept: Daemon):
    name = killed(kept).completion.request
    shown = kept.kvctl("attach", name, "--n", "2")
    assert shown.returncode == 0, shown.stderr
    assert "choice 1  length, 60 tokens" in shown.stdout

    async def again() -> None:
        async with AsyncClient(home=kept.home.root) as kvd:
            with pytest.raises(UnknownRequest):
                await (await kvd.attach(name, choices=2)).text()
            right = await kvd.generate("m", "Hi", **OPTIONS)
            assert await right.text() in shown.stdout

    asyncio.run(again())
    gone = kept.kvctl("attach", name)
    assert (gone.returncode, gone.stdout) == (6, "")
