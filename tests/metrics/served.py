"""A daemon that has served something: what it exports is what a page of metrics may speak of."""

from __future__ import annotations

from kvd.client import Client
from protocol.errors import KvdError
from tests.process.helpers import Daemon, source


def busy(daemon: Daemon) -> None:
    """Have a daemon load, serve, refuse, lose a worker and make room."""
    daemon.load(source(tps=0), "one")
    daemon.load(source(tps=2000, crash_on="poison", context=4096), "two")
    with daemon.client() as kvd:
        prompt = "What two prompts have in common. " * 40
        assert kvd.generate("one", prompt, max_tokens=40).text
        assert kvd.generate("one", prompt + "And more.", max_tokens=40).text
        _refused(kvd, "nobody", "Hi")
        _refused(kvd, "two", "x" * 9000)
        _refused(kvd, "two", "poison")


def _refused(kvd: Client, model: str, prompt: str) -> str:
    try:
        _ = kvd.generate(model, prompt, max_tokens=4).text
    except KvdError as error:
        return error.code
    raise AssertionError(f"{model} served {prompt[:20]!r}")
