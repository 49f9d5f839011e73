"""Requests with grammars in the engine, alone and together with others."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator

import pytest

from kvd.worker.answer.forms import QWEN, AnswerForms
from kvd.worker.core.out_of_memory import CALM_STEPS
from kvd.worker.core.submissions import WAIT_SECONDS
from kvd.worker.grammar import compiler as compiler_module
from kvd.worker.grammar.answers import AnswerGrammar
from kvd.worker.grammar.compiler import COMPILE_SECONDS, MAX_COMPILING, THREADS, Compiler
from kvd.worker.process.shortage import TRIES
from kvd.worker.text.splitting import Splitting
from protocol.errors import InvalidRequest
from protocol.resume import ChoiceProgress
from protocol.tools import ChatOptions, Grammar, Tool
from protocol.types import ChatAbilities, ChatMessage, Sampling
from protocol.worker import (
    ChoiceFinished,
    MemoryRequested,
    Report,
    RowFailed,
    RowFinished,
    RowNote,
    RowTokens,
    Submit,
)
from tests.worker.core.driver import Driver, Outcome
from tests.worker.core.faults import LATE, UNABLE, memory_runs_out
from tests.worker.core.prompts import prompt_of

pytestmark = pytest.mark.mlx

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
PERSON = Grammar("json_schema", json.dumps(SCHEMA))
DIGITS = Grammar("regex", "[0-9]{8}")
WARM = Sampling(temperature=1.0, seed=3)
WORDS = "To open a file, call open() and read it. To close it,"


def run(driver: Driver) -> list[Report]:
    """Step until no work is left, and return all reports. Memory requests are answered."""
    reports = list[Report]()
    while driver.engine.has_work:
        found = driver.engine.step()
        driver.take([one for one in found if isinstance(one, MemoryRequested)])
        reports += found
    return reports


def check(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "age", "kind"]
    assert len(value["name"]) <= 12
    assert 0 <= value["age"] <= 150
    assert value["kind"] in {"cat", "dog"}


@pytest.mark.parametrize("sampling", [Sampling(seed=1), WARM])
def test_answers_match_their_schema(demo: Driver, sampling: Sampling) -> None:
    outcome = demo.alone(WORDS, sampling, grammar=PERSON, max_tokens=300)

    assert outcome.reason == "stop"
    check(outcome.text)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (DIGITS, r"[0-9]{8}"),
        (Grammar("regex", "(ab|cd){1,9}x"), r"(ab|cd){1,9}x"),
        (Grammar("lark", 'start: "<" NAME ">"\nNAME: /[a-z]{2,5}/'), r"<[a-z]{2,5}>"),
        (Grammar("regex", "[äöü€]{3}"), r"[äöü€]{3}"),
    ],
)
def test_answers_match_regular_expressions_and_lark(demo: Driver, grammar, pattern) -> None:
    outcome = demo.alone(WORDS, Sampling(temperature=1.5, seed=5), grammar=grammar, max_tokens=60)

    assert outcome.reason == "stop"
    assert re.fullmatch(pattern, outcome.text)


def test_json_object_is_an_object(demo: Driver) -> None:
    outcome = demo.alone(WORDS, WARM, grammar=Grammar("json_object"), max_tokens=600)

    if outcome.reason == "stop":
        assert isinstance(json.loads(outcome.text), dict)
    else:
        assert outcome.text.lstrip()[:1] == "{"


def test_a_complete_grammar_ends_the_answer_whatever_else_is_set(demo: Driver) -> None:
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 40}, {"stop_tokens": [5]}):
        outcome = demo.alone(WORDS, WARM, grammar=DIGITS, max_tokens=60, **more)

        assert re.fullmatch("[0-9]{8}", outcome.text), more
        assert outcome.reason == "stop"


def test_a_grammar_that_is_complete_with_the_last_token_stops(demo: Driver) -> None:
    whole = demo.alone(WORDS, WARM, grammar=DIGITS, max_tokens=60)
    size = len(whole.tokens)

    assert demo.alone(WORDS, WARM, grammar=DIGITS, max_tokens=size).reason == "stop"
    short = demo.alone(WORDS, WARM, grammar=DIGITS, max_tokens=size - 1)
    assert short.reason == "length"
    assert short.tokens == whole.tokens[: size - 1]


def test_min_tokens_delays_the_end_of_a_grammar_that_can_continue(demo: Driver) -> None:
    grammar = Grammar("regex", "[a-z ]{0,400}")
    for minimum in (0, 20):
        outcome = demo.alone(WORDS, WARM, grammar=grammar, min_tokens=minimum, max_tokens=50)

        assert len(outcome.tokens) >= minimum
        assert re.fullmatch("[a-z ]*", outcome.text)


def test_stop_texts_end_an_answer_within_its_grammar(demo: Driver) -> None:
    outcome = demo.alone(WORDS, WARM, grammar=PERSON, stop=['"age"'], max_tokens=300)

    assert outcome.reason == "stop"
    assert outcome.text.rstrip().endswith(",")


def test_an_answer_may_be_empty(demo: Driver) -> None:
    outcome = demo.alone(WORDS, WARM, grammar=Grammar("regex", "(x{3}){0}"), max_tokens=9)

    assert (outcome.text, outcome.reason, outcome.tokens) == ("", "stop", [])


def test_logprobs_are_the_models_own(demo: Driver) -> None:
    """The mask changes what is drawn, not how likely the model found it."""
    tokens = demo.alone(WORDS, WARM, grammar=DIGITS, max_tokens=1, logprobs=3).logprobs
    free = demo.alone(WORDS, Sampling(seed=0), max_tokens=1, logprobs=3).logprobs

    assert tokens[0].top == free[0].top
    assert tokens[0].logprob < 0


def mixed(driver: Driver) -> None:
    driver.submit("free", WORDS, WARM, max_tokens=60, ignore_eos=True, logprobs=1)
    driver.submit("person", WORDS, WARM, grammar=PERSON, max_tokens=200)
    driver.submit("digits", prompt_of(70, 2), WARM, grammar=DIGITS, max_tokens=60, n=3)
    driver.submit("greedy", prompt_of(300, 1), max_tokens=60)


def test_rows_with_and_without_grammars_share_a_batch(demo: Driver) -> None:
    mixed(demo)
    demo.run()
    together = dict(demo.outcomes)

    check(together["person"].text)
    for others in together["digits"].others.values():
        assert re.fullmatch("[0-9]{8}", others.text)
    assert demo.engine._batch.max_rows >= 6
    alone = demo.alone(WORDS, WARM, max_tokens=60, ignore_eos=True, logprobs=1)
    assert together["free"] == alone
    assert together["person"] == demo.alone(WORDS, WARM, grammar=PERSON, max_tokens=200)


def test_preempted_rows_continue_in_their_grammar(demo: Driver) -> None:
    wanted = demo.alone(WORDS, WARM, grammar=PERSON, max_tokens=200, n=2)
    for after in (1, 5, 9):
        for lost in (False, True):
            demo.submit("p", WORDS, WARM, grammar=PERSON, max_tokens=200, n=2)
            demo.run(until=lambda count=after: len(demo.outcomes["p"].tokens) >= count)
            demo.preempt("p")
            if lost:
                demo.engine._preemption.rows.move_out(demo.engine._batch.requests["p"], None)
            demo.requeue("p")
            demo.run()
            assert demo.outcomes.pop("p") == wanted


@pytest.mark.parametrize(("fault", "tries"), [(UNABLE, TRIES + 1), (LATE, 1)])
def test_failed_steps_do_not_change_answers(demo: Driver, fault: str, tries: int) -> None:
    """The tokens of such a step are drawn again, although masks were computed with them."""
    mixed(demo)
    demo.run()
    wanted = demo.outcomes
    for after, evaluation in ((1, 0), (3, 1), (4, 0), (10, 0), (11, 2)):
        demo.outcomes = {}
        demo.engine._out_of_memory.calm_steps = CALM_STEPS
        mixed(demo)
        demo.run(until=lambda count=after: len(demo.outcomes["person"].tokens) >= count)
        failing = range(evaluation + 1, evaluation + 1 + tries)
        with memory_runs_out(failing.__contains__, fault) as seen:
            demo.run()
        assert seen.failed == tries
        assert demo.outcomes == wanted, (after, evaluation)


@pytest.mark.parametrize("grammar", [PERSON, DIGITS])
def test_a_replay_continues_at_any_token(demo: Driver, grammar: Grammar) -> None:
    """As after the death of a worker: the tokens and the text are those of the first run."""
    sampling = Sampling(temperature=1.2, seed=11)
    wanted = demo.alone(WORDS, sampling, grammar=grammar, max_tokens=200)
    for count in range(len(wanted.tokens) + 1):
        known = wanted.tokens[:count]
        text = ""
        sent = _text_of(demo, known)
        resume = [ChoiceProgress(tokens=known, text_bytes=len(sent.encode()))]
        reports = []
        demo.engine.submit(
            Submit(
                rid=f"again{count}",
                prompt=WORDS,
                sampling=sampling,
                grammar=grammar,
                max_tokens=200,
                resume=resume,
            )
        )
        reports += run(demo)
        tokens = [report for report in reports if isinstance(report, RowTokens)]
        text = "".join(report.text for report in tokens)
        assert known + [token for report in tokens for token in report.tokens] == wanted.tokens
        assert sent + text == wanted.text


def _text_of(demo: Driver, tokens: list[int]) -> str:
    text = demo.engine._text
    stream = text.stream(
        Submit(rid="x", prompt=WORDS, sampling=WARM),
        text.encode(Submit(rid="x", prompt=WORDS, sampling=WARM)),
    )
    return "".join(stream.push(token) for token in tokens)


@pytest.fixture
def caller(demo: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """The engine of a model that writes calls as Qwen does; its tokens know no markers."""
    text = demo.engine._text
    before = text.split, text.abilities
    # The vocabulary depends on the markers, so an earlier test's is of no use.
    monkeypatch.setattr(demo.engine._submissions, "_compiler", Compiler(text.vocabulary))
    text.split = Splitting(text._tokenizer, AnswerForms(None, QWEN))
    text.abilities = ChatAbilities(tools="json in <tool_call>")
    try:
        yield demo
    finally:
        text.split, text.abilities = before


@pytest.mark.parametrize("choice", ["required", "name:look_up"])
def test_a_required_call_is_made_and_parses(caller: Driver, choice: str) -> None:
    number = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {"type": "object", "properties": {"id": number}, "required": ["id"]}
    tools = [Tool("look_up", parameters={**schema, "additionalProperties": False})]
    chat = ChatOptions(tools=tools, tool_choice=choice, parallel_tool_calls=False)
    messages = [ChatMessage("user", "Look up 7.")]
    asked = Submit(rid="c", messages=messages, sampling=WARM, chat=chat, max_tokens=400)
    caller.engine.submit(asked)
    reports = run(caller)

    tokens = [report for report in reports if isinstance(report, RowTokens)]
    (part,) = [part for report in tokens for part in report.parts]
    assert (part.kind, part.name, part.at) == ("call", "look_up", 0)
    value = json.loads("".join(report.text for report in tokens))
    assert 0 <= value["id"] <= 99


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("json_schema", "{"), "not JSON"),
        (Grammar("json_schema", "[]"), "type list"),
        (Grammar("json_schema", '{"$ref": "#/nowhere"}'), "nowhere"),
        (Grammar("json_schema", '{"$ref": "http://127.0.0.1:1/x"}'), "127.0.0.1"),
        (Grammar("json_schema", '{"not": {}}'), "not"),
        (Grammar("json_schema", '{"type":"string","minLength":5,"maxLength":3}'), "minLength"),
        (Grammar("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000), "JSON|deep"),
        (Grammar("json_schema", ""), "empty"),
        (Grammar("regex", "("), "regex"),
        (Grammar("regex", "x" * (1 << 20)), "1048576 characters"),
        (Grammar("lark", "start: //" + "x" * (1 << 17)), "characters"),
        (Grammar("regex", "(" * 5000 + ")" * 5000), "regex|nest"),
        (Grammar("lark", "start: nothing"), "nothing"),
        (Grammar("lark", "start: start"), "text|NoExt"),
        (Grammar("lark", "start: " + "(" * 20000 + '"a"' + ")" * 20000), "nested"),
    ],
)
def test_grammars_that_cannot_be_used_are_refused(demo: Driver, grammar, reason: str) -> None:
    try:
        demo.submit("bad", WORDS, grammar=grammar)
    except InvalidRequest as error:
        info = error.info()
    else:
        demo.run()
        info = demo.outcomes["bad"].error
    assert info is not None
    assert info.code == "invalid_request"
    assert info.detail["field"] == "grammar"
    assert re.search(reason, info.message)


def test_a_request_that_is_too_large_is_refused_once_its_grammar_is_compiled(
    demo: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests go on: the refusal must not end the step."""
    properties = {f"key{number}": {"type": "integer"} for number in range(300)}
    slow = Grammar("json_schema", json.dumps({"type": "object", "properties": properties}))
    demo.submit("other", WORDS, max_tokens=4)
    demo.submit("large", WORDS, grammar=slow, max_tokens=4)
    assert demo.engine._submissions.waiting
    monkeypatch.setattr(demo.engine._admission, "_too_large", lambda _pages, _rows: True)
    demo.run(until=lambda: demo.outcomes["large"].over)
    monkeypatch.undo()
    demo.run()

    assert demo.outcomes["large"].error is not None
    assert demo.outcomes["large"].error.code == "insufficient_memory"
    assert demo.outcomes["other"].reason == "length"


