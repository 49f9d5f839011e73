"""`kvctl generate`: options, choices, log probabilities and output."""

from __future__ import annotations

import json

import pytest

from kvd.host.home import Home
from protocol import errors
from protocol import messages as m
from protocol.types import Alternative, Sampling, TokenLogprob, Usage
from tests.cli.stub import stub_daemon, well


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


def test_a_cancelled_completion_is_an_interrupt(kvctl, home: Home):
    def answer(request):
        if isinstance(request, m.Generate):
            yield m.Done(id=request.id, reason="cancelled", usage=Usage(1, 0))

    with stub_daemon(home.socket, answer):
        assert kvctl("generate", "demo", "Hi")[0] == 130


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "10.5"])
def test_a_temperature_out_of_range_is_refused_with_the_range(kvctl, home: Home, value):
    with stub_daemon(home.socket, well) as requests:
        for command in (("generate", "demo", "Hi"), ("chat", "demo")):
            code, _, err = kvctl(*command, f"--temperature={value}")
            assert code == 6
            assert "temperature must be between 0 and 10" in err
    assert requests == []
