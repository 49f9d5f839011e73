"""Routers before three daemons: time added to a request, prefixes found, and failover.

Real daemons with the fake engine, or the embedded model (``--demo``), nginx with deploy/nginx, and
LiteLLM's proxy with deploy/litellm where `make test-scale` has installed it. Requests for one token
go to a daemon and through each router in turn, so that other work of the machine slows all of them
alike. Then the conversations of tests/scale run on one daemon, through each router, and on the
daemons in rotation. At last a daemon is killed, and its sessions' next requests are timed.

    python -m bench.routers --json bench/results/routers-linux-cpu.json
    python -m bench.routers --demo --json bench/results/routers-demo-linux-cpu.json
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from bench.report import machine, publish
from tests.process.helpers import wait_for
from tests.scale.fleet import CONFIG, Fleet, fleet_of
from tests.scale.litellm import INSTALLED, litellm
from tests.scale.nginx import nginx
from tests.scale.traffic import PATH, Hits, chat, converse_all, place_of

SESSIONS = 24
DEMO = '[[models]]\nsource = "demo"\nalias = "fast"\n'


class Rotation(httpx.BaseTransport):
    """Sends each request to the next daemon, as a router without sessions does."""

    def __init__(self, places: list[str]) -> None:
        self._hosts = itertools.cycle(httpx.URL(f"http://{place}") for place in places)
        self._transport = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        host = next(self._hosts)
        request.url = request.url.copy_with(host=host.host, port=host.port)
        return self._transport.handle_request(request)


@contextlib.contextmanager
def routers(fleet: Fleet) -> Iterator[dict[str, httpx.Client]]:
    """Yield clients: of a daemon itself, and of each router."""
    with contextlib.ExitStack() as stack:
        urls: dict[str, tuple[str, dict[str, str]]] = {
            "daemon": (f"http://{fleet.members[0].place}", {}),
            "nginx": (stack.enter_context(nginx(fleet)), {}),
        }
        if INSTALLED.exists():
            proxy = stack.enter_context(litellm(fleet, "fast"))
            urls["litellm"] = (proxy.url, proxy.headers)
        yield {
            name: stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=60))
            for name, (url, headers) in urls.items()
        }


def ask(client: httpx.Client, session: int) -> httpx.Response:
    body = chat(f"Session {session}", max_tokens=1)
    answer = client.post(PATH, json=body, headers={"X-Session-Id": f"session-{session}"})
    answer.raise_for_status()
    return answer


def latencies(clients: dict[str, httpx.Client], rounds: int) -> dict[str, Any]:
    """Return milliseconds of a request through each router, one request at a time."""
    taken: dict[str, list[float]] = {name: [] for name in clients}
    for number in range(rounds):
        for name, client in clients.items():
            began = time.perf_counter()
            ask(client, number % SESSIONS)
            taken[name].append(1000 * (time.perf_counter() - began))
    return {
        name: {
            "p10_ms": round(statistics.quantiles(times, n=10)[0], 2),
            "p50_ms": round(statistics.median(times), 2),
            "p95_ms": round(statistics.quantiles(times, n=20)[-1], 2),
        }
        for name, times in taken.items()
    }


def hit_rates(clients: dict[str, httpx.Client], fleet: Fleet) -> dict[str, float]:
    """Return the cached share of the prompts' tokens. Each router has prompts of its own."""
    found: dict[str, Hits] = {}
    for name, client in clients.items():
        found[name] = converse_all(client, f"salt-{name}", by_header=name == "litellm")
    transport = Rotation([member.place for member in fleet.members])
    with httpx.Client(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
        found["rotation"] = converse_all(client, "salt-rotation")
    return {name: round(hits.rate, 4) for name, hits in found.items()}


def failover(client: httpx.Client, fleet: Fleet) -> dict[str, Any]:
    """Kill a daemon; return how its sessions' first requests ended, and the slowest one's time."""
    homes = {session: place_of(ask(client, session).headers) for session in range(SESSIONS)}
    victim = fleet.at(homes[0])
    victim.signal(9)
    victim.wait()
    errors, slowest = 0, 0.0
    moved = [session for session, home in homes.items() if home == victim.place]
    for session in moved:
        began = time.perf_counter()
        try:
            ask(client, session)
        except httpx.HTTPError:
            errors += 1
        slowest = max(slowest, time.perf_counter() - began)
    victim.launch()
    wait_for("the daemon is back", victim.ready)
    began = time.perf_counter()
    wait_for("its sessions are back", lambda: place_of(ask(client, 0).headers) == victim.place, 60)
    return {
        "sessions": len(moved),
        "errors": errors,
        "slowest_ms": round(1000 * slowest, 1),
        "back_after_s": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400, help="requests through each router")
    parser.add_argument("--demo", action="store_true", help="serve the embedded model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    served = (DEMO,) if options.demo else (CONFIG, "--fake")
    with fleet_of(*served) as fleet, routers(fleet) as clients:
        latencies(clients, 20)  # first requests open connections
        report = {
            "machine": machine(),
            "model": "demo" if options.demo else "fake engine",
            "latency": latencies(clients, options.rounds),
            "hit_rate": hit_rates(clients, fleet),
            "failover": {
                name: failover(client, fleet)
                for name, client in clients.items()
                if name != "daemon"
            },
        }
    publish(report, options.json)


if __name__ == "__main__":
    main()
