"""Texts of custom tools match the tool's grammar in every form of calls.

Tokens are drawn at random among those that the grammar allows, as a model with random weights
would; lark's parser judges the text.
"""

from __future__ import annotations

import json
import random

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken

from kvd.worker.answer import forms
from kvd.worker.answer.forms import AnswerForms, CallForm, HarmonyForm
from kvd.worker.answer.written import write_calls
from kvd.worker.grammar.answers import AnswerGrammar, write_grammar
from kvd.worker.grammar.compiler import Compiler
from kvd.worker.text.splitting import Splitting
from kvd.worker.text.text import Text
from protocol.tools import ChatOptions, Grammar, Tool, ToolCall
from protocol.types import ChatMessage, Sampling
from protocol.worker import Submit
from tests.worker.grammar.patches import APPLY, PATCH, SAMPLE, matches
from tests.worker.text.tokenizers_zoo import CHATML, byte_level, wrap

FORMS: dict[str, CallForm | HarmonyForm] = {
    "qwen": forms.QWEN,
    "qwen coder": forms.QWEN_CODER,
    "glm": forms.GLM,
    "minimax": forms.MINIMAX,
    "mistral": forms.MISTRAL,
    "mistral list": forms.MISTRAL_LIST,
    "kimi": forms.KIMI,
    "deepseek": forms.DEEPSEEK,
    "deepseek r1": forms.DEEPSEEK_R1,
    "dsml": forms.DEEPSEEK_V32,
    "seed": forms.SEED,
    "muse": forms.MUSE,
    "cohere": forms.COHERE,
    "minimax m1": forms.MINIMAX_M1,
    "functionary": forms.FUNCTIONARY,
    "llama": forms.LLAMA,
    "harmony": forms.HARMONY,
}
TWO_KEYS = {
    "type": "object",
    "properties": {"zone": {"type": "string"}, "at": {"type": "integer"}},
    "required": ["zone", "at"],
}
OTHER = Tool("exec", parameters={"type": "object", "properties": {"cmd": {"type": "string"}}})


def model(form: CallForm | HarmonyForm) -> Text:
    """Return the text of a model whose markers are tokens."""
    found = AnswerForms(harmony=form) if isinstance(form, HarmonyForm) else AnswerForms(call=form)
    names = [marker.text for marker in found.markers if marker]
    added = [AddedToken(name, special=False) for name in names]
    text = Text(wrap(byte_level(*added), template=CHATML), vocab_size=700, context_length=9000)
    ids = {name: text._tokenizer.convert_tokens_to_ids(name) for name in names}
    text.split = Splitting(text._tokenizer, found.with_tokens(ids.get))
    return text


def asked(choice: str = "required", tool: Tool = APPLY) -> Submit:
    chat = ChatOptions(tools=[OTHER, tool], tool_choice=choice, parallel_tool_calls=False)
    messages = [ChatMessage("user", "hi")]
    return Submit(rid="r", messages=messages, sampling=Sampling(seed=0), chat=chat)


def grammar_for(text: Text, request: Submit) -> AnswerGrammar:
    return write_grammar(request, text.answer_context(request, [0]), canonical=True)


def start_of(compiler: Compiler, grammar: AnswerGrammar) -> LLMatcher:
    compilation = compiler.start(grammar)
    assert compilation.done.wait(10)
    return compiler.matcher(compilation).grammar


@pytest.mark.parametrize("form_name", [name for name in FORMS if name != "harmony"])
def test_written_calls_are_accepted_and_replayed_without_masks(form_name: str) -> None:
    """After a worker's death, known tokens are pushed without computing their masks."""
    form = FORMS[form_name]
    assert isinstance(form, CallForm)
    text, request = model(form), asked(tool=Tool("time", parameters=TWO_KEYS))
    given = {"zone": "Europe/Berlin <b>", "at": 3}
    written = write_calls(form, [ToolCall("time", json.dumps(given))])
    compiler = Compiler(text.vocabulary)
    matcher = start_of(compiler, grammar_for(text, request))
    for token in text._tokenizer.encode(written, add_special_tokens=False):
        assert matcher.consume_token(token), matcher.get_error()
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    ("given", "valid"),
    [
        ({"n": 2}, True),
        ({"n": None}, True),
        ({"n": "2"}, False),
        ({"any": "12"}, True),
        ({"any": [1]}, True),
        ({"text": "2"}, True),
        ({"text": 2}, False),
    ],
)
def test_deepseeks_attribute_follows_the_schema(given: dict[str, object], valid: bool) -> None:
    optional = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    properties = {"n": optional, "any": {}, "text": {"type": "string"}}
    tool = Tool("time", parameters={"type": "object", "properties": properties})
    text = model(forms.DEEPSEEK_V32)
    matcher = start_of(Compiler(text.vocabulary), grammar_for(text, asked(tool=tool)))
    written = write_calls(forms.DEEPSEEK_V32, [ToolCall("time", json.dumps(given))])
    tokens = text._tokenizer.encode(written, add_special_tokens=False)
    assert all(matcher.consume_token(token) for token in tokens) is valid


