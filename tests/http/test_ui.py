"""The web page's files, stream and operations, as a program sees them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator

import httpx
import pytest

from kvd.config.http import HttpSettings
from kvd.host.home import Home
from kvd.http import keys
from kvd.http.ui import files, stream
from protocol.types import DaemonStatus
from tests.http.calls import CHAT, get
from tests.http.live import Live
from tests.http.stage import Scripted, serving, until

PAGE = {"Accept": "text/html,application/xhtml+xml"}


@pytest.fixture
def browser(live: Live) -> Iterator[httpx.Client]:
    """Requests as kvd's own page sends them."""
    with httpx.Client(base_url=live.url, headers={"Origin": live.url}, timeout=30) as it:
        yield it


def operate(client: httpx.Client, **body: object) -> httpx.Response:
    return client.post("/ui/operations", json=body)


def test_browsers_get_the_page_and_programs_get_text(browser: httpx.Client):
    page = browser.get("/", headers=PAGE)
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert page.text.startswith("<!doctype html>")
    text = browser.get("/")
    assert text.text.startswith("kvd ")
    assert (page.headers["Vary"], text.headers["Vary"]) == ("Accept", "Accept")


def test_every_file_is_sent_once_until_it_changes(browser: httpx.Client):
    assert {"/ui/index.html", "/ui/app.js", "/ui/vendor/uPlot.esm.js"} <= files.PATHS
    for path in sorted(files.PATHS):
        first = browser.get(path)
        assert (first.status_code, first.headers["Cache-Control"]) == (200, "no-cache")
        tag = first.headers["ETag"]
        again = browser.get(path, headers={"If-None-Match": tag})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["ETag"] == tag
        assert browser.get(path, headers={"If-None-Match": '"0"'}).status_code == 200
    assert browser.get("/ui/../server.py").status_code == 404
    assert browser.get("/ui/%2e%2e/server.py").status_code == 404


def test_the_page_loads_only_its_own_files_and_has_no_inline_code(browser: httpx.Client):
    page = browser.get("/", headers=PAGE)
    policy = page.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert "http" not in policy
    linked = set(re.findall(r'(?:src|href)="(/[^"]*)"', page.text))
    assert linked
    assert linked <= files.PATHS
    assert not re.search(r"<script>|<style|style=|\son\w+=", page.text)
    for path in files.PATHS - {"/ui/vendor/uPlot.esm.js"}:
        assert "http" not in browser.get(path).text.replace("http://www.w3.org", "")


def test_operations_load_unload_and_change_known_models(browser: httpx.Client, live: Live):
    changed = operate(browser, op="policy", model="slow", priority=7, idle_ttl_s=3600)
    assert changed.json() == {"model": "slow", "priority": 7, "idle_ttl_s": 3600}
    assert (live.model("slow").priority, live.model("slow").idle_ttl_s) == (7, 3600)
    operate(browser, op="policy", model="slow", pinned=True)
    assert (live.model("slow").pinned, live.model("slow").priority) == (True, 7)
    operate(browser, op="policy", model="slow", pinned=False, priority=0, idle_ttl_s=None)
    assert (live.model("slow").pinned, live.model("slow").idle_ttl_s) == (False, None)
    assert operate(browser, op="load", model="on-demand").json()["granted_bytes"] > 0
    assert live.model("on-demand").state == "ready"
    assert operate(browser, op="unload", model="on-demand").json()["freed_bytes"] > 0
    broken = operate(browser, op="load", model="broken")
    assert (broken.status_code, broken.json()["error"]["code"]) == (500, "invalid_model")


def test_operations_refuse_what_only_the_socket_may_do(browser: httpx.Client):
    unknown = operate(browser, op="load", model="fake:tps=1")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    for body in (
        {"op": "config", "model": "x"},
        {"op": "policy", "model": "slow", "weight": 9},
        {},
    ):
        refused = browser.post("/ui/operations", json=body)
        assert refused.status_code == 400, refused.text
    out_of_range = operate(browser, op="policy", model="slow", priority=101)
    assert out_of_range.json()["error"]["param"] == "priority"


