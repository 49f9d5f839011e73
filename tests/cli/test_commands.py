"""Commands of operators and their output: status, models, budget, cache, tokens and events."""

from __future__ import annotations

import json

from kvd.host.home import Home
from protocol import messages as m
from protocol.policy import PolicyChange
from tests.cli.stub import MODEL, daemon_status, stub_daemon, well


def test_status_for_people_and_for_programs(kvctl, home: Home):
    with stub_daemon(home.socket, well):
        code, out, err = kvctl("status")
        assert (code, err) == (0, "")
        assert "demo" in out
        assert "ready" in out
        code, out, _ = kvctl("status", "--json")
    assert code == 0
    assert json.loads(out)["models"][0]["stats"]["max_rows_in_step"] == 8


def test_status_of_one_model(kvctl, home: Home):
    with stub_daemon(home.socket, well):
        code, out, _ = kvctl("status", "demo")
        assert (code, out.splitlines()[0].split()[:2]) == (0, ["demo", "ready"])
        assert "keys per channel, values per token" in out
        code, out, _ = kvctl("status", "demo", "--json")
        assert (code, json.loads(out)["name"]) == (0, "demo")
        code, _, err = kvctl("status", "nope")
    assert code == 6
    assert "there is no model 'nope' (loaded: demo); `kvctl load` adds a model" in err


def test_load_sends_the_source_the_alias_and_the_scheme(kvctl, home: Home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with stub_daemon(home.socket, well) as requests:
        code, out, _ = kvctl("load", "./model", "--alias", "small", "--kv", "k8v4")
        assert code == 0
        assert "5.8 M parameters" in out
        assert json.loads(kvctl("load", "demo", "--json")[1])["name"] == "demo"
    assert requests[0].model == str(tmp_path / "model")
    assert (requests[0].alias, requests[0].kv.name) == ("small", "k8v4")
    assert (requests[1].model, requests[1].kv) == ("demo", None)


def test_a_wrong_scheme_is_a_usage_error(kvctl):
    code, _, err = kvctl("load", "demo", "--kv", "k7v8")
    assert code == 2
    assert "no KV scheme" in err


def test_unload_drain_and_shutdown(kvctl, home: Home):
    with stub_daemon(home.socket, well) as requests:
        assert kvctl("unload", "demo", "--force")[2] == "demo unloaded, 1.0 MiB freed\n"
        assert json.loads(kvctl("drain", "--json")[1]) == {"state": "drained"}
        assert kvctl("shutdown")[2] == "stopped\n"
    assert requests[0].force is True


def test_stored_prefixes_are_listed_and_dropped(kvctl, home: Home):
    with stub_daemon(home.socket, well):
        code, out, _ = kvctl("cache")
        assert code == 0
        assert "1.0 GiB of 20.0 GiB in 3 segments" in out
        assert "demo, other" in out
        assert json.loads(kvctl("cache", "--json")[1])["store"]["segments"] == 3
        assert "2 segments of 1.0 MiB" in kvctl("cache", "drop", "--older-than", "7d")[2]
        out = kvctl("cache", "drop", "--all", "--json")[1]
        assert json.loads(out) == {"segments": 2, "freed_bytes": 2**20}
    for wrong in ((), ("--all", "--model", "demo"), ("--older-than", "soon")):
        assert kvctl("cache", "drop", *wrong)[0] == 2


def test_tokens_are_printed_one_per_line_or_counted(kvctl, home: Home):
    with stub_daemon(home.socket, well):
        assert kvctl("tokenize", "demo", "a\n")[1] == "97\t'a'\n10\t'\\n'\n"
        assert kvctl("tokenize", "demo", "-", "-c", stdin="abc")[1] == "3\n"
        out = json.loads(kvctl("tokenize", "demo", "ab", "--chat", "--json")[1])
    assert out == {"count": 2, "tokens": [97, 98], "texts": ["a", "b"]}


def test_events_for_people_and_for_programs(kvctl, home: Home):
    with stub_daemon(home.socket, well):
        code, out, _ = kvctl("events")
        assert code == 0
        assert "evict demo: the load of other  (freed 1.0 GiB, level 1)" in out
        code, out, _ = kvctl("events", "chat", "--json")
    assert (code, json.loads(out)["model"]) == (0, "chat")


def test_pin_unpin_and_the_budget(kvctl, home: Home):
    with stub_daemon(home.socket, well):
        assert kvctl("pin", "demo")[2] == "demo is pinned\n"
        assert kvctl("unpin", "demo", "--json")[1] == '{"model":"demo","pinned":false}\n'
        assert kvctl("config")[1].startswith("budget 1.0 GiB, 1.0 MiB granted\n")
        code, out, _ = kvctl("config", "--budget", "2GiB", "--json")
        assert (code, json.loads(out)["budget_bytes"]) == (0, 2**31)
        code, _, err = kvctl("config", "--budget", "much")
    assert code == 2
    assert "much" in err


def test_load_sends_the_policy(kvctl, home: Home):
    requests = []

    def answer(request):
        requests.append(request)
        return well(request)

    with stub_daemon(home.socket, answer):
        options = ["--pin", "--priority", "3", "--idle-ttl", "60", "--max-context", "4096"]
        assert kvctl("load", "demo", *options)[0] == 0
        assert kvctl("load", "demo")[0] == 0
        assert kvctl("load", "demo", "--priority", "0")[0] == 0
        assert kvctl("load", "demo", "--ranks", "2")[0] == 0
        assert kvctl("load", "demo", "--ranks", "1")[0] == 0
        assert kvctl("load", "demo", "--pin")[0] == 0
        code, _, err = kvctl("load", "demo", "--priority", "101")
        assert "ranks must be at most 8" in kvctl("load", "demo", "--ranks", "9")[2]
    policies = [request.policy for request in requests if isinstance(request, m.Load)]
    expected = PolicyChange(pinned=True, priority=3, idle_ttl_s=60, max_context=4096)
    ranks = [PolicyChange(ranks=2), PolicyChange(ranks=1), PolicyChange(pinned=True)]
    assert policies == [expected, PolicyChange(), PolicyChange(priority=0), *ranks]
    assert (code, "priority must be at most 100" in err) == (2, True)


def test_the_status_of_the_stub_daemon_contains_the_model():
    assert daemon_status(MODEL).models == [MODEL]
