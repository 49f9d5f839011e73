"""Errors of kvctl: exit codes, messages on stderr, and values in them that look like markup."""

from __future__ import annotations

import importlib
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvd.cli.console import format_message, print_message
from kvd.doctor import running
from kvd.doctor.scene import Scene
from kvd.host.home import Home
from kvd.host.listen import hold_lock
from protocol import errors
from protocol import messages as m
from protocol.framing import encode_line
from protocol.types import ModelState, ModelStatus
from tests.cli.stub import STRANGE, daemon_status, stub_daemon, well


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UnknownModel("no model 'x'"), 6),
        (errors.WorkerDied("the worker died"), 7),
        (errors.InternalError("a bug"), 1),
    ],
)
def test_errors_have_exit_codes_and_messages_on_stderr(kvctl, home: Home, error, code):
    def answer(request):
        yield m.Error(id=request.id, error=error.info())

    with stub_daemon(home.socket, answer):
        assert kvctl("generate", "demo", "Hi") == (code, "", f"error: {error.message}\n")
        seen, out, err = kvctl("unload", "demo", "--json")
    assert seen == code
    assert json.loads(out)["error"]["code"] == error.code
    assert error.message in err


def test_an_error_message_with_brackets_is_not_markup(kvctl, home: Home):
    def answer(request):
        yield m.Error(id=request.id, error=errors.InvalidRequest("bad [red]x[/] [1]").info())

    with stub_daemon(home.socket, answer):
        assert kvctl("status")[2] == "error: bad [red]x[/] [1]\n"


def test_without_a_daemon_the_error_says_how_to_start_one(kvctl, home: Home):
    code, out, err = kvctl("status")
    assert (code, out) == (3, "")
    assert f"no daemon answers on {home.socket}; start one with `kvd serve`" in err


def test_a_silent_daemon_is_reported_once(kvctl, home: Home, monkeypatch):
    reported = threading.Event()
    messages = []
    monkeypatch.setattr("kvd.client.exchange.QUICK_S", 0.05)
    monkeypatch.setattr("kvd.cli.stream.ANSWER_S", 0.05)
    monkeypatch.setattr(
        "kvd.cli.stream.print_message", lambda text: (messages.append(text), reported.set())
    )

    def answer(request):
        assert reported.wait(10)
        yield from well(request)

    with stub_daemon(home.socket, answer):
        code, out, _ = kvctl("generate", "demo", "Hi")
    assert (code, out) == (0, "Grüße all")
    assert len(messages) == 1
    assert "no message from the daemon" in messages[0]


@pytest.mark.parametrize(
    ("state", "said"),
    [("loading", "m1 is loading; the answer begins when it is ready"), ("ready", "no token for")],
)
def test_silence_while_a_model_loads_is_explained(
    kvctl, home: Home, monkeypatch, state: ModelState, said: str
):
    """Other models that load, without requests, are not the reason."""
    reported = threading.Event()
    messages = []
    monkeypatch.setattr("kvd.client.exchange.QUICK_S", 0.05)

    def note(text: str, *values: object) -> None:
        messages.append(text.format(*values))
        reported.set()

    monkeypatch.setattr("kvd.cli.stream.print_message", note)
    models = [
        ModelStatus(name=name, source="demo", state=one, requests=requests)
        for name, one, requests in (("m1", state, 1), ("m2", "loading", 0))
    ]

    def answer(request):
        if isinstance(request, m.Status):
            yield m.StatusReply(id=request.id, status=daemon_status(*models))
            return
        assert reported.wait(10)
        yield from well(request)

    with stub_daemon(home.socket, answer):
        code, out, _ = kvctl("generate", "m1", "Hi")
    assert (code, out) == (0, "Grüße all")
    assert len(messages) == 1
    assert said in messages[0]


def test_a_daemon_that_still_runs_is_not_reported_as_stopped(kvctl, home: Home, monkeypatch):
    module = importlib.import_module("kvd.cli.shutdown")  # the package's attribute is the command
    monkeypatch.setattr(module, "_EXIT_TIMEOUT_S", 0.05)
    home.create()
    with stub_daemon(home.socket, well), hold_lock(home):
        code, out, err = kvctl("shutdown")
        assert (code, out) == (7, "")
        assert "still runs" in err
        code, out, _ = kvctl("shutdown", "--json")
        assert (code, json.loads(out)) == (7, {"state": "stopping"})


def test_a_misspelled_command_gets_a_suggestion(kvctl):
    code, _, err = kvctl("sttus")
    assert (code, "No such command 'sttus'. Did you mean 'status'?" in err) == (2, True)


@pytest.mark.parametrize("text", STRANGE)
def test_values_in_messages_are_not_markup(text, capsys):
    print_message("[bold]{}[/]{}", text, text)
    assert capsys.readouterr().err == f"{text}{text}\n"
    print_message("[dim]saved in {}[/]", text)
    assert capsys.readouterr().err == f"saved in {text}\n"


def test_a_value_in_a_message_takes_the_style_around_it():
    assert format_message("[bold]{}[/] is [dim]{}[/]!", "a[b", "[/]").markup == (
        r"[bold]a[b[/bold] is [dim]\[/][/dim]!"
    )


@pytest.mark.parametrize("text", STRANGE)
def test_an_unknown_name_that_looks_like_markup_is_quoted_in_the_error(kvctl, home: Home, text):
    with stub_daemon(home.socket, well):
        code, out, err = kvctl("status", text)
    assert (code, out) == (6, "")
    assert err.startswith(f"error: there is no model {text!r} (")


def test_a_reply_without_a_required_field_is_explained_by_the_version(kvctl, home: Home):
    """The daemon is older than the field, so its messages lack it."""
    reply = json.loads(encode_line(m.StatusReply(id="1", status=daemon_status())))
    del reply["status"]["version"]
    line = json.dumps(reply).encode() + b"\n"
    home.socket.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as aside:
        listener.bind(str(home.socket))
        listener.listen()

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(line)

        answering = aside.submit(answer)
        code, out, err = kvctl("status")
        answering.result(5)
        answering = aside.submit(answer)
        (finding,) = running.daemon(Scene(home))
        answering.result(5)
    assert (code, out) == (1, "")
    assert "missing required field `version`" in err
    assert "if the daemon has another version, restart it" in err
    assert finding.verdict == "fail"
    assert "if the daemon has another version" in finding.observed
    assert finding.advice == "restart the daemon"


@pytest.mark.parametrize("error", [errors.UnknownOp, errors.UnsupportedVersion])
def test_an_unknown_operation_is_explained_by_the_version(kvctl, home: Home, error):
    def older(request):
        yield m.Error(id=request.id, error=error("no").info())

    with stub_daemon(home.socket, older):
        code, _, err = kvctl("pin", "demo")
    assert code == 1
    assert err == "error: no\nhint: the daemon's version differs from kvctl's; restart the daemon\n"