@pytest.fixture
def waiting(demo: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The engine of a worker that just started: the first grammar waits for the vocabulary."""
    ready = threading.Event()
    text = demo.engine._text

    def vocabulary():
        ready.wait(30)
        return text.vocabulary()

    monkeypatch.setattr(demo.engine._submissions, "_compiler", Compiler(vocabulary))
    yield ready
    ready.set()


def test_without_a_thread_a_grammar_fails_only_its_request(
    demo: Driver, waiting: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    waiting.set()
    with monkeypatch.context() as patch:
        patch.setattr(compiler_module._thread, "start_new_thread", fail)
        for number in range(THREADS + 1):
            refused = demo.alone(WORDS, grammar=Grammar("regex", f"[a-f]{{{number + 1}}}"))
            assert refused.error is not None
            assert refused.error.code == "overloaded"
    assert demo.alone(WORDS, grammar=DIGITS, max_tokens=30).text.isdigit()


def test_a_replay_is_not_refused_for_its_grammar(
    demo: Driver, waiting: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens were sent, so a new worker that compiles many grammars at once goes on with it."""
    monkeypatch.setattr(compiler_module, "MAX_COMPILING", 4)
    count = 7
    for number in range(count):
        digits = Grammar("regex", f"[0-9]{{{number + 1}}}")
        resume = [ChoiceProgress()]
        demo.submit(f"r{number}", WORDS, grammar=digits, resume=resume, max_tokens=30)
    demo.submit("new", WORDS, grammar=Grammar("regex", "[a-c]"), max_tokens=30)
    while not demo.outcomes["new"].over:
        demo.step()
    refused = demo.outcomes.pop("new").error
    assert refused is not None
    assert refused.code == "overloaded"
    waiting.set()
    demo.run()

    for number in range(count):
        assert re.fullmatch(f"[0-9]{{{number + 1}}}", demo.outcomes[f"r{number}"].text)


def test_a_replay_that_is_cancelled_before_its_grammar_is_compiled_keeps_what_was_sent(
    demo: Driver, waiting: threading.Event
) -> None:
    resume = [ChoiceProgress([5, 6], 2, "length"), ChoiceProgress([7], 1)]
    demo.submit("c", WORDS, grammar=DIGITS, n=2, resume=resume, max_tokens=2)
    demo.engine.cancel("c")
    ends = [one for one in demo.engine.step() if isinstance(one, ChoiceFinished | RowFinished)]

    assert [type(one) for one in ends] == [ChoiceFinished, RowFinished]
    assert (ends[0].choice, ends[0].reason) == (1, "cancelled")
    assert ends[1].usage.completion_tokens == 3


def test_a_grammar_that_took_too_long_once_is_used_once_it_is_compiled(
    demo: Driver, waiting: threading.Event
) -> None:
    now = [0.0]
    compiler = demo.engine._submissions._compiler
    compiler._clock = lambda: now[0]
    grammar = AnswerGrammar(json.dumps({"grammars": [{"lark_grammar": "start: /[0-9]/"}]}))
    slow = compiler.start(grammar)
    while not slow.begun:
        waiting.wait(0.001)
    now[0] = COMPILE_SECONDS
    assert compiler.is_over(slow)
    with pytest.raises(InvalidRequest, match="not compiled within"):
        compiler.matcher(slow)
    waiting.set()
    while compiler._threads:  # a thread sets the result after the error
        waiting.wait(0.001)

    assert compiler.matcher(compiler.start(grammar)) is not None


TOOLS = ChatOptions(tools=[Tool("look_up")])


def calling(caller: Driver, rid: str, **more) -> tuple[str, list[str], str]:
    """Return text, notes and reason of an answer that may call tools."""
    caller.engine.submit(
        Submit(rid=rid, messages=[ChatMessage("user", "Hi")], sampling=WARM, chat=TOOLS, **more)
    )
    reports = run(caller)
    notes = [report.reason for report in reports if isinstance(report, RowNote)]
    text = "".join(report.text for report in reports if isinstance(report, RowTokens))
    ends = [one for one in reports if isinstance(one, RowFinished | RowFailed)]
    return text, notes, getattr(ends[0], "reason", "failed")


def test_an_answer_that_may_call_tools_runs_without_a_grammar_if_many_are_compiled(
    caller: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = threading.Event()

    def vocabulary():
        ready.wait(30)
        return caller.engine._text.vocabulary()

    compiler = Compiler(vocabulary)
    monkeypatch.setattr(caller.engine._submissions, "_compiler", compiler)
    for number in range(MAX_COMPILING):
        text = json.dumps({"grammars": [{"lark_grammar": f"start: /{number}/"}]})
        compiler.start(AnswerGrammar(text))
    try:
        _, notes, reason = calling(caller, "auto", max_tokens=4)
    finally:
        ready.set()

    assert reason == "length"
    assert len(notes) == 1
    assert "grammars are being compiled" in notes[0]


def test_an_answer_that_may_call_tools_goes_on_if_its_grammar_cannot_be_followed(
    caller: Driver,
) -> None:
    """As in a replay of an answer that ran without it."""
    known = caller.engine._text._tokenize('<tool_call>\n{"name": "other"', "prompt")
    text, notes, reason = calling(
        caller, "again", max_tokens=len(known) + 4, resume=[ChoiceProgress(tokens=known)]
    )

    assert reason == "length"
    assert "no longer kept valid" in notes[0]
    assert text


def test_a_custom_tool_whose_grammar_cannot_be_compiled_keeps_the_frame(caller: Driver) -> None:
    unknown = Tool("patch", grammar=Grammar("regex", "a(?=b)b"))
    chat = ChatOptions(tools=[unknown], tool_choice="required", parallel_tool_calls=False)
    asked = Submit(
        rid="f", messages=[ChatMessage("user", "Hi")], sampling=WARM, chat=chat, max_tokens=60
    )
    caller.engine.submit(asked)
    reports = run(caller)

    (note,) = [report.reason for report in reports if isinstance(report, RowNote)]
    assert "grammars of custom tools are not enforced" in note
    parts = [part for one in reports if isinstance(one, RowTokens) for part in one.parts]
    assert [part.name for part in parts] == ["patch"]


@pytest.mark.parametrize("choice", ["required", "name:bad", "auto"])
def test_a_tool_whose_schema_cannot_be_compiled_is_named(caller: Driver, choice: str) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
    tools = [Tool("good"), Tool("bad", parameters=bad), Tool("last")]
    chat = ChatOptions(tools=tools, tool_choice=choice)
    messages = [ChatMessage("user", "Look up 7.")]
    caller.outcomes["c"] = Outcome()
    caller.engine.submit(Submit(rid="c", messages=messages, sampling=WARM, chat=chat, max_tokens=8))
    notes = []
    while caller.engine.has_work:
        reports = caller.engine.step()
        notes += [one.reason for one in reports if isinstance(one, RowNote)]
        caller.take(reports)

    error = caller.outcomes["c"].error
    if choice == "auto":
        assert error is None
        assert "chat.tools[1].parameters" in notes[0]
    else:
        assert error.detail["field"] == "chat.tools[1].parameters"
        assert error.message.startswith("chat.tools[1].parameters: the grammar cannot be used")


def test_rows_never_wait_for_a_grammar_that_is_being_compiled(
    demo: Driver, waiting: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at a submission nor in a step; only an engine without another step does."""
    waits: list[float] = []

    def wait(_event: threading.Event, timeout: float | None = None) -> bool:
        waits.extend([timeout] if timeout else [])  # starting a thread waits without one
        return False

    monkeypatch.setattr(threading.Event, "wait", wait)
    monkeypatch.setattr(Compiler, "_compile", lambda *_: None)
    demo.submit("other", WORDS, max_tokens=12)
    demo.run(until=lambda: len(demo.outcomes["other"].tokens) > 2)
    waits.clear()
    for number in range(3):
        demo.submit(f"r{number}", WORDS, grammar=DIGITS, max_tokens=30)
    demo.run(until=lambda: demo.outcomes["other"].over)
    assert not waits

    demo.run(until=lambda: len(waits) >= 3, steps=10)  # a step may still be in flight
    for number in range(3):
        demo.engine.cancel(f"r{number}")
    demo.run()


def test_a_queue_that_cannot_move_does_not_spin_while_a_grammar_is_compiled(
    demo: Driver, waiting: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = demo.engine._scheduler._max_rows
    demo.submit("queued", WORDS, max_tokens=2)
    demo.submit("compiles", WORDS, grammar=DIGITS, max_tokens=30)
    monkeypatch.setattr(demo.engine._scheduler, "_max_rows", 0)
    start = time.monotonic()
    for _ in range(20):
        demo.step()

    assert time.monotonic() - start >= 20 * WAIT_SECONDS
    monkeypatch.setattr(demo.engine._scheduler, "_max_rows", rows)
    waiting.set()
    demo.run()


def test_the_tokenizer_is_built_before_the_first_grammar(demo: Driver) -> None:
    """Building it takes 0.8 s of Python's lock for 150,000 tokens; rows would wait for it."""
    calls: list[str] = []

    def vocabulary():
        calls.append(threading.current_thread().name)
        return demo.engine._text.vocabulary()

    compiler = Compiler(vocabulary)
    with compiler.preparing():
        pass
    grammar = AnswerGrammar(json.dumps({"grammars": [{"lark_grammar": "start: /[0-9]/"}]}))
    assert compiler.start(grammar).done.wait(10)

    assert calls == ["tokenizer"]


def test_an_error_of_the_vocabulary_is_left_to_the_first_grammar() -> None:
    def vocabulary():
        raise ZeroDivisionError

    compiler = Compiler(vocabulary)
    with compiler.preparing():
        pass
    compilation = compiler.start(AnswerGrammar("{}"))
    assert compilation.done.wait(10)
    with pytest.raises(InvalidRequest, match="cannot be used"):
        compiler.matcher(compilation)


def test_grammars_beyond_the_threads_are_queued(demo: Driver, waiting: threading.Event) -> None:
    """Clients send many requests at once, each with a schema of its own."""
    for number in range(THREADS + 4):
        grammar = Grammar("regex", f"[a-z]{{{number + 1}}}")
        demo.submit(f"r{number}", WORDS, grammar=grammar, max_tokens=30)
    waiting.set()
    demo.run()

    for number in range(THREADS + 4):
        assert re.fullmatch(f"[a-z]{{{number + 1}}}", demo.outcomes[f"r{number}"].text)


def test_grammars_that_hang_delay_others_for_a_bounded_time() -> None:
    now, ready = [0.0], threading.Event()

    def vocabulary():
        ready.wait(30)
        raise ZeroDivisionError

    compiler = Compiler(vocabulary, lambda: now[0])
    texts = [json.dumps({"grammars": [{"lark_grammar": f"start: /{n}/"}]}) for n in range(6)]
    begun = [compiler.start(AnswerGrammar(text)) for text in texts]
    while sum(one.begun for one in begun) < THREADS:
        ready.wait(0.001)
    now[0] = COMPILE_SECONDS
    assert all(compiler.is_over(one) for one in begun)
    codes = [one.error.info().code for one in begun]
    ready.set()

    assert codes == ["invalid_request"] * THREADS + ["overloaded"] * 2