XML = ["qwen coder", "glm", "minimax", "dsml", "seed", "muse"]


@pytest.mark.parametrize("form_name", XML)
def test_arguments_may_refer_to_definitions_of_the_tools_schema(form_name: str) -> None:
    """As pydantic writes models and optional models."""
    place = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    reference = {"$ref": "#/$defs/Place"}
    schema = {
        "$defs": {"Place": place},
        "type": "object",
        "properties": {"at": reference, "to": {"anyOf": [reference, {"type": "null"}]},
                       "by": {"type": "array", "items": reference}},
        "required": ["at", "to", "by"],
    }  # fmt: skip
    form = FORMS[form_name]
    assert isinstance(form, CallForm)
    text, city = model(form), {"city": "Rome"}
    grammar = grammar_for(text, asked("name:go", Tool("go", parameters=schema)))
    for given, valid in (
        ({"at": city, "to": None, "by": [city]}, True),
        ({"at": city, "to": city, "by": []}, True),
        ({"at": {}, "to": None, "by": []}, False),
    ):
        matcher = start_of(Compiler(text.vocabulary), grammar)
        written = write_calls(form, [ToolCall("go", json.dumps(given))])
        tokens = text._tokenizer.encode(written, add_special_tokens=False)
        assert all(matcher.consume_token(token) for token in tokens) is valid


@pytest.mark.parametrize("schema", [{"type": "any"}, {"type": 7}, {"$ref": "#/nowhere"}, {}, True])
@pytest.mark.parametrize("form_name", XML)
def test_an_argument_of_an_unknown_type_is_any_text(form_name: str, schema: object) -> None:
    form = FORMS[form_name]
    assert isinstance(form, CallForm)
    text = model(form)
    tool = Tool("go", parameters={"type": "object", "properties": {"at": schema}})
    matcher = start_of(Compiler(text.vocabulary), grammar_for(text, asked("name:go", tool)))
    written = write_calls(form, [ToolCall("go", '{"at": "a <b> 1"}')])
    for token in text._tokenizer.encode(written, add_special_tokens=False):
        assert matcher.consume_token(token), matcher.get_error()
    assert matcher.is_accepting()


@pytest.mark.parametrize("form_name", XML)
def test_a_tool_without_a_schema_takes_any_arguments(form_name: str) -> None:
    form = FORMS[form_name]
    assert isinstance(form, CallForm)
    text = model(form)
    written = write_calls(form, [ToolCall("go", '{"zone": "x", "more": 2}')])
    matcher = start_of(
        Compiler(text.vocabulary), grammar_for(text, asked("name:go", Tool("go", parameters={})))
    )
    for token in text._tokenizer.encode(written, add_special_tokens=False):
        assert matcher.consume_token(token), matcher.get_error()
    assert matcher.is_accepting()


def drawn(text: Text, request: Submit, seed: int) -> list[int]:
    """Return the tokens of an answer, with line ends and asterisks more often than others."""
    grammar = grammar_for(text, request)
    compiler = Compiler(text.vocabulary)
    matcher = start_of(compiler, grammar)
    vocabulary = text.vocabulary().tokens
    chance = random.Random(seed)
    tokens: list[int] = []
    while not matcher.is_stopped() and len(tokens) < 3000:
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(len(vocabulary)) if mask[i >> 3] >> (i & 7) & 1]
        if matcher.is_accepting() and (not allowed or chance.random() < 0.5):
            break
        short = [i for i in allowed if vocabulary[i][:1] in (b"\n", b"\\", b"*", b"n", b"E", b"<")]
        token = chance.choice(short if short and chance.random() < 0.4 else allowed)
        assert matcher.consume_token(token)
        tokens.append(token)
    assert matcher.is_accepting(), "the walk found no end"
    return tokens


