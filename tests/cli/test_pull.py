"""`kvctl pull` from a server that speaks the Hub's endpoints: resumption, checks and faults."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvd import demo
from kvd.cli import hub as hub_module
from kvd.cli import pulled
from kvd.host.home import Home
from kvd.host.models_dir import ModelsDir
from tests.cli.hub_server import FakeHub, serving
from tests.process.helpers import wait_for

MIB = 1 << 20


def weights(count: int = 3 * MIB, seed: int = 0) -> bytes:
    header = {"a": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}}
    header |= {f"b{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(9)}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + random.Random(seed).randbytes(count)


def files(**more: bytes) -> dict[str, bytes]:
    root = demo.path()
    small = {name: (root / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    return {**small, "model.safetensors": weights(), "README.md": b"# no", **more}


@pytest.fixture(autouse=True)
def no_token(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def hub(monkeypatch):
    with serving(FakeHub(files())) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


def same(home: Home, hub: FakeHub, name: str = "tiny") -> bool:
    folder = home.root / "models" / name
    wanted = {name: data for name, data in hub.files.items() if name != "README.md"}
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.name[0] != "."}
    left = [path.name for path in folder.parent.iterdir() if path.name.startswith(".pull")]
    return found == wanted and not left


def test_a_model_is_a_folder_of_the_models_folder(kvctl, home: Home, hub):
    code, out, err = kvctl("pull", "org/tiny", "--json")
    assert (code, json.loads(out)["model"]) == (0, "tiny"), err
    assert same(home, hub)
    assert [one.problem for one in ModelsDir(home.root / "models").scan()] == [""]
    assert "/org/tiny/resolve/" not in "".join(
        path for path, _ in hub.requests if path.endswith("README.md")
    )
    before = len(hub.requests)
    code, _, err = kvctl("pull", "org/tiny")
    assert (code, "is there already" in err) == (0, True)
    assert len(hub.requests) == before


def test_a_folder_of_something_else_is_kept(kvctl, home: Home, hub):
    (home.root / "models" / "tiny").mkdir(parents=True)
    code, _, err = kvctl("pull", "org/tiny")
    assert (code, "--alias" in err) == (6, True)
    assert kvctl("pull", "org/tiny", "--alias", "mine")[0] == 0
    assert same(home, hub, "mine")


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "-x", "a b", "..", "/abs"])
def test_names_are_no_paths(kvctl, home: Home, hub, name: str):
    assert kvctl("pull", "org/tiny", f"--alias={name}")[0] == 5
    assert hub.requests == []


@pytest.mark.parametrize("name", ["tiny", "/abs/x", "a/b/c", "../../x", "org/tiny?x"])
def test_only_ids_of_the_hub_are_pulled(kvctl, hub, name: str):
    code, _, err = kvctl("pull", name)
    assert (code, "no id of the Hub" in err) == (6, True)


def test_a_connection_that_is_cut_continues_where_it_ended(kvctl, home: Home, hub):
    hub.cuts = [MIB, 0, MIB + 3]
    assert kvctl("pull", "org/tiny")[0] == 0
    assert same(home, hub)
    resumed = [given for given in hub.ranges_of("model.safetensors") if given.endswith("-")]
    assert resumed == ["bytes=0-", f"bytes={MIB}-", f"bytes={MIB}-", f"bytes={2 * MIB + 3}-"]


def test_a_server_without_ranges_sends_all_of_it_again(kvctl, home: Home, hub):
    hub.cuts, hub.ranges = [MIB], False
    assert kvctl("pull", "org/tiny")[0] == 0
    assert same(home, hub)


def test_a_server_that_never_completes_is_given_up(kvctl, home: Home, hub, monkeypatch):
    monkeypatch.setattr(hub_module, "_MAX_FAILURES", 2)
    hub.cuts = [MIB] + [0] * 9
    code, _, err = kvctl("pull", "org/tiny")
    assert (code, "pull it again to continue" in err) == (1, True)
    hub.cuts = []
    assert kvctl("pull", "org/tiny")[0] == 0
    assert same(home, hub)
    assert f"bytes={MIB}-" == hub.ranges_of("model.safetensors")[-1]


def test_damaged_contents_are_loaded_again_once_and_then_refused(kvctl, home: Home, hub):
    bad = bytearray(hub.files["model.safetensors"])
    bad[-1] ^= 1
    hub.wrong = [bytes(bad)]
    assert kvctl("pull", "org/tiny")[0] == 0
    assert same(home, hub)
    kvctl("rm", "tiny", "--yes")
    hub.wrong = [bytes(bad), bytes(bad)]
    code, _, err = kvctl("pull", "org/tiny", "--alias", "again")
    assert (code, "has the checksum" in err) == (1, True)
    assert not (home.root / "models" / "again").exists()


@pytest.mark.parametrize("change", [b"x" * 10, b""])
def test_a_file_of_another_size_is_refused(kvctl, home: Home, hub, change: bytes):
    whole = hub.files["model.safetensors"]
    hub.wrong = [whole + change if change else whole[:-5]] * 3
    code, _, err = kvctl("pull", "org/tiny")
    assert (code, f"instead of {len(whole)}" in err) == (1, True)


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [(401, 6, "HF_TOKEN"), (403, 6, "HF_TOKEN"), (404, 6, "has no org/tiny"), (410, 1, "410")],
)
def test_refusals_of_the_hub(kvctl, hub, status: int, code: int, text: str):
    hub.statuses = [status]
    found, _, err = kvctl("pull", "org/tiny")
    assert (found, text in err) == (code, True)
    hub.statuses = [200, 200, 200, 200, status]  # in the middle of the files
    found, _, err = kvctl("pull", "org/tiny")
    assert (found, text in err) == (code, True)


def test_a_busy_hub_is_asked_again_after_the_time_that_it_gives(kvctl, home: Home, hub):
    hub.statuses, hub.retry_after = [429, 503, 200, 429], "0"
    assert kvctl("pull", "org/tiny")[0] == 0
    assert same(home, hub)
    hub.statuses = [429] * 9
    code, _, err = kvctl("pull", "org/tiny", "--alias", "b")
    assert (code, "429" in err) == (1, True)


def test_the_token_is_sent(kvctl, home: Home, hub, monkeypatch, tmp_path):
    hub.token = "secret"
    code, _, err = kvctl("pull", "org/tiny")
    assert (code, "restricted" in err, "secret" in err) == (6, True, False)
    (tmp_path / "hf").mkdir(exist_ok=True)
    (tmp_path / "hf" / "token").write_text("secret\n")
    assert kvctl("pull", "org/tiny")[0] == 0


def test_a_password_in_netrc_does_not_get_in_the_way_of_the_token(
    kvctl, home: Home, hub, monkeypatch, tmp_path
):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("HF_TOKEN", "secret")
    code, _, err = kvctl("pull", "org/tiny")
    assert code == 0, err
    assert set(hub.given) == {"Bearer secret"}


def test_another_server_does_not_get_the_token(kvctl, home: Home, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    with serving(FakeHub(hub.files)) as other:
        hub.redirect = other.url
        code, _, err = kvctl("pull", "org/tiny")
    assert code == 0, err
    assert (set(hub.given), set(other.given)) == ({"Bearer secret"}, {None})
    assert same(home, hub)


def test_a_list_of_files_that_arrives_in_pieces(kvctl, home: Home, hub):
    hub.list_piece, hub.slow_s = 200, 0.01
    code, _, err = kvctl("pull", "org/tiny")
    assert code == 0, err
    assert same(home, hub)


def test_a_server_without_ranges_that_never_completes_is_given_up(kvctl, hub, monkeypatch):
    monkeypatch.setattr(hub_module, "_MAX_FAILURES", 3)
    hub.cuts, hub.ranges = [MIB] * 20, False
    code, _, err = kvctl("pull", "org/tiny")
    assert (code, "pull it again to continue" in err) == (1, True)
    assert len(hub.cuts) == 20 - 3


@pytest.mark.parametrize("commit", ["../../x", "\x1b[31mc", ""])
def test_a_revision_that_is_no_commit_is_refused(kvctl, hub, commit: str):
    hub.commit = commit
    code, _, err = kvctl("pull", "org/tiny")
    assert (code, "is not readable" in err, "\x1b[31mc" in err) == (1, True, False)


def test_names_of_files_stay_in_the_folder(kvctl, home: Home, hub):
    hub.files |= dict.fromkeys(("../model.jinja", "/model.jinja", "a/model.jinja"), b"x")
    hub.files |= dict.fromkeys(("a\0.jinja", "\x1b[2Ja.jinja"), b"x")
    hub.files["additional_chat_templates/t.jinja"] = b"y"
    assert kvctl("pull", "org/tiny")[0] == 0
    folder = home.root / "models" / "tiny"
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.jinja")}
    assert found == {"additional_chat_templates/t.jinja"}
    assert not (folder.parent / "model.jinja").exists()


def test_what_is_no_model_is_refused_before_a_download(kvctl, hub):
    hub.files = {"config.json": b"{}", "x.gguf": b"x"}
    assert "GGUF" in kvctl("pull", "org/tiny")[2]
    hub.files = {"README.md": b"x"}
    assert "no config.json" in kvctl("pull", "org/tiny")[2]
    assert all(path.startswith("/api/") for path, _ in hub.requests)


def test_a_full_disk_is_noticed_before_a_download(kvctl, home: Home, hub, monkeypatch):
    monkeypatch.setattr(pulled, "RESERVE_BYTES", 1 << 60)
    code, _, err = kvctl("pull", "org/tiny")
    assert (code, "bytes free" in err) == (1, True)
    assert len(hub.requests) == 1


def test_a_model_that_cannot_fit_the_budget_is_refused_before_a_download(kvctl, home: Home, hub):
    home.create()
    home.config.write_text('budget = "64MiB"')
    code, _, err = kvctl("pull", "org/tiny")
    assert (code, "the budget is 64.0 MiB" in err) == (1, True)
    assert not any((given or "").endswith("-") for _, given in hub.requests)
    assert kvctl("pull", "org/tiny", "--force")[0] == 0
    assert same(home, hub)


def command(home: Home, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvd.cli", "--home", str(home.root), "pull", *arguments]


def test_a_killed_pull_continues_and_two_at_once_are_one(home: Home, hub):
    hub.slow_s = 0.05
    environment = {**os.environ, "HF_ENDPOINT": hub.url}
    first = subprocess.Popen(command(home, "org/tiny"), env=environment)
    staging = home.root / "models" / ".pull-tiny"

    def half() -> bool:
        return any(path.stat().st_size > MIB for path in staging.glob("*.part"))

    wait_for("a megabyte is there", half)
    first.kill()
    assert first.wait() == -9
    assert not (home.root / "models" / "tiny").exists()

    hub.slow_s, before = 0.005, len(hub.requests)
    both = [
        subprocess.Popen(command(home, "org/tiny"), env=environment, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    errors = [process.communicate()[1].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert same(home, hub)
    later = [given for path, given in hub.requests[before:] if path.endswith("model.safetensors")]
    (resumed,) = [given for given in later if given.endswith("-")]
    assert int(resumed.removeprefix("bytes=").rstrip("-")) > MIB


def test_files_of_an_earlier_revision_do_not_get_into_the_model(kvctl, home: Home, hub):
    killed = home.root / "models" / ".pull-tiny" / "model"  # just before its last step
    killed.mkdir(parents=True)
    (killed / "model-00002-of-00002.safetensors").write_bytes(b"old")
    assert kvctl("pull", "org/tiny")[0] == 0
    assert same(home, hub)


def test_ctrl_c_keeps_what_is_there(kvctl, home: Home, hub):
    hub.slow_s = 0.05
    staging = home.root / "models" / ".pull-tiny"
    process = subprocess.Popen(
        command(home, "org/tiny"),
        env={**os.environ, "HF_ENDPOINT": hub.url},
        stderr=subprocess.PIPE,
    )
    wait_for("a part is there", lambda: downloaded(staging) > 0)
    process.send_signal(2)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, b"Traceback" in err) == (130, False), err
    assert downloaded(staging) > 0


def downloaded(staging: Path) -> int:
    """Return the bytes of parts and of whole files: a part that is complete gets another name."""
    found = 0
    for path in staging.glob("*"):
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size if path.is_file() else 0
    return found
