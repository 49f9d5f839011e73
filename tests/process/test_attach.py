"""With ``journal = "disk"``, streams of a killed daemon continue in the next one."""

from __future__ import annotations

import asyncio
import os
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
