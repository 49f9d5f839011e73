"""The models folder of a real daemon: models that appear and disappear, by name over HTTP."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest

from kvd import demo
from tests.http.live import Live


@pytest.fixture
def mine(live: Live):
    """A model's folder that appears while the daemon runs."""
    path = live.home.root / "models" / "mine"
    shutil.copytree(demo.path(), path)
    yield path
    shutil.rmtree(path, ignore_errors=True)
    with live.client() as kvd:
        for model in kvd.status().models:
            if model.name == "mine":
                kvd.unload("mine")
        kvd.reload()


def names(client: httpx.Client) -> dict[str, str]:
    return {one["id"]: one["kvd"]["state"] for one in client.get("/v1/models").json()["data"]}


def chat(client: httpx.Client, model: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    return client.post("/v1/chat/completions", json=body)


def test_a_folder_is_loaded_by_a_request_for_its_name(live: Live, client, mine: Path):
    assert chat(client, "mine").status_code == 200
    assert names(client)["mine"] == "ready"
    assert live.model("mine").source == str(mine)
    with live.client() as kvd:
        kvd.unload("mine")
    assert names(client)["mine"] == "unloaded"
    assert live.kvctl("load", "mine").returncode == 0
    assert names(client)["mine"] == "ready"


def test_a_reload_finds_new_folders_and_forgets_removed_ones(live: Live, client, mine: Path):
    (live.home.root / "models" / "half").mkdir()
    with live.client() as kvd:
        kvd.reload()
        assert "mine" in kvd.status().unloaded
        assert "half" not in kvd.status().unloaded
        shutil.rmtree(mine)
        kvd.reload()
        assert "mine" not in kvd.status().unloaded
    assert any(
        line["event"] == "model folder not usable" and line["folder"].endswith("/half")
        for line in live.log()
    )
    shutil.rmtree(live.home.root / "models" / "half")


def test_kvctl_finds_a_folder_that_is_new(live: Live, mine: Path):
    chat = live.kvctl("chat", "mine", "--max-tokens", "2", input="Hi")
    assert (chat.returncode, "error" in chat.stderr) == (0, False), chat.stderr
    run = live.kvctl("run", "min", "Hi")
    assert run.returncode == 6
    assert "there is no model 'min'" in run.stderr
    assert "did you mean 'mine'?" in run.stderr


def test_a_folder_that_cannot_be_loaded_is_refused_with_the_reason(live: Live, client):
    half = live.home.root / "models" / "half"
    half.mkdir()
    try:
        reply = chat(client, "half")
        assert reply.status_code == 404
        assert f"{half} has no model*.safetensors" in reply.json()["error"]["message"]
        for command in ("load", "chat", "run"):
            refused = live.kvctl(command, "half")
            assert refused.returncode == 6
            assert f"{half} has no model*.safetensors" in refused.stderr
    finally:
        half.rmdir()


def test_a_removed_folder_is_unknown_at_the_next_request(live: Live, client, mine: Path):
    assert chat(client, "mine").status_code == 200
    shutil.rmtree(mine)
    with live.client() as kvd:
        kvd.unload("mine")
    reply = chat(client, "mine")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("name", ["../models/mine", ".mine", "mine/", "models/mine", "MINE"])
def test_names_are_no_paths(client, mine: Path, name: str):
    assert chat(client, name).status_code == 404


def test_the_configuration_wins_over_a_folder_of_the_same_name(live: Live, client, mine: Path):
    other = live.home.root / "models" / "on-demand"
    shutil.copytree(demo.path(), other)
    try:
        assert chat(client, "on-demand").status_code == 200
        assert live.model("on-demand").source.startswith("fake:")
    finally:
        shutil.rmtree(other)
