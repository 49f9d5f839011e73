"""Grammars of calls accept what models write, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest
from tokenizers import AddedToken

from kvd.worker.answer import forms
from kvd.worker.grammar.answers import AnswerContext, AnswerGrammar, write_grammar
from kvd.worker.grammar.compiler import COMPILE_SECONDS, THREADS, Compiler
from kvd.worker.grammar.source import MAX_DEPTH
from kvd.worker.text.text import Text
from protocol.errors import InvalidRequest
from protocol.tools import ChatOptions, Grammar, Tool
from protocol.types import ChatMessage, Sampling
from protocol.worker import Submit
from tests.worker.text.tokenizers_zoo import CHATML, byte_level, wrap

NAMES = ["</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>",
         "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>"]  # fmt: skip
ADDED = [AddedToken(name, special=name.startswith(("[", "<|"))) for name in NAMES]
WEATHER = Tool(
    "weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
        "unknownKeyword": 7,
    },
)
TIME = Tool("time")


@pytest.fixture(scope="module")
def text() -> Text:
    return Text(wrap(byte_level(*ADDED), template=CHATML), vocab_size=600, context_length=512)


@pytest.fixture(scope="module")
def compiler(text: Text) -> Compiler:
    def vocabulary():
        found = text.vocabulary()
        special = found.special | {text._tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
        return type(found)(found.tokens, special, found.eos_ids, found.encode, found.canonical)

    return Compiler(vocabulary)


SPECIAL = ["<think>", *NAMES]


def context(text: Text, form, *, end: str = "", reasoning=None) -> AnswerContext:
    ids = {name: text._tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    found = forms.AnswerForms(reasoning, None if form is forms.HARMONY else form,
                              form if form is forms.HARMONY else None)  # fmt: skip
    return AnswerContext(found.with_tokens(ids.get), ids, end)


def accepts(text: Text, compiler: Compiler, grammar, answer: str) -> bool:
    compilation = compiler.start(grammar)
    assert compilation.done.wait(10)
    matcher = compiler.matcher(compilation)
    tokens = text._tokenizer.encode(answer, add_special_tokens=False)
    for token in tokens:
        if not matcher.grammar.consume_token(token):
            return False
    return bool(matcher.grammar.is_accepting())


def asked(choice: str = "required", *, grammar: Grammar | None = None, **more) -> Submit:
    chat = ChatOptions(tools=[WEATHER, TIME], tool_choice=choice, **more)
    messages = [ChatMessage("user", "hi")]
    sampling = Sampling(seed=0)
    return Submit(rid="r", messages=messages, sampling=sampling, chat=chat, grammar=grammar)


QWEN_TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
QWEN_CITY = '<tool_call>\n{"name":"weather","arguments":{"city":"x","days":3}}\n</tool_call>'
CODER = (
    '<tool_call>\n<function=weather>\n<parameter=city>\nany "text"\n{ here\n</parameter>\n'
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
LIST = '[TOOL_CALLS][{"name": "time", "arguments": {}}, {"name": "time", "arguments": {}}]'
HARMONY = (
    "<|channel|>analysis<|message|>so be it<|end|><|start|>assistant<|channel|>commentary"
    ' to=functions.weather <|constrain|>json<|message|>{"city": "x"}'
)
RIGHT = {
    "qwen": (forms.QWEN, QWEN_CITY),
    "qwen two": (forms.QWEN, f"{QWEN_TIME}\n{QWEN_CITY}"),
    "coder": (forms.QWEN_CODER, CODER),
    "mistral": (forms.MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "x"}'),
    "list": (forms.MISTRAL_LIST, LIST),
    "llama": (forms.LLAMA, '{"name": "weather", "parameters": {"city": "x"}}'),
    "harmony": (forms.HARMONY, HARMONY),
}


@pytest.mark.parametrize("choice", ["required", "auto", "name:weather"])
@pytest.mark.parametrize("case", RIGHT)
def test_calls_in_the_form_of_the_model(text: Text, compiler: Compiler, case: str, choice) -> None:
    form, answer = RIGHT[case]
    grammar = write_grammar(asked(choice), context(text, form), canonical=True)

    named_other = choice.startswith("name:") and '"time"' in answer
    assert accepts(text, compiler, grammar, answer) is not named_other
    wrong = answer.replace("city", "town").replace('"time"', '"date"')
    assert not accepts(text, compiler, grammar, wrong)


@pytest.mark.parametrize(
    ("form", "prose"),
    [
        (forms.QWEN, "It is warm. </tool call>"),
        (forms.LLAMA, "It is { warm"),
        (forms.HARMONY, "<|channel|>final<|message|>It is warm."),
    ],
)
def test_text_is_free_until_a_call_begins(text: Text, compiler: Compiler, form, prose) -> None:
    where = context(text, form)

    assert accepts(text, compiler, write_grammar(asked("auto"), where, canonical=True), prose)
    assert not accepts(
        text, compiler, write_grammar(asked("required"), where, canonical=True), prose
    )


def test_strings_in_xml_forms_are_not_json(text: Text, compiler: Compiler) -> None:
    """Quotes, braces and line ends of a file's text need no escapes."""
    content = 'def f(x):\n\treturn {"a": "b"}\n' * 3
    answer = (f"<tool_call>\n<function=weather>\n<parameter=city>\n{content}\n</parameter>\n"
              "</function>\n</tool_call>")  # fmt: skip
    grammar = write_grammar(asked(), context(text, forms.QWEN_CODER), canonical=True)

    assert accepts(text, compiler, grammar, answer)
    assert not accepts(text, compiler, grammar, answer.replace("<parameter=city>", "<parameter=x>"))


