"""A real daemon: a prompt whose model is unloaded right after the answer is stored first."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from kvd.client import Client
from kvd.client.blocking import Completion
from tests.process.helpers import Daemon, configured, wait_for

PROMPT = "".join(f"{number}. The amber falcon carries {number} letters. " for number in range(500))
CONFIG = """
budget = "1GiB"
models = ["demo"]
[prefix_store]
limit = "1GB"
keep_free = 0
"""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with configured(CONFIG) as daemon:
        yield daemon


def started(daemon: Daemon) -> None:
    daemon.start()
    wait_for("demo is ready", lambda: daemon.model("demo").state == "ready", 120)


def answer(client: Client, prompt: str) -> Completion:
    """Return the whole answer."""
    completion = client.generate("demo", prompt, max_tokens=8, temperature=0.0)
    assert completion.text
    return completion


@pytest.mark.mlx
@pytest.mark.process
@pytest.mark.slow
def test_an_unload_and_a_stop_right_after_the_answer_keep_its_prefix(daemon: Daemon) -> None:
    started(daemon)
    with daemon.client() as client:
        cold = answer(client, PROMPT)
        client.unload("demo")
        assert len(list(daemon.home.prefixes.rglob("*.kvs"))) == 1
        client.load("demo")
        warm = answer(client, PROMPT)
        assert warm.text == cold.text
        assert cold.usage is not None
        assert warm.usage is not None
        assert warm.usage.cached_tokens >= 0.9 * cold.usage.prompt_tokens
        answer(client, f"Another: {PROMPT}")
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(30) == 0
    assert len(list(daemon.home.prefixes.rglob("*.kvs"))) == 2
    assert not list(daemon.home.prefixes.rglob("*.part"))
