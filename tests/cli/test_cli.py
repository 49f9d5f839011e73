"""kvctl against a scripted daemon. `tests/process` tests it against a real one."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import click
import pytest
from msgspec.structs import replace

import kvd
from kvd.__main__ import main as kvd_main
from kvd.cli.app import app
from kvd.cli.console import format_message, print_message
from kvd.client.options import RANGES
from kvd.config.kv import KVText
from kvd.doctor import running
from kvd.doctor.scene import Scene
from kvd.host.home import Home
from kvd.host.listen import hold_lock
from protocol import errors
from protocol import messages as m
from protocol.framing import encode_line
from protocol.policy import ModelPolicy
from protocol.types import Alternative, Sampling, TokenLogprob, Usage
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


@pytest.mark.parametrize("order", ["before", "after"])
def test_common_options_work_before_and_after_the_command(kvctl, home: Home, order, monkeypatch):
    monkeypatch.setenv("KVD_HOME", "/nowhere")
    place = ["--socket", str(home.socket), "--json"]
    arguments = [*place, "status"] if order == "before" else ["status", *place]
    with stub_daemon(home.socket, well):
        code, out, _ = kvctl(*arguments, at_home=False)
    assert code == 0
    assert json.loads(out)["state"] == "serving"


def test_generate_prints_the_completion_and_nothing_else(kvctl, home: Home):
    with stub_daemon(home.socket, well) as requests:
        options = ("--max-tokens", "9", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "4")
        more = ("--min-p", "0.1", "--seed", "3", "--stop", "A", "--stop", "B")
        code, out, err = kvctl("generate", "demo", "Hi", *options, *more)
    assert (code, out, err) == (0, "Grüße all", "")
    assert requests == [
        m.Generate(
            id="1",
            model="demo",
            prompt="Hi",
            max_tokens=9,
            stop=["A", "B"],
            sampling=Sampling(temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, seed=3),
        )
    ]


def test_generate_sends_all_options(kvctl, home: Home):
    options = "--n 1 --repetition-penalty 1.2 --presence-penalty -0.5 --frequency-penalty 0.25"
    options += " --logit-bias 5=-100 --logit-bias 7=+.5 --stop-token 3 --stop-token 4"
    options += " --min-tokens 2 --ignore-eos --deadline 30 --priority -3 --prefix-salt mine"
    options += " --logprobs 0 --prompt-logprobs 2"
    with stub_daemon(home.socket, well) as requests:
        assert kvctl("generate", "demo", "Hi", *options.split())[0] == 0
    assert requests == [
        m.Generate(
            id="1",
            model="demo",
            prompt="Hi",
            stop_tokens=[3, 4],
            min_tokens=2,
            ignore_eos=True,
            deadline_s=30.0,
            priority=-3,
            prefix_salt="mine",
            logprobs=0,
            prompt_logprobs=2,
            sampling=Sampling(
                repetition_penalty=1.2,
                presence_penalty=-0.5,
                frequency_penalty=0.25,
                logit_bias={5: -100.0, 7: 0.5},
            ),
        )
    ]


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (["5"], "'5' is not ID=BIAS, such as 42=-5"),
        (["-1=3"], "is not ID=BIAS"),
        (["5=nan"], "is not ID=BIAS"),
        (["5=1", "5=2"], "'5=2' names a token twice"),
    ],
)
def test_a_wrong_logit_bias_is_a_usage_error(kvctl, bias, message):
    options = [word for one in bias for word in ("--logit-bias", one)]
    code, _, err = kvctl("generate", "demo", "Hi", *options)
    assert code == 2
    assert message in " ".join(err.replace("│", "").split())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--n=17", "n must be between 1 and 16, not 17"),
        ("--repetition-penalty=0", "repetition_penalty must be above 0 and at most 10, not 0.0"),
        ("--deadline=0", "deadline_s must be above 0 and at most 604800, not 0.0"),
        ("--logprobs=21", "logprobs must be between 0 and 20, not 21"),
    ],
)
def test_numbers_out_of_range_are_refused_with_the_range(kvctl, home: Home, option, message):
    with stub_daemon(home.socket, well) as requests:
        assert kvctl("generate", "demo", "Hi", option) == (6, "", f"error: {message}\n")
    assert requests == []


def logprob(token, text, top=()):
    return TokenLogprob(token, text, -0.6931472, top=list(top))


def several(request):
    number = request.id
    likely = [Alternative(66, "B", -0.6931472), Alternative(9, "\ufffd", -9999.0, [0xC3, 0x28])]
    yield m.PromptLogprobs(
        id=number, index=0, logprobs=[TokenLogprob(1, "<s>"), logprob(2, " Hi\n", likely)]
    )
    for choice, token in ((1, 66), (0, 65), (1, 67)):
        logprobs = [logprob(token, chr(token), likely)]
        yield m.Tokens(
            id=number,
            index=0,
            tokens=[token],
            text=chr(token),
            choice=choice,
            logprobs=logprobs,
        )
        if choice == 0:
            yield m.ChoiceFinished(id=number, choice=0, reason="stop")
    yield m.ChoiceFinished(id=number, choice=1, reason="length")
    yield m.Done(id=number, reason="length", usage=Usage(3, 3))


def test_several_choices_are_printed_one_after_the_other(kvctl, home: Home):
    with stub_daemon(home.socket, several):
        code, out, err = kvctl("generate", "demo", "Hi", "--n", "2")
    assert (code, err) == (0, "")
    text = "choice 0  stop, 1 token\nA\n\nchoice 1  length, 2 tokens\nBC\n"
    assert out.startswith(text)


def test_logprobs_are_printed_as_tables(kvctl, home: Home, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    with stub_daemon(home.socket, several):
        code, out, _ = kvctl("generate", "demo", "Hi", "--n", "2", "--logprobs", "2")
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert all(len(line) <= 60 for line in out.splitlines())
    for line in (
        "PROMPT ID LOGPROB PROB LIKELIEST",
        "'<s>' 1",
        r"' Hi\n' 2 -0.6931 50.0% 'B' 50.0% <C3 28> 0.0%",
        "CHOICE 0 ID LOGPROB PROB LIKELIEST",
        "'A' 65 -0.6931 50.0% 'B' 50.0% <C3 28> 0.0%",
        "CHOICE 1 ID LOGPROB PROB LIKELIEST",
    ):
        assert line in lines


def test_json_has_the_events_of_all_choices(kvctl, home: Home):
    with stub_daemon(home.socket, several):
        code, out, _ = kvctl("generate", "demo", "Hi", "--n", "2", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [event["event"] for event in events] == [
        *("prompt_logprobs", "tokens", "tokens", "choice_finished"),
        *("tokens", "choice_finished", "done"),
    ]
    assert events[1]["logprobs"][0]["top"][1] == {
        "token": 9,
        "text": "\ufffd",
        "logprob": -9999.0,
        "bytes": [195, 40],
    }


def test_text_before_an_error_is_printed(kvctl, home: Home):
    def answer(request):
        for event in several(request):
            if event.__class__ is m.ChoiceFinished and event.choice == 1:
                late = errors.DeadlineExceeded("its deadline passed")
                yield m.Error(id=request.id, error=late.info())
                return
            yield event

    with stub_daemon(home.socket, answer):
        code, out, err = kvctl("generate", "demo", "Hi", "--n", "2")
    assert (code, err) == (7, "error: its deadline passed\n")
    assert out.endswith("choice 1  incomplete, 2 tokens\nBC\n")


def test_generate_reads_the_prompt_from_stdin(kvctl, home: Home):
    with stub_daemon(home.socket, well) as requests:
        assert kvctl("generate", "demo", "-", stdin="line one\nline two\n")[0] == 0
        assert kvctl("tokenize", "demo", "-", stdin="a\n\n")[1] == "97\t'a'\n10\t'\\n'\n"
    assert requests[0].prompt == "line one\nline two"


def test_generate_prints_its_events_as_json_lines(kvctl, home: Home):
    with stub_daemon(home.socket, well):
        code, out, _ = kvctl("generate", "demo", "Hi", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [event["event"] for event in events] == ["accepted", "tokens", "tokens", "done"]


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


def test_load_sends_the_source_the_alias_and_the_scheme(kvctl, home: Home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with stub_daemon(home.socket, well) as requests:
        code, out, _ = kvctl("load", "./model", "--alias", "small", "--kv", "k8v4")
        assert code == 0
        assert "5.8 M parameters" in out
        assert json.loads(kvctl("load", "demo", "--json")[1])["name"] == "demo"
    assert requests[0].model == str(tmp_path / "model")
    assert (requests[0].alias, requests[0].kv.name) == ("small", "k8v4")
    assert (requests[1].model, requests[1].kv.name) == ("demo", "k8v8")


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explain", "demo", "--ctx", "64x"), "'64x' is not a number of tokens"),
        (("explain", "demo", "--ctx", "0"), "0 is not in the range 1<=x<=2147483647"),
        (("bench-kv", "--lengths", "1k,two"), "'two' is not a number of tokens"),
        (("explain", "demo", "--rows", "x"), "'x' is not a valid integer range"),
        (("explain", "demo", "--rows", "-1"), "-1 is not in the range 0<=x<=65536"),
        (("explain", "demo", "--rows", "99999999"), "is not in the range 0<=x<=65536"),
        (("status", "--interval", "nan"), "'nan' is not a valid number of seconds"),
        (("status", "--interval", "x"), "'x' is not a valid number of seconds"),
        (("status", "--interval", "0"), "0.0 is not in the range 0.1<=x<=31536000"),
        (("status", "--watch", "--interval", "inf"), "inf is not in the range 0.1<=x<=31536000"),
        (("logs", "-n", "1" + "0" * 30), "in the range 0<=x<=2147483647"),
        (("generate", "demo", "Hi", "--temperature", "warm"), "'warm' is not a valid float"),
    ],
)
def test_numbers_of_the_command_line_are_checked(kvctl, arguments, message):
    code, out, err = kvctl(*arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


def options_of(command: click.Command, path: str = "") -> Iterator[tuple[str, click.Parameter]]:
    context = click.Context(command, resilient_parsing=True)
    names = command.list_commands(context) if isinstance(command, click.Group) else ()
    for name in names:
        yield from options_of(command.get_command(context, name), f"{path} {name}")
    yield from ((f"{path} {option.opts[0]}", option) for option in command.params)


def test_every_number_of_the_command_line_is_bounded():
    """By the option itself, or because its value is checked as a field of the protocol."""
    checked = {*RANGES, "stop_tokens", *ModelPolicy.__struct_fields__, "idle_ttl"}
    checked |= {f"kv_{field}" for field in KVText.__struct_fields__}
    numeric = 0
    for path, option in options_of(app):
        if not isinstance(option.type, click.types.IntParamType | click.types.FloatParamType):
            continue
        numeric += 1
        if option.name in checked:
            continue
        highest = getattr(option.type, "max", None)
        assert highest is not None, f"{path} has no upper bound"
        assert highest < float("inf"), path
        if isinstance(option.type, click.types.FloatParamType):
            with pytest.raises(click.BadParameter):
                option.type.convert("nan", option, None)
    assert numeric > 20


def test_a_short_command_imports_neither_asyncio_nor_pydantic_nor_the_engine():
    program = (
        "import sys; sys.argv = ['kvctl', '--home', '/tmp/nowhere', 'status', '--json']\n"
        "from kvd.cli import main\n"
        "try: main()\n"
        "except SystemExit as ended: assert ended.code == 3, ended.code\n"
        "print([m for m in ('asyncio', 'pydantic', 'mlx', 'rich.live', 'actors', 'protocol.worker',"
        " 'kvd.cli.chat', 'kvd.config.config') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


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


def test_a_cancelled_completion_is_an_interrupt(kvctl, home: Home):
    def answer(request):
        if isinstance(request, m.Generate):
            yield m.Done(id=request.id, reason="cancelled", usage=Usage(1, 0))

    with stub_daemon(home.socket, answer):
        assert kvctl("generate", "demo", "Hi")[0] == 130


def test_every_command_has_help(kvctl):
    for command in ("status", "load", "unload", "generate", "chat", "drain", "shutdown"):
        code, out, _ = kvctl(command, "--help")
        assert code == 0
        assert "--home" in out
        assert "--json" in out


def test_kvctl_imports_neither_mlx_nor_the_daemon():
    code = (
        "import sys, kvd.cli;"
        "bad = {'mlx', 'mlx_lm', 'transformers', 'numpy', 'structlog', 'actors', 'kvd.worker'};"
        "sys.exit(', '.join(sorted(bad & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_status_of_the_stub_daemon_contains_the_model():
    assert daemon_status(MODEL).models == [MODEL]


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "10.5"])
def test_a_temperature_out_of_range_is_refused_with_the_range(kvctl, home: Home, value):
    with stub_daemon(home.socket, well) as requests:
        for command in (("generate", "demo", "Hi"), ("chat", "demo")):
            code, _, err = kvctl(*command, f"--temperature={value}")
            assert code == 6
            assert "temperature must be between 0 and 10" in err
    assert requests == []


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


def test_a_silent_daemon_is_reported_once(kvctl, home: Home, monkeypatch):
    reported = threading.Event()
    messages = []
    monkeypatch.setattr("kvd.client.exchange.QUICK_S", 0.05)
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


def test_a_daemon_that_still_runs_is_not_reported_as_stopped(kvctl, home: Home, monkeypatch):
    monkeypatch.setattr(sys.modules["kvd.cli.shutdown"], "_EXIT_TIMEOUT_S", 0.05)
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


def test_help_shows_flags_and_arguments_as_they_are_written(kvctl):
    pages = {name: kvctl(*name.split(), "--help")[1] for name in ("", "unload", "generate", "load")}
    for page in pages.values():
        assert "<bool>" not in page
        assert "{" not in page
    assert "unload [OPTIONS] MODEL" in pages["unload"]
    assert "generate [OPTIONS] MODEL PROMPT" in pages["generate"]


@pytest.mark.parametrize("arguments", [("--version",), ("version",)])
def test_kvd_prints_its_version(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["kvd", *arguments])
    with pytest.raises(SystemExit) as ended:
        kvd_main()
    assert (ended.value.code, capsys.readouterr().out) == (0, f"{kvd.__version__}\n")


@pytest.mark.parametrize("arguments", [("--help",), ("serve", "--help"), ("version", "--help")])
def test_help_of_kvd_shows_flags_as_they_are_written(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["kvd", *arguments])
    with pytest.raises(SystemExit):
        kvd_main()
    assert "<bool>" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("KVD_PORT", "70000", "70000 is no port; set 0 to 65535, or unset it"),
        ("KVD_PORT", "x", "x is no port"),
        ("KVD_BUDGET", "3", "3 B is less than the minimum of 64.0 MiB"),
    ],
)
def test_an_invalid_variable_of_kvd_is_named(monkeypatch, capsys, variable, text, message):
    monkeypatch.setenv(variable, text)
    monkeypatch.setattr(sys, "argv", ["kvd", "serve"])
    with pytest.raises(SystemExit) as ended:
        kvd_main()
    assert ended.value.code == 2
    error = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert variable in error
    assert message in error


@pytest.mark.parametrize(
    ("variable", "arguments", "port"),
    [
        ("tcp://10.96.0.7:11711", (), None),
        ("udp://10.96.0.7:11711", (), None),
        ("tcp://10.96.0.7:11711", ("--port", "8080"), 8080),
        ("8081", (), 8081),
    ],
)
def test_the_address_that_kubernetes_sets_as_the_port_is_ignored(
    monkeypatch, variable, arguments, port
):
    ports = []
    monkeypatch.setenv("KVD_PORT", variable)
    monkeypatch.setattr(kvd.__main__, "become", ports.append)
    monkeypatch.setattr(sys, "argv", ["kvd", "serve", *arguments])
    with pytest.raises(SystemExit) as ended:
        kvd_main()
    (options,) = ports
    found = options.default_port if options.port is None else options.port
    assert (ended.value.code, found) == (0, port)


@pytest.mark.parametrize("arguments", [("--no-http",), ("--port", "1"), ("--budget", "1GiB")])
def test_a_variable_that_is_not_used_is_not_read(monkeypatch, arguments):
    started = []
    monkeypatch.setenv("KVD_BUDGET" if "--budget" in arguments else "KVD_PORT", "70000")
    monkeypatch.setattr(kvd.__main__, "become", started.append)
    monkeypatch.setattr(sys, "argv", ["kvd", "serve", *arguments])
    with pytest.raises(SystemExit) as ended:
        kvd_main()
    assert (ended.value.code, len(started)) == (0, 1)


def test_an_address_as_the_option_port_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvd", "serve", "--port", "tcp://10.96.0.7:11711"])
    with pytest.raises(SystemExit) as ended:
        kvd_main()
    assert ended.value.code == 2
    assert "is not a valid integer" in " ".join(capsys.readouterr().err.replace("│", "").split())


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
        code, _, err = kvctl("load", "demo", "--priority", "101")
    policies = [request.policy for request in requests if isinstance(request, m.Load)]
    expected = ModelPolicy(pinned=True, priority=3, idle_ttl_s=60, max_context=4096)
    assert policies == [expected, None, ModelPolicy()]
    assert (code, "priority must be at most 100" in err) == (2, True)


STRANGE = (
    r"a\[/b]",
    "[/b]",
    r"\[a^2 + b^2\]",
    "\\",
    r"\\\[x]",
    "[bold]",
    "C:\\[1]\\",
    ":smile:",
    "{}{0}",
    "[",
)


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


def test_chat_continues_after_any_input(kvctl, home: Home):
    with stub_daemon(home.socket, well):
        lines = "\n".join(f"/{text.replace(' ', '_')}" for text in STRANGE)
        code, _, err = kvctl("chat", "demo", stdin=f"{lines}\n/set top_k \\[/b]\n/exit\n")
    assert code == 0
    for text in STRANGE:
        assert f"no command /{text.replace(' ', '_')}; /help" in err
    assert r"'\\[/b]' is not a value for top_k" in err


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
