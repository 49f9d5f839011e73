"""Several models under one budget, with real processes: evictions, refusals and pinned models."""

from __future__ import annotations

import json

import pytest

from kvd.host.home import Home
from protocol.errors import ContextTooLong, InsufficientMemory, UnknownModel
from protocol.policy import PolicyChange
from tests.process.helpers import source, wait_for

MIB = 2**20
BIG = source(tps=500, weights=150 * MIB)


@pytest.fixture
def home_with_models(home: Home) -> Home:
    home.create()
    home.config.write_text(
        f"""
        budget = "300MiB"
        [[models]]
        source = "{BIG}"
        alias = "a"
        [[models]]
        source = "{BIG}"
        alias = "b"
        load = "demand"
        max_context = 100
        """
    )
    return home


@pytest.mark.slow
def test_models_evict_each_other_and_are_loaded_again_on_request(home_with_models, make_daemon):
    daemon = make_daemon().start()
    with daemon.client() as client:
        wait_for("a is ready", lambda: [m.state for m in client.status().models] == ["ready"])
        text = client.generate("a", "hello", max_tokens=20).text
        assert client.generate("b", "hello", max_tokens=20).text == text
        assert [model.name for model in client.status().models] == ["b"]
        assert client.generate("a", "hello", max_tokens=20).text == text

        evicted = [it for it in client.events() if it.kind == "evict"]
        assert [(it.model, it.requester) for it in evicted] == [("a", "b"), ("b", "a")]
        assert evicted[0].numbers["budget_bytes"] == 300 * MIB
        with pytest.raises(ContextTooLong):
            assert client.generate("b", "hello" * 30, max_tokens=20).text
        with pytest.raises(UnknownModel):
            assert client.generate("unknown", "hello").text
        assert client.status().violations == 0

    done = daemon.kvctl("events", "a", "--json")
    kinds = [json.loads(line)["kind"] for line in done.stdout.splitlines()]
    assert "evict" in kinds
    assert "the load of b" in daemon.kvctl("events").stdout


def test_a_request_that_can_never_fit_is_refused_until_the_budget_is_raised(make_daemon):
    small = source(tps=0, weights=150 * MIB, pages=8)
    daemon = make_daemon("--budget", "155MiB").start()
    with daemon.client() as client:
        assert client.load(small, alias="a").result.state == "ready"
        prompt = "x" * 12_000  # 188 pages of 64 KiB; half as much at the lowest level
        with pytest.raises(
            InsufficientMemory, match=r"the budget without pinned models is 155\.0 MiB"
        ) as refused:
            assert client.generate("a", prompt, max_tokens=10).text
        detail = refused.value.detail
        assert detail["base_bytes"] == 150 * MIB
        assert detail["needed_bytes"] > detail["limit_bytes"] == 155 * MIB
        client.configure(budget_bytes=160 * MIB)
        assert client.generate("a", prompt, max_tokens=10).text  # at a lower precision level
        client.configure(budget_bytes=155 * MIB)
        with pytest.raises(InsufficientMemory):
            assert client.generate("a", prompt, max_tokens=10).text
        assert client.status().violations == 0


def test_a_pinned_model_stays_and_the_error_of_the_load_names_it(make_daemon):
    daemon = make_daemon("--budget", "300MiB").start()
    with daemon.client() as client:
        assert client.load(BIG, alias="a", policy=PolicyChange(pinned=True)).result.state == "ready"
        whole = r"of the budget of 300\.0 MiB are free \(a \(pinned\) holds .* MiB\): unpin"
        with pytest.raises(InsufficientMemory, match=whole):
            assert client.load(BIG, alias="b").result.state == "ready"
        assert daemon.kvctl("unpin", "a").stderr == "a is not pinned\n"
        assert client.load(BIG, alias="b").result.state == "ready"

        assert [model.name for model in client.status().models] == ["b"]
        assert client.configure(budget_bytes=100 * MIB).budget_bytes == 100 * MIB
        wait_for("b is evicted", lambda: not client.status().granted_bytes)
    assert "100 MiB, 0 B granted" in daemon.kvctl("config").stdout
