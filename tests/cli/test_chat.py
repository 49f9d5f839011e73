"""`kvctl chat`: the conversation, its commands and what it does after errors."""

from __future__ import annotations

import json

from msgspec.structs import replace

from kvd.host.home import Home
from protocol import errors
from protocol import messages as m
from tests.cli.stub import MODEL, STRANGE, daemon_status, stub_daemon, well


def test_chat_sends_the_conversation_and_handles_commands(kvctl, home: Home):
    lines = [
        "Hello",
        "/set temperature 0",
        "/set nonsense 1",
        "And now?",
        "/history",
        "/retry",
        "/system Be brief.",
        "Fresh",
        "/nope",
        "/exit",
        "never sent",
    ]
    with stub_daemon(home.socket, well) as requests:
        code, out, err = kvctl("chat", "demo", stdin="\n".join(lines) + "\n")
    sent = [
        [(message.role, message.content) for message in request.messages]
        for request in requests
        if isinstance(request, m.Generate)
    ]
    reply = ("assistant", "Grüße all")
    assert code == 0
    assert out == "Grüße all\n" * 4
    assert sent == [
        [("user", "Hello")],
        [("user", "Hello"), reply, ("user", "And now?")],
        [("user", "Hello"), reply, ("user", "And now?")],
        [("system", "Be brief."), ("user", "Fresh")],
    ]
    assert [r.sampling.temperature for r in requests if isinstance(r, m.Generate)][:2] == [0.7, 0]
    assert "no setting nonsense" in err
    assert "no command /nope" in err


def test_chat_reads_several_lines_changes_models_and_saves(kvctl, home: Home, tmp_path):
    file = tmp_path / "talk.json"
    lines = [
        "/stats",
        '"""first',
        "",
        '  second"""',
        "/stats",
        "/model nope",
        "/model demo",
        "/save",
        f"/save {file}",
        f"/save {tmp_path}/no/where",
    ]
    with stub_daemon(home.socket, well):
        code, out, err = kvctl("chat", "demo", "--system", "Brief.", stdin="\n".join(lines) + "\n")
    assert (code, out) == (0, "Grüße all\n")
    assert json.loads(file.read_text()) == {
        "model": "demo",
        "messages": [
            {"role": "system", "content": "Brief."},
            {"role": "user", "content": "first\n\n  second"},
            {"role": "assistant", "content": "Grüße all"},
        ],
    }
    for line in (
        "no reply so far",
        "prompt 3 tokens",
        "reply 3 tokens",
        "no model 'nope'",
        "name a file",
        "cannot write",
    ):
        assert line in err


def test_an_unloaded_model_can_be_chatted_with_but_has_no_status_page(kvctl, home: Home):
    def answer(request):
        if isinstance(request, m.Status):
            status = replace(daemon_status(MODEL), unloaded=["lazy"])
            yield m.StatusReply(id=request.id, status=status)
        else:
            yield from well(request)

    with stub_daemon(home.socket, answer):
        assert kvctl("chat", "lazy", stdin="Hi\n")[:2] == (0, "Grüße all\n")
        code, _, err = kvctl("status", "lazy")
    assert (code, "the next request for it loads it" in err) == (6, True)


def test_chat_continues_after_an_error_without_the_question(kvctl, home: Home):
    def answer(request):
        if isinstance(request, m.Generate) and request.messages[-1].content == "fails":
            yield m.Error(id=request.id, error=errors.WorkerDied("the worker died").info())
        else:
            yield from well(request)

    with stub_daemon(home.socket, answer) as requests:
        code, out, err = kvctl("chat", "demo", stdin="fails\nworks\n")
    assert (code, out) == (0, "Grüße all\n")
    assert "the worker died" in err
    assert [message.content for message in requests[-1].messages] == ["works"]


def test_chat_with_an_unknown_model_lists_the_loaded_ones(kvctl, home: Home):
    with stub_daemon(home.socket, well):
        code, _, err = kvctl("chat", "nope", stdin="Hi\n")
    assert code == 6
    assert "there is no model 'nope' (loaded: demo); `kvctl load` adds a model" in err


def test_chat_refuses_values_out_of_range_and_resets_to_defaults(kvctl, home: Home):
    lines = ["/set temperature nan", "/set top_p 0", "/set seed -1", "/set max_tokens 5", "One"]
    lines += ["/set seed 3", "/set max_tokens default", "Two", "/set seed default", "Three"]
    with stub_daemon(home.socket, well) as requests:
        code, _, err = kvctl("chat", "demo", stdin="\n".join(lines) + "\n")
    assert code == 0
    assert "temperature must be between 0 and 10" in err
    assert "top_p must be above 0 and at most 1" in err
    assert "seed must be between 0 and" in err
    sent = [request for request in requests if isinstance(request, m.Generate)]
    assert [(r.max_tokens, r.sampling.seed) for r in sent] == [(5, None), (None, 3), (None, None)]
    assert {r.sampling.temperature for r in sent} == {0.7}


def test_chat_continues_after_any_input(kvctl, home: Home):
    with stub_daemon(home.socket, well):
        lines = "\n".join(f"/{text.replace(' ', '_')}" for text in STRANGE)
        code, _, err = kvctl("chat", "demo", stdin=f"{lines}\n/set top_k \\[/b]\n/exit\n")
    assert code == 0
    for text in STRANGE:
        assert f"no command /{text.replace(' ', '_')}; /help" in err
    assert r"'\\[/b]' is not a value for top_k" in err
