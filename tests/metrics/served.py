"""A daemon that has served, evicted, refused and restarted, so that it exports all metrics."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass

import httpx
from prometheus_client.core import Sample
from prometheus_client.parser import text_string_to_metric_families as parse

from kvd.client import Client
from protocol.errors import KvdError
from tests.process.helpers import Daemon, source, wait_for

CONFIG = """
budget = "190MiB"
[http]
port = 0
[prefix_store]
limit = "1GB"
keep_free = 0
"""
"""Room for two fake models of 64 MiB, and not for three."""


@dataclass
class Served:
    """The daemon, and the requests that it is sent."""

    daemon: Daemon
    tokens: int = 0
    """Tokens that clients have received."""

    @property
    def address(self) -> str:
        """Host and port of HTTP."""
        with self.daemon.client() as kvd:
            (found,) = [it for it in kvd.status().http if not it.startswith("unix")]
        host = re.search(r"[\d.]+:\d+", found)
        assert host is not None, found
        return host[0]

    def complete(self, model: str, prompt: str, tokens: int) -> None:
        with self.daemon.client() as kvd:
            assert kvd.generate(model, prompt, max_tokens=tokens).text
        self.tokens += tokens

    def busy(self) -> None:
        """Load, serve, hit the prefix cache, ignore a field, refuse requests, kill, and evict."""
        daemon = self.daemon
        assert httpx.get(f"http://{self.address}/healthz").is_success
        daemon.load(source(tps=0), "one")
        daemon.load(source(tps=2000, context=4096), "two")
        prompt = "What two prompts have in common. " * 40
        self.complete("one", prompt, 40)
        self.complete("one", prompt + "And more.", 40)
        with daemon.client() as kvd:
            assert _refusal(kvd, "nobody", "Hi") == "unknown_model"
            assert _refusal(kvd, "two", "x" * 9000) == "context_too_long"
        os.kill(daemon.worker_pid("two"), signal.SIGKILL)
        self.complete("two", "It comes back.", 20)
        daemon.load(source(tps=1000), "three")  # evicts one of the others
        body = {"model": "three", "input": "Hi", "max_output_tokens": 4, "new_field": 1}
        assert httpx.post(f"http://{self.address}/v1/responses", json=body).is_success

    def disturbed(self) -> None:
        """Let models evict each other, refuse a request, and kill a worker."""
        for model in ("one", "two", "three"):
            self.complete(model, "What two prompts have in common. " * 20, 100)
        with self.daemon.client() as kvd:
            assert _refusal(kvd, "three", "x" * 20_000) == "context_too_long"
        os.kill(self.daemon.worker_pid("three"), signal.SIGKILL)
        self.complete("three", "It comes back.", 20)

    def text(self) -> str:
        with self.daemon.client() as kvd:
            return kvd.metrics()

    def value(self, series: str) -> float:
        """Return the current value of a series."""
        return value_in(self.text(), series)

    def settled(self) -> str:
        """Return the metrics once the workers have reported their last counters."""
        wait_for(
            "the workers report their counters",
            lambda: self.value('kvd_worker_steps_total{model="one"}') >= 80,
        )
        return self.text()


def value_in(text: str, series: str) -> float:
    (wanted,) = samples(f"{series} 0\n")
    (found,) = [it.value for it in samples(text) if (it.name, it.labels) == wanted[:2]]
    return found


def samples(text: str) -> list[Sample]:
    return [it for family in parse(text) for it in family.samples]


def _refusal(kvd: Client, model: str, prompt: str) -> str:
    try:
        _ = kvd.generate(model, prompt, max_tokens=4).text
    except KvdError as error:
        return error.code
    raise AssertionError(f"{model} served {prompt[:20]!r}")
