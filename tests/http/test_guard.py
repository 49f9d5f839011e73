"""Access checks without a server: API keys, and the headers Host and Origin."""

from __future__ import annotations

import pytest

from kvd.config.http import HttpSettings
from kvd.http import keys
from kvd.http.errors import Refusal
from kvd.http.guard import Guard


def guard(**settings) -> Guard:
    return Guard(HttpSettings(**settings))


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:11711",
        "localhost:80",
        "LOCALHOST",
        "localhost.",
        "kvd.localhost:1",
        "[::1]:11711",
        "192.168.1.7:11711",
        "box.lan",
        "BOX.lan:11711",
    ],
)
def test_hosts_that_are_allowed(host):
    guard(hosts=["Box.lan"]).check_host(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:11711",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "notlocalhost",
        "evil@127.0.0.1",
        "127.0.0.1/x",
        "127.0.0.1:x",
        "[::1",
        "2130706433",
        "0x7f.1",
    ],
)
def test_hosts_that_are_refused(host):
    with pytest.raises(Refusal) as caught:
        guard().check_host(host)
    assert (caught.value.status, caught.value.code) == (403, "host_not_allowed")


@pytest.mark.parametrize("host", [None, ""])
def test_a_host_must_be_given(host):
    with pytest.raises(Refusal) as caught:
        guard().check_host(host)
    assert caught.value.status == 400


def test_a_missing_or_own_origin_needs_no_permission():
    assert guard().check_origin(None, "127.0.0.1:11711") is None
    assert guard().check_origin("http://127.0.0.1:11711", "127.0.0.1:11711") is None


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "http://localhost:3000", "http://127.0.0.1", "file://", ""],
)
def test_other_origins_are_refused(origin):
    with pytest.raises(Refusal) as caught:
        guard(origins=["https://chat.example"]).check_origin(origin, "127.0.0.1:11711")
    assert (caught.value.status, caught.value.code) == (403, "origin_not_allowed")


def test_configured_origins_are_allowed():
    it = guard(origins=["https://chat.example"])
    assert it.check_origin("https://chat.example", "127.0.0.1") == "https://chat.example"
    assert guard(origins=["*"]).check_origin("null", "127.0.0.1") == "null"


def test_keys():
    one, other = keys.make(), keys.make()
    it = guard(keys={"laptop": keys.hashed(one), "phone": keys.hashed(other)})
    assert len(one) >= 43
    assert one != other
    assert one not in keys.hashed(one)
    assert it.check_key(f"Bearer {one}") == "laptop"
    assert it.check_key(f"bearer  {other} ") == "phone"
    for wrong in (None, "", one, f"Basic {one}", "Bearer ", f"Bearer {one}x", "Bearer \udcff"):
        with pytest.raises(Refusal) as caught:
            it.check_key(wrong)
        assert caught.value.status == 401
        assert "Bearer" in caught.value.headers["WWW-Authenticate"]
    assert guard().check_key(None) is None


def test_the_header_of_anthropics_clients():
    one = keys.make()
    it = guard(keys={"laptop": keys.hashed(one)})
    assert it.check_key(None, one) == "laptop"
    assert it.check_key("Basic abc", f" {one} ") == "laptop"
    assert it.check_key("Bearer sk-of-another-service", one) == "laptop"
    assert it.check_key(f"Bearer {one}", "sk-of-another-service") == "laptop"
    for wrong in (None, ""), ("Bearer x", "y"), ("Bearer ", " "):
        with pytest.raises(Refusal):
            it.check_key(*wrong)
