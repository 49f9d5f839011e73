"""Tokenizers without transformers against the same ones with transformers, of all kinds."""

from __future__ import annotations

import functools

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    NewlineTokenizer,
    SPMStreamingDetokenizer,
)
from msgspec.structs import replace

from kvd import demo
from kvd.worker.serving import seam
from kvd.worker.text.fast_tokenizer import FastTokenizer, FastWrapper
from kvd.worker.text.rendering import Renderer
from kvd.worker.text.text import Text
from kvd.worker.text.tokenizer_record import Refusal, TokenizerRecord
from kvd.worker.tools.compare_tokenizers import NotConvertibleError, compare
from kvd.worker.tools.convert_tokenizer import convert, load_with_transformers, record_of
from protocol.tools import ChatOptions
from protocol.types import ChatMessage
from protocol.worker import Tokenize
from tests.worker.process.peer import submit
from tests.worker.text import tokenizer_kinds
from tests.worker.text.tokenizer_kinds import KINDS, TOOLS
from tests.worker.text.tokenizers_zoo import CHATML, byte_level

TEXTS = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from(" \n\t\r.,?!'▁Ġ"),
        st.sampled_from("abcABC01 éßж世😀\u0301\u200d"),
    ),
    max_size=60,
)
PIECES = st.lists(
    st.one_of(TEXTS, st.sampled_from(["<s>", "</s>", "<|im_end|>", "<extra_7>", "cat", "[SEP]"])),
    max_size=6,
).map("".join)