def call_of(text: Text, request: Submit, tokens: list[int]) -> tuple[str, str]:
    """Return the name and the text of the only call in an answer, which may reason before it."""
    stream = text.stream(request, [0], has_valid_calls=True)
    written = "".join(map(stream.push, tokens)) + stream.finish(ended=True)
    *before, part = stream.take_parts()
    assert {one.kind for one in before} <= {"reasoning"}
    assert stream.take_notes() == []
    assert part.kind == "call"
    return part.name, json.loads(written.encode()[part.at :])["input"]


@pytest.mark.parametrize("case", FORMS)
def test_a_forced_patch_matches_its_grammar(case: str) -> None:
    text = model(FORMS[case])
    request = asked("name:apply_patch")
    for seed in range(2):
        name, patch = call_of(text, request, drawn(text, request, seed))
        assert name == "apply_patch"
        assert matches(patch), patch


XML = (
    "<tool_call>\n<function=apply_patch>\n<parameter=input>\n{}\n</parameter>\n"
    "</function>\n</tool_call>"
)
JSON = '<tool_call>\n{{"name": "apply_patch", "arguments": {{"input": {}}}}}\n</tool_call>'


def accepts(text: Text, request: Submit, answer: str) -> bool:
    compiler = Compiler(text.vocabulary)
    matcher = start_of(compiler, grammar_for(text, request))
    tokens = text._tokenizer.encode(answer, add_special_tokens=False)
    return all(map(matcher.consume_token, tokens)) and matcher.is_accepting()


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("form", ["qwen", "qwen coder"])
def test_the_models_own_patch_is_accepted_as_it_is(form: str, choice: str) -> None:
    text, request = model(FORMS[form]), asked(choice)
    as_json = form == "qwen"

    def written(patch: str) -> str:
        return JSON.format(json.dumps(patch)) if as_json else XML.format(patch)

    assert accepts(text, request, written(SAMPLE.replace("é", "e")))
    assert not accepts(text, request, written(SAMPLE.replace("+<a>", "<a>")))


def test_a_regular_expression_is_enforced_where_strings_are_raw() -> None:
    dates = Tool("apply_patch", grammar=Grammar("regex", r"\d{4}/\d\d"))
    text, request = model(forms.QWEN_CODER), asked(tool=dates)

    assert accepts(text, request, XML.format("2026/11"))
    assert not accepts(text, request, XML.format("2026-11"))


def test_strings_that_a_schema_lists_are_enforced_where_strings_are_raw() -> None:
    schema = {"type": "object", "properties": {"input": {"enum": ["a", "b.c"]}}}
    text, request = model(forms.QWEN_CODER), asked(tool=Tool("apply_patch", parameters=schema))

    assert accepts(text, request, XML.format("b.c"))
    assert not accepts(text, request, XML.format("bxc"))


@pytest.mark.parametrize(
    "content", ["x</parameter>\n y", "</function>", "</parameter", "<parameter=input>"]
)
def test_raw_strings_may_contain_their_closing_tag(content: str) -> None:
    """The grammar ends a string where the parser does; it must not force the end at the tag."""
    text, request = (
        model(forms.QWEN_CODER),
        asked(tool=Tool("apply_patch", parameters=OTHER.parameters)),
    )
    answer = XML.replace("=input", "=cmd", 1).format(content)

    assert accepts(text, request, answer)
    tokens = text._tokenizer.encode(answer, add_special_tokens=False)
    stream = text.stream(request, [0], has_valid_calls=True)
    written = "".join(map(stream.push, tokens)) + stream.finish(ended=True)
    assert json.loads(written)["cmd"] == content


def test_a_grammar_with_recursion_is_not_enforced_and_a_note_says_so() -> None:
    nested = Tool("apply_patch", grammar=Grammar("lark", 'start: "(" start ")" | "x"'))
    grammar = grammar_for(model(forms.QWEN), asked(tool=nested))

    assert grammar.weaker is None
    assert "'start' refers to itself" in grammar.notes[0]


def test_the_grammar_of_a_patch_leaves_a_weaker_one_for_when_it_cannot_be_compiled() -> None:
    grammar = grammar_for(model(forms.QWEN), asked())

    assert grammar.notes == ()
    assert grammar.weaker is not None
    assert "Begin Patch" in grammar.text
    assert "Begin Patch" not in grammar.weaker.text
    assert PATCH not in grammar.text
