"""API keys: `kvctl key` creates them, and a daemon that others can reach requires them."""

from __future__ import annotations

import json
import subprocess
import sys

import httpx
import pytest
from msgspec.structs import replace

from kvd import cli
from kvd.config.config import load, parse
from kvd.host.home import Home
from kvd.http import keys
from tests.http.live import Live, stopped
from tests.process.helpers import write_config


@pytest.fixture
def kvctl(monkeypatch, capsys, home: Home):
    """Return a function that runs kvctl here and returns its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvctl", "--home", str(home.root), *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


def test_a_new_key_goes_to_stdout_and_its_configuration_line_to_stderr(kvctl, home: Home):
    code, out, err = kvctl("key", "new", "laptop")
    key = out.strip()
    line = err.strip().splitlines()[-1]
    assert code == 0
    assert key not in err
    assert parse(f"[http]\n{line}").http.keys == {"laptop": keys.hashed(key)}
    assert kvctl("key", "new", "laptop")[1] != out
    write_config(home, f"[http]\n{line}")
    assert kvctl("key", "list")[:2] == (0, "laptop\n")
    assert json.loads(kvctl("key", "list", "--json")[1]) == ["laptop"]
    code, out, err = kvctl("key", "new", "laptop")
    assert (code, out) == (6, "")
    assert "has a key already" in err


TABLES = {
    "no file": None,
    "no table": "budget = '1GiB' # mine\n",
    "table": "[http] # mine\nport = 1\n\n[watchdog]\ndecode_s = 9\n",
    "table with keys": f"[http]\nkeys.a = '{keys.hashed('a')}' # mine\nport = 1\n",
    "table of keys": f"[http]\nport = 1\n[http.keys] # mine\na = '{keys.hashed('a')}'\n",
    "inline table": "http = {port = 1} # mine\n",
    "inline keys": f"[http]\nkeys = {{a = '{keys.hashed('a')}'}} # mine\n",
    "dotted keys": "http.port = 1 # mine\n",
}
"""Files with and without the table ``[http]``."""


@pytest.mark.parametrize("before", TABLES.values(), ids=TABLES)
def test_a_saved_key_is_in_the_file_and_everything_else_stays(kvctl, home: Home, before):
    if before is not None:
        write_config(home, before)
    code, out, err = kvctl("key", "new", "laptop", "--save")
    assert (code, f"saved its hash in {home.config}" in err) == (0, True)
    after, found = home.config.read_text(), load(home.config)
    assert found.http.keys["laptop"] == keys.hashed(out.strip())
    others = {name: found.http.keys[name] for name in found.http.keys if name != "laptop"}
    assert replace(found, http=replace(found.http, keys=others)) == parse(before or "")
    assert ("# mine" in after) is (before is not None)
    assert kvctl("config", "unset", "http.keys.laptop", "--save")[0] == 0
    assert load(home.config) == parse(before or "")


def test_without_a_valid_file_no_key_is_saved_or_printed(kvctl, home: Home):
    write_config(home, "bugdet = 1")
    code, out, err = kvctl("key", "new", "laptop", "--save")
    assert (code, out, "did you mean budget?" in err) == (5, "", True)
    assert home.config.read_text() == "bugdet = 1"


def test_a_new_key_as_json(kvctl):
    reported = json.loads(kvctl("key", "new", "ci", "--json")[1])
    assert reported == {"name": "ci", "key": reported["key"], "hash": keys.hashed(reported["key"])}


@pytest.mark.parametrize("name", ["", "a b", "a.b", 'a"', "x" * 65, "\xe4"])
def test_a_name_that_the_configuration_does_not_allow(kvctl, name):
    code, out, err = kvctl("key", "new", name)
    assert (code, out) == (6, "")
    assert "letters, digits" in err


@pytest.mark.slow
@pytest.mark.process
def test_a_daemon_that_others_can_reach_needs_a_key_and_keys_can_be_revoked(home: Home, kvctl):
    open_to_all = '[http]\nhost = "0.0.0.0"\nport = 0\n'
    daemon = Live(write_config(home, open_to_all), "--fake")
    with stopped(daemon):
        daemon.launch()
        assert daemon.wait() == 5
        assert "API key" in daemon.errors.read_text()
        assert "kvctl key new" in daemon.errors.read_text()

        one, other = keys.make(), keys.make()
        line = 'keys.{} = "{}"\n'.format
        both = line("a", keys.hashed(one)) + line("b", keys.hashed(other))
        write_config(home, open_to_all + both)
        daemon.start()

        def status(key: str | None) -> int:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            url = f"http://127.0.0.1:{daemon.address[1]}/v1/models"
            return httpx.get(url, headers=headers).status_code

        assert [status(key) for key in (None, keys.make(), one, other)] == [401, 401, 200, 200]

        made = json.loads(kvctl("key", "new", "c", "--save", "--json")[1])
        assert (status(made["key"]), status(one)) == (200, 200)
        assert kvctl("config", "unset", "http.keys.c")[0] == 0
        assert status(made["key"]) == 200  # the file has it
        assert kvctl("config", "unset", "http.keys.c", "--save")[0] == 0
        assert (status(made["key"]), status(one)) == (401, 200)

        write_config(home, open_to_all + line("b", keys.hashed(other)))
        assert kvctl("reload")[0] == 0
        assert (status(one), status(other)) == (401, 200)

        write_config(home, open_to_all)
        code, _, err = kvctl("reload")
        assert (code, "API key" in err) == (5, True)
        assert (status(None), status(other)) == (401, 200)


@pytest.mark.process
def test_a_second_daemon_on_the_same_port_does_not_start(home: Home, tmp_path_factory):
    first = Live(write_config(home, "[http]\nport = 0\n"), "--fake")
    with stopped(first):
        first.start()
        second = Live(write_config(Home(home.root.with_name("i")), ""), "--fake")
        second.home.config.write_text(f"[http]\nport = {first.address[1]}\n")
        with stopped(second):
            second.launch()
            assert second.wait() == 5
            assert "another program uses the port" in second.errors.read_text()
            assert not second.home.http_socket.exists()


def test_aiohttp_is_imported_only_when_http_is_served():
    code = "import sys, kvd.daemon.daemon, kvd.cli.api_keys\nsys.exit('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