@pytest.fixture(autouse=True, scope="module")
def seam_first():
    """Loading a tokenizer imports its model's module, and the seam must be there before."""
    seam.install()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return a function: the wrapper with transformers, and the record, of a kind."""
    folder = tmp_path_factory.mktemp("kinds")

    @functools.cache
    def load(kind):
        path = tokenizer_kinds.write(folder / str(list(KINDS).index(kind)), kind)
        return load_with_transformers(path), convert(path)

    return load


def text_of(wrapper):
    return Text(wrapper, vocab_size=2000, context_length=512)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_the_same_tokens_and_texts(pair, kind):
    wrapper, record = pair(kind)
    assert isinstance(record, TokenizerRecord), record
    slow, fast = wrapper._tokenizer, FastTokenizer(record)

    @settings(max_examples=40, deadline=None)
    @given(PIECES)
    def check(text):
        for special in (True, False):
            assert fast.encode(text, add_special_tokens=special) == slow.encode(
                text, add_special_tokens=special
            )
        tokens = slow.encode(text)
        for skip in (True, False):
            assert fast.decode(tokens, skip_special_tokens=skip) == slow.decode(
                tokens, skip_special_tokens=skip
            )

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_serves_requests_alike(pair, kind):
    wrapper, record = pair(kind)
    slow, fast = text_of(wrapper), text_of(FastWrapper(record))
    assert fast.eos_ids == slow.eos_ids
    assert fast.abilities == slow.abilities
    assert fast.canonical == slow.canonical
    assert fast.split.special == slow.split.special
    assert fast.vocabulary().tokens == slow.vocabulary().tokens
    assert fast.has_chat_template == slow.has_chat_template
    prompt = "naïve  <s> café\n😀</s>"
    request = submit("a", prompt)
    tokens = slow.encode(request)
    assert fast.encode(request) == tokens
    streams = slow.stream(request, tokens), fast.stream(request, tokens)
    for token in [*tokens, *reversed(tokens), *range(0, 300, 7)]:
        assert streams[1].push(token) == streams[0].push(token)
    assert streams[1].finish() == streams[0].finish()
    named = Tokenize(seq=0, prompt=prompt, limit=100, texts=True)
    assert fast.tokenize(named) == slow.tokenize(named)


CHATS = st.lists(
    st.builds(
        ChatMessage,
        role=st.sampled_from(["system", "user", "assistant", "tool"]),
        content=TEXTS,
        reasoning=st.sampled_from(["", "because"]),
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("kind", [name for name, (_, _, found) in KINDS.items() if found])
def test_each_template_renders_conversations_alike(pair, kind):
    wrapper, record = pair(kind)
    slow, fast = text_of(wrapper), text_of(FastWrapper(record))

    def rendered(text, *arguments):
        try:
            return text.template.render(*arguments)
        except Exception as error:  # noqa: BLE001 - both must refuse alike
            return str(error)

    @settings(max_examples=25, deadline=None)
    @given(CHATS, st.sampled_from([{}, {"enable_thinking": True}, {"documents": [{"title": "x"}]}]))
    def check(messages, variables):
        options = ChatOptions(template=variables)
        # The second time counts if a minute ends between the calls.
        assert any(
            rendered(fast, messages, options) == rendered(slow, messages, options) for _ in range(2)
        )

    check()


@pytest.mark.parametrize(
    ("detokenizer", "kind"),
    [
        (NaiveStreamingDetokenizer, "bytes"),
        (NaiveStreamingDetokenizer, "unigram with an end"),
        (NaiveStreamingDetokenizer, "word pieces, cleaned up"),
        (SPMStreamingDetokenizer, "byte fallback"),
        (BPEStreamingDetokenizer, "bytes"),
    ],
)
def test_detokenizers_of_mlx_lm_work_without_transformers(pair, kind, detokenizer):
    wrapper, record = pair(kind)
    texts = []
    for tokenizer in (wrapper._tokenizer, FastTokenizer(record)):
        stream = detokenizer(tokenizer)
        stream.reset()
        for token in tokenizer.encode("The quick  café 😀\n\tx don't , stop ."):
            stream.add_token(token)
        stream.finalize()
        texts.append(stream.text)
    assert texts[0] == texts[1]
    assert "quick" in texts[0]


def test_the_embedded_model_needs_no_transformers():
    record = convert(demo.path())
    assert isinstance(record, TokenizerRecord)
    assert record.tool_parser == "json_tools"
    assert record.eos_ids == [0, 2]


# What needs transformers.


def refused(folder):
    found = convert(folder)
    assert isinstance(found, Refusal), found
    return found.reason


def test_a_class_with_its_own_methods_is_refused(tmp_path):
    tokenizer_kinds.write(tmp_path / "model", "bytes")
    wrapper = load_with_transformers(tmp_path / "model")
    wrapper._tokenizer = NewlineTokenizer(tokenizer_object=byte_level("<n>"))
    with pytest.raises(NotConvertibleError, match=r"NewlineTokenizer\.(decode|encode)"):
        record_of(wrapper)


def test_a_template_in_mlx_lms_code_is_refused(tmp_path):
    settings = {"chat_template_type": "deepseek_v32", "eos_token": "<|im_end|>"}
    folder = tokenizer_kinds.write_folder(tmp_path / "model", byte_level(), settings)
    assert "code of its own" in refused(folder)


def test_a_tokenizer_in_python_is_refused(tmp_path):
    folder = tokenizer_kinds.write_folder(
        tmp_path / "model", None, {"tokenizer_class": "ByT5Tokenizer"}
    )
    assert "ByT5Tokenizer is a tokenizer in Python" in refused(folder)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE"}}'])
def test_a_broken_file_is_refused(tmp_path, content):
    folder = tokenizer_kinds.write(tmp_path / "model", "bytes")
    (folder / "tokenizer.json").write_bytes(content)
    assert refused(folder)


def test_code_in_the_folder_is_not_run(tmp_path):
    folder = tokenizer_kinds.write_folder(
        tmp_path / "model",
        byte_level(),
        {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}},
    )
    (folder / "own.py").write_text("import pathlib; pathlib.Path('ran').touch()\nclass Own: ...\n")
    convert(folder)
    assert not list(tmp_path.rglob("ran"))


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"tokenizer": byte_level("one more").to_str().encode()}, "vocabulary"),
        ({"splits_special": True}, "tokens of"),
        ({"cleans_up": True}, "text of"),
        ({"chat_template": CHATML + " "}, "conversation"),
        ({"chat_template": TOOLS}, "conversation"),
    ],
)
def test_a_record_that_differs_is_refused(pair, change, difference):
    wrapper, record = pair("bytes")
    compare(wrapper, record)
    with pytest.raises(NotConvertibleError, match=difference):
        compare(wrapper, replace(record, **change))


# Templates.


def render(source, messages=({"role": "user", "content": "x"},), **variables):
    return Renderer(source).render(
        list(messages), variables, tools=None, documents=None, add_generation_prompt=True
    )


def test_json_in_a_template_is_not_escaped_for_html():
    assert render("{{ v | tojson }}", v={"é": "<'&"}) == '{"é": "<\'&"}'
    assert render("{{ v | tojson(ensure_ascii=true, sort_keys=true) }}", v={"b": "é", "a": 1}) == (
        '{"a": 1, "b": "\\u00e9"}'
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ dict.__class__.__base__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
    ],
)
def test_templates_stay_in_the_sandbox(source):
    with pytest.raises(jinja2.exceptions.SecurityError):
        render(source)


def test_reasoning_has_both_usual_names():
    source = "{{ messages[0].thinking }}/{{ messages[0].reasoning_content }}"
    for name in ("thinking", "reasoning_content", "reasoning"):
        assert render(source, [{"role": "assistant", name: "r"}]) == "r/r"
    both = {"role": "assistant", "thinking": "t", "reasoning_content": "r"}
    assert render(source, [both]) == "t/r"


def test_a_conversation_needs_messages_and_a_template(pair):
    fast = FastTokenizer(pair("bytes")[1])
    with pytest.raises(ValueError, match="at least one message"):
        fast.apply_chat_template([])
    with pytest.raises(ValueError, match="tokenize it"):
        fast.apply_chat_template([{"role": "user", "content": "x"}], tokenize=True)
    with pytest.raises(TypeError, match="documents"):
        fast.apply_chat_template([{"role": "user", "content": "x"}], documents=["x"])
    with pytest.raises(ValueError, match="no default chat template"):
        FastTokenizer(pair("no decoder")[1]).apply_chat_template([{"role": "user"}])