@pytest.mark.parametrize("path", ["/ui/operations", "/ui/stream"])
def test_only_the_page_itself_may_operate_and_watch(live: Live, path: str):
    own = {"Origin": live.url, "Content-Type": "application/json"}
    body = json.dumps({"op": "unload", "model": "slow"})
    without = {key: value for key, value in own.items() if key != "Origin"}
    for headers, status in (
        (without, 403),
        (own | {"Origin": "https://evil.example"}, 403),
        (own | {"Origin": "null"}, 403),
        (own | {"Host": "evil.example"}, 403),
        (own | {"Content-Type": "text/plain"}, 415),
        (own | {"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ):
        refused = httpx.post(live.url + path, content=body, headers=headers)
        assert refused.status_code == status, headers
    assert httpx.get(live.url + path, headers=own).status_code == 405
    assert live.model("slow").state == "ready"


async def test_pages_of_allowed_origins_and_clients_without_a_key_may_not(home: Home):
    key = keys.make()
    settings = {"origins": ["https://chat.example"], "keys": {"me": keys.hashed(key)}}
    async with serving(home, control=Watched(), **settings) as it:
        headers = {"Authorization": f"Bearer {key}", "Origin": "https://chat.example"}
        async with httpx.AsyncClient(base_url=it.url) as client:
            foreign = await client.post("/ui/stream", json={}, headers=headers)
            assert (foreign.status_code, foreign.json()["error"]["code"]) == (
                403,
                "origin_not_allowed",
            )
            own = {"Origin": it.url}
            assert (await client.post("/ui/stream", json={}, headers=own)).status_code == 401
            assert (await client.post("/ui/operations", json={}, headers=own)).status_code == 401
            assert (await client.get("/", headers=PAGE)).status_code == 200
            assert (await client.get("/ui/app.js")).status_code == 200


def test_the_stream_has_the_status_new_events_and_requests(browser: httpx.Client, live: Live):
    body = CHAT | {"model": "fast", "max_tokens": 3}
    assert httpx.post(f"{live.url}/v1/chat/completions", json=body).status_code == 200
    missing = httpx.post(f"{live.url}/v1/chat/completions", json=CHAT | {"model": "nowhere"})
    assert missing.status_code == 404
    with browser.stream("POST", "/ui/stream", json={}) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        lines = (line for line in answer.iter_lines() if line)
        first, second = (json.loads(next(lines).removeprefix("data: ")) for _ in range(2))
    assert {model["name"] for model in first["status"]["models"]} >= {"fast", "slow", "flood"}
    unknown, done = first["ended"][-1], first["ended"][-2]
    assert (unknown["model"], unknown["stage"], unknown["code"]) == (
        "nowhere",
        "error",
        "unknown_model",
    )
    assert (done["model"], done["stage"], done["completion_tokens"]) == ("fast", "length", 3)
    assert 0 < done["first_token_s"] <= done["age_s"]
    assert done["cache"].startswith(f"{done['prompt_tokens']} of {done['prompt_tokens']} prompt")
    assert (second["ended"], second["events"]) == ([], [])  # only what is new
    assert second["status"]["uptime_s"] > first["status"]["uptime_s"]


def test_open_requests_show_their_progress(browser: httpx.Client, live: Live):
    body = CHAT | {"model": "slow", "max_tokens": 2000, "stream": True}
    with browser.stream("POST", "/v1/chat/completions", json=body) as answer:
        begun = answer.iter_lines()
        next(begun)
        with browser.stream("POST", "/ui/stream", json={}) as watched:
            lines = (line for line in watched.iter_lines() if line)
            each = (json.loads(line.removeprefix("data: "))["open"] for line in lines)
            shown = ([one for one in found if one["model"] == "slow"][-1] for found in each)
            running = (one for one in shown if one["stage"] == "running")
            first, second = next(running), next(running)
    assert first["rid"] == second["rid"]
    assert first.get("completion_tokens", 0) < second["completion_tokens"] < 2000
    live.wait_idle("slow")


class Watched(Scripted):
    """Counts how often a page's stream asks for the status."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def status(self) -> DaemonStatus:
        self.asked += 1
        return super().status()

    def events_since(self, number: int) -> list:
        return []

    open_requests = list
    ended_since = events_since


async def test_a_closed_page_costs_nothing(home: Home, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "INTERVAL_S", 0.01)
    control = Watched()
    async with serving(home, control=control) as it:
        async with httpx.AsyncClient(base_url=it.url) as client:
            headers = {"Origin": it.url}
            async with client.stream("POST", "/ui/stream", json={}, headers=headers):
                await until(lambda: control.asked > 2)
        await until(lambda: it.server.ui.streams.count == 0)
        asked = control.asked
        assert (await get(it.url, "/healthz")).status_code == 200
        assert control.asked == asked


async def test_streams_are_limited_and_end_with_the_server(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stream, "MAX_STREAMS", 1)
    async with httpx.AsyncClient(timeout=20) as client:
        async with serving(home, control=Watched()) as it:
            own = {"headers": {"Origin": it.url}, "json": {}}
            opened = client.stream("POST", f"{it.url}/ui/stream", **own)
            answer = await opened.__aenter__()
            refused = await client.post(f"{it.url}/ui/stream", **own)
            assert refused.status_code == 429
            assert "close some" in refused.json()["error"]["message"]
        assert (await answer.aread()).endswith(b"\n\n")  # complete: the server ended it
        await opened.__aexit__(None, None, None)


async def test_without_ui_there_is_no_page_and_no_operation(home: Home):
    async with serving(home, control=Watched(), ui=False) as it:
        assert (await get(it.url, "/", headers=PAGE)).text.startswith("kvd ")
        for path in sorted(files.PATHS):
            assert (await get(it.url, path)).status_code == 404
        async with httpx.AsyncClient(base_url=it.url, headers={"Origin": it.url}) as client:
            for path in ("/ui/operations", "/ui/stream"):
                assert (await client.post(path, json={})).status_code == 404


async def test_the_stream_of_a_removed_key_ends(home: Home, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "INTERVAL_S", 0.01)
    kept, removed = keys.make(), keys.make()
    both = {"kept": keys.hashed(kept), "removed": keys.hashed(removed)}
    control = Watched()
    async with serving(home, control=control, keys=both) as it, httpx.AsyncClient() as client:
        path, own = f"{it.url}/ui/stream", {"Origin": it.url}
        authorized = own | {"Authorization": f"Bearer {removed}"}
        stays = own | {"Authorization": f"Bearer {kept}"}
        async with (
            client.stream("POST", path, json={}, headers=authorized) as ends,
            client.stream("POST", path, json={}, headers=stays) as goes_on,
        ):
            lines = goes_on.aiter_lines()
            await anext(lines)
            it.server.apply(HttpSettings(keys={"kept": keys.hashed(kept)}))
            async with asyncio.timeout(10):
                assert (await ends.aread()).endswith(b"\n\n")
            asked = control.asked
            await until(lambda: control.asked > asked + 1)
            assert it.server.ui.streams.count == 1
        refused = await client.post(path, json={}, headers=authorized)
        assert refused.status_code == 401
