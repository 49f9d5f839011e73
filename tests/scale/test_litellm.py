"""Three daemons behind LiteLLM's proxy: sessions stay, a daemon that drains or dies is replaced."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.process.helpers import wait_for
from tests.scale.fleet import CONFIG, Fleet, fleet_of
from tests.scale.litellm import INSTALLED, Proxy, litellm
from tests.scale.traffic import PATH, Streams, chat, converse_all, place_of

pytestmark = [
    pytest.mark.scale,
    pytest.mark.process,
    pytest.mark.skipif(not INSTALLED.exists(), reason="needs LiteLLM: `make test-scale`"),
]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with fleet_of(CONFIG, "--fake") as it:
        yield it


@pytest.fixture(scope="module")
def proxy(fleet: Fleet) -> Iterator[Proxy]:
    with litellm(fleet, "fast", "slow") as it:
        yield it


@pytest.fixture
def client(proxy: Proxy) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=proxy.url, headers=proxy.headers, timeout=60) as it:
        yield it


def ask(client: httpx.Client, session: str, header: str = "X-Session-Id", **fields) -> str:
    """Return the address of the daemon that answered."""
    answer = client.post(PATH, json=chat("Hi", **fields), headers={header: session})
    assert answer.status_code == 200, answer.text
    return place_of(answer.headers)


@pytest.mark.parametrize("header", ["X-Session-Id", "x-litellm-session-id"])
def test_a_session_stays_on_its_daemon(client: httpx.Client, header: str):
    names = [f"{header}-{number}" for number in range(12)]
    places = [{ask(client, name, header) for _ in range(3)} for name in names]
    assert {len(found) for found in places} == {1}
    assert len(set.union(*places)) > 1, "all sessions are on one daemon"


def test_what_the_proxy_adds_is_ignored(client: httpx.Client):
    """It passes on fields that it does not know, and its own for other providers."""
    extra = {"metadata": {"session_id": "a-session"}, "top_a": 0.5, "user": "me", "store": False}
    assert ask(client, "session-x", **extra)


def test_a_draining_daemon_gets_no_requests_and_no_client_an_error(
    fleet: Fleet, client: httpx.Client
):
    member = fleet.at(ask(client, "drained-1"))
    assert member.kvctl("drain").returncode == 0
    for number in range(12):
        assert ask(client, f"drained-{number}") != member.place
    member.signal(15)
    member.wait()
    member.launch()
    wait_for("the daemon is back", member.ready)
    wait_for("its sessions are back", lambda: ask(client, "drained-1") == member.place, 60)


def test_a_killed_daemon_costs_only_its_own_streams(
    fleet: Fleet, proxy: Proxy, client: httpx.Client
):
    streams = Streams.begun(proxy.url, 32, model="slow", tokens=200, headers=proxy.headers)
    victim = streams.kill_most_used(fleet)
    lost = streams.check(victim)
    session = lost[0].headers["X-Session-Id"]

    def place() -> str:
        """Return where the session is now. LiteLLM binds a session for each model apart."""
        return ask(client, session, model="slow", max_tokens=1)

    assert place() != victim.place
    victim.wait()
    victim.launch()
    wait_for("the daemon is back", victim.ready)
    wait_for("its sessions are back", lambda: place() == victim.place, 60)


def test_prefixes_are_found_as_often_as_in_one_daemon(fleet: Fleet, client: httpx.Client):
    with httpx.Client(base_url=f"http://{fleet.members[0].place}", timeout=60) as one:
        single = converse_all(one, "single")
    several = converse_all(client, "several", by_header=True)
    assert single.rate > 0.5
    assert several.rate >= 0.95 * single.rate, (several, single)
