"""Commands that poll the daemon (`status --watch`, `top`) while it stops and restarts."""

from __future__ import annotations

import io
import json
import sys

import pytest

from kvd import cli
from kvd.cli import status
from kvd.cli.common import CommonOptions
from kvd.cli.polling import PollingClient
from kvd.host.home import Home
from protocol import messages as m
from protocol.errors import NotRunning
from tests.cli.stub import stub_daemon, well


def test_polling_reconnects_to_the_next_daemon_and_gets_all_of_its_events(home: Home):
    client = PollingClient(CommonOptions(home=str(home.root)))
    seen = []

    def leaving(request):
        seen.append(request)
        if len(seen) == 4:
            yield None
        else:
            yield from well(request)

    with stub_daemon(home.socket, leaving):
        assert client.status().state == "serving"
        assert [one.seq for one in client.new_events()] == [1]
        with pytest.raises(NotRunning):
            client.status()
    home.socket.unlink()
    with pytest.raises(NotRunning):
        client.status()
    seen.clear()

    def successor(request):
        if isinstance(request, m.Hello):
            yield m.HelloReply(id=request.id, version="2", protocol=1, pid=7, home="/h")
        elif isinstance(request, m.Events):
            seen.append(request.since)
            yield m.EventsReply(id=request.id, last=0)
        else:
            yield from well(request)

    with stub_daemon(home.socket, successor), client:
        assert client.status().version == "0.1.0"
        assert client.new_events() == []
    assert seen == [0]


def test_the_same_daemon_sends_only_new_events(home: Home):
    common = CommonOptions(home=str(home.root))
    with stub_daemon(home.socket, well) as requests, PollingClient(common) as client:
        client.new_events()
        client.new_events()
    assert [one.since for one in requests if isinstance(one, m.Events)] == [0, 1]


class Times:
    """Replaces the `time` module. The third `sleep` raises KeyboardInterrupt."""

    def __init__(self, before):
        self.naps = 0
        self.before = before

    def sleep(self, seconds):
        self.naps += 1
        self.before(self.naps)
        if self.naps == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("as_json", [True, False])
def test_status_watch_repeats(home: Home, monkeypatch, capsys, as_json):
    monkeypatch.setattr(status, "time", Times(lambda _: None))
    arguments = ["kvctl", "--home", str(home.root), "status", "--watch"]
    monkeypatch.setattr(sys, "argv", [*arguments, *(["--json"] if as_json else [])])
    with stub_daemon(home.socket, well), pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")  # Ctrl-C is the normal end
    if as_json:
        assert [json.loads(line)["pid"] for line in out.splitlines()] == [4241] * 3
    else:
        assert out.count("kvd 0.1.0") == 3


def test_a_stopped_daemon_is_reported_once_and_waited_for(home: Home, monkeypatch, capsys):
    gone = []

    def answer(request):
        if gone:
            yield None
        else:
            yield from well(request)

    monkeypatch.setattr(status, "time", Times(gone.append))
    monkeypatch.setattr(sys, "argv", ["kvctl", "--home", str(home.root), "status", "-w", "--json"])
    with stub_daemon(home.socket, answer), pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert ended.value.code == 0
    assert len(out.splitlines()) == 1
    assert err.count("waiting for it") == 1


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_status_is_updated_in_place(home: Home, monkeypatch):
    screen = Terminal()
    for name, value in {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(status, "time", Times(lambda _: None))
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "argv", ["kvctl", "--home", str(home.root), "status", "-w"])
    with stub_daemon(home.socket, well), pytest.raises(SystemExit):
        cli.main()
    text = screen.getvalue()
    assert text.count("demo") == 4  # three updates and the final display
    assert "\x1b[2K" in text  # an update erases the previous lines
