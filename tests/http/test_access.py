"""Access: API keys, hosts, origins and users."""

from __future__ import annotations

import os

import httpx

from kvd.host.home import Home
from kvd.http import keys
from tests.http.calls import CHAT, get, post, reported
from tests.http.stage import serving


async def test_with_keys_requests_over_tcp_need_one_except_health_checks(home: Home):
    key = keys.make()
    async with serving(home, keys={"me": keys.hashed(key)}, metrics=reported()) as it:
        for path in ("/v1/models", "/v1/models/m", "/metrics"):
            refused = await get(it.url, path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                401,
                "invalid_api_key",
            )
            allowed = await get(it.url, path, headers={"Authorization": f"Bearer {key}"})
            assert allowed.status_code == 200
        wrong = await post(it.url, headers={"Authorization": f"Bearer {keys.make()}"})
        assert wrong.status_code == 401
        for path in ("/", "/healthz", "/readyz"):
            assert (await get(it.url, path)).status_code == 200
        assert it.backend.calls == []
        transport = httpx.AsyncHTTPTransport(uds=it.socket)
        async with httpx.AsyncClient(transport=transport, base_url="http://kvd") as client:
            assert (await client.get("/v1/models")).status_code == 200


async def test_a_foreign_host_or_origin_is_refused_everywhere(home: Home):
    async with serving(home, metrics=reported()) as it:
        for path in ("/", "/healthz", "/readyz", "/metrics", "/v1/models", "/nowhere"):
            rebound = await get(it.url, path, headers={"Host": f"evil.example:{it.port}"})
            assert (rebound.status_code, rebound.json()["error"]["code"]) == (
                403,
                "host_not_allowed",
            )
            page = await get(it.url, path, headers={"Origin": "https://evil.example"})
            assert (page.status_code, page.json()["error"]["code"]) == (403, "origin_not_allowed")
            assert "access-control-allow-origin" not in page.headers
        simple = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
        assert (await post(it.url, headers=simple)).status_code == 403
        assert it.backend.calls == []


async def test_pages_of_configured_origins_are_served(home: Home):
    page = "https://chat.example"
    key = keys.make()
    settings = {"origins": [page], "keys": {"me": keys.hashed(key)}}
    async with serving(home, **settings) as it, httpx.AsyncClient(verify=False) as client:
        url = f"{it.url}/v1/chat/completions"
        ask = {
            "Origin": page,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,x-stainless-os",
            "Access-Control-Request-Private-Network": "true",
        }
        preflight = await client.options(url, headers=ask)
        assert preflight.status_code == 204
        assert preflight.headers["Access-Control-Allow-Origin"] == page
        assert preflight.headers["Access-Control-Allow-Private-Network"] == "true"
        assert preflight.headers["Access-Control-Allow-Headers"] == "authorization,x-stainless-os"
        headers = {"Origin": page, "Authorization": f"Bearer {key}"}
        answer = await client.post(url, json=CHAT | {"stream": True}, headers=headers)
        assert (answer.status_code, answer.headers["Access-Control-Allow-Origin"]) == (200, page)
        without = await client.post(url, json=CHAT, headers={"Origin": page})
        assert (without.status_code, without.headers["Access-Control-Allow-Origin"]) == (401, page)
        other = await client.options(url, headers=ask | {"Origin": "https://evil.example"})
        assert other.status_code == 403


async def test_another_user_is_refused_on_the_unix_socket(home: Home):
    async with serving(home, uid_of=lambda _: os.geteuid() + 1) as it:
        transport = httpx.AsyncHTTPTransport(uds=it.socket)
        async with httpx.AsyncClient(transport=transport, base_url="http://kvd") as client:
            for path in ("/", "/healthz", "/v1/models"):
                refused = await client.get(path)
                assert refused.status_code == 403
                assert refused.json()["error"]["code"] == "permission_denied"
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 403
        assert it.backend.calls == []