def test_one_call_without_parallel_calls(text: Text, compiler: Compiler) -> None:
    form, two = RIGHT["qwen two"]
    request = asked(parallel_tool_calls=False)
    grammar = write_grammar(request, context(text, form), canonical=True)

    assert not accepts(text, compiler, grammar, two)
    assert accepts(text, compiler, grammar, two[: two.index("</tool_call>") + 12])


@pytest.mark.parametrize("opened", [True, False])
def test_the_grammar_begins_after_the_reasoning(text: Text, compiler: Compiler, opened) -> None:
    request = asked("none", grammar=Grammar("json_object"))
    end = "<|im_start|>assistant\n<think>\n" if opened else "<|im_start|>assistant\n"
    where = context(text, None, end=end, reasoning=forms.THINK)
    grammar = write_grammar(request, where, canonical=True)
    begin = "" if opened else "<think>"

    assert accepts(text, compiler, grammar, begin + 'so {"b"\n</think>\n\n{"a": 1}')
    assert not accepts(text, compiler, grammar, begin + 'so {"b"\n</think>\n\nno')
    assert not accepts(text, compiler, grammar, begin + 'so\n</think>.\n\n{"a": 1}')
    assert accepts(text, compiler, grammar, '{"a": 1}') is not opened


def test_no_reasoning_begins_where_it_is_off(text: Text, compiler: Compiler) -> None:
    request = asked("none", grammar=Grammar("json_object"))
    where = replace(context(text, None, reasoning=forms.THINK), may_reason=False)
    grammar = write_grammar(request, where, canonical=True)

    assert accepts(text, compiler, grammar, '{"a": 1}')
    assert not accepts(text, compiler, grammar, '<think>so</think>{"a": 1}')


def test_a_tool_that_is_too_deep_only_as_a_whole_ends_no_thread(
    text: Text, compiler: Compiler
) -> None:
    """In XML calls each property has a grammar of its own, which is a level less deep."""
    deep: dict = {"type": "integer"}
    for _ in range(MAX_DEPTH - 2):
        deep = {"type": "array", "items": deep}
    impossible = {"type": "integer", "minimum": 5, "maximum": 3}
    for number in range(THREADS + 1):
        properties = {"deep": deep, f"p{number}": impossible}
        tool = Tool("call", parameters={"properties": properties, "required": list(properties)})
        request = msgspec.structs.replace(
            asked(), chat=ChatOptions(tools=[tool], tool_choice="required")
        )
        grammar = write_grammar(request, context(text, forms.QWEN_CODER), canonical=False)
        with pytest.raises(InvalidRequest, match="nested more than"):
            list(grammar.parts())
        compilation = compiler.start(grammar)
        assert compilation.done.wait(5)
        with pytest.raises(InvalidRequest, match="Unsatisfiable"):
            compiler.matcher(compilation)


def test_the_search_for_a_tool_with_an_error_ends_after_the_time_of_a_compilation(
    text: Text,
) -> None:
    """The request got its error by then, and other grammars wait for the thread."""
    now, searched = [0.0], []

    def parts():
        for number in range(100):
            searched.append(number)
            now[0] += COMPILE_SECONDS / 4
            yield json.dumps({"grammars": [{"lark_grammar": f"start: /{number}/"}]})

    compiler = Compiler(text.vocabulary, lambda: now[0])
    compilation = compiler.start(AnswerGrammar("{}", parts=parts))
    assert compilation.done.wait(5)
    assert searched == [0, 1, 2, 3]
