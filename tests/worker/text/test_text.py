"""Tokenization of prompts and text of completions, with typed errors."""

from __future__ import annotations

import pytest

from kvd.worker.text.text import Text
from protocol.errors import ContextTooLong, EmptyPrompt, InvalidRequest
from protocol.types import Alternative, ChatMessage, Sampling
from protocol.worker import Submit
from tests.worker.text.tokenizers_zoo import TEXTS, ZOO

VOCAB = 700


def text_of(name, context=4096):
    return Text(ZOO[name](), vocab_size=VOCAB, context_length=context)


def submit(**fields):
    return Submit(rid="r", sampling=Sampling(), **fields)


def complete(text, request, prompt, tokens):
    stream = text.stream(request, prompt)
    out = ""
    for token in tokens:
        out += stream.push(token)
        if stream.stopped:
            return out, True
    return out + stream.finish(), False


@pytest.mark.parametrize("name", ZOO)
def test_a_raw_prompt_gets_the_prefix_tokens_and_no_suffix(name):
    text = text_of(name)
    tokenizer = ZOO[name]()
    plain = tokenizer.encode(TEXTS[0], add_special_tokens=False)
    expected = [1, *plain] if name == "llama2" else plain
    assert text.encode(submit(prompt=TEXTS[0])) == expected


def test_a_prompt_with_bos_gets_no_second_one():
    text = text_of("llama2")
    assert text.encode(submit(prompt="<s>hello")).count(1) == 1


def test_special_tokens_in_a_raw_prompt_are_tokens():
    text = text_of("qwen")
    assert text.encode(submit(prompt="<|im_start|>a"))[0] == 1


def test_messages_are_rendered_with_the_template():
    text = text_of("qwen")
    tokens = text.encode(
        submit(messages=[ChatMessage("system", "be brief"), ChatMessage("user", "hi\n")])
    )
    raw = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi\n<|im_end|>\n"
    assert text.has_chat_template
    assert tokens == text.encode(submit(prompt=raw + "<|im_start|>assistant\n"))
    assert tokens.count(1) == 3
    assert tokens.count(2) == 2


def test_messages_without_a_template_are_refused():
    text = text_of("bert")
    assert not text.has_chat_template
    with pytest.raises(InvalidRequest, match="send prompt instead") as caught:
        text.encode(submit(messages=[ChatMessage("user", "hi")]))
    assert caught.value.detail == {"field": "messages"}


def test_a_template_error_is_an_invalid_request():
    wrapper = ZOO["qwen"]()
    wrapper._tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    text = Text(wrapper, vocab_size=VOCAB, context_length=100)
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        text.encode(submit(messages=[ChatMessage("user", "hi")]))


def test_tokens_are_unchanged_and_within_the_vocabulary():
    text = text_of("llama2")
    assert text.encode(submit(tokens=[5, 0, VOCAB - 1])) == [5, 0, VOCAB - 1]
    for bad in (VOCAB, -1):
        with pytest.raises(InvalidRequest, match="outside the vocabulary of 700"):
            text.encode(submit(tokens=[5, bad]))


@pytest.mark.parametrize("fields", [{"prompt": ""}, {"tokens": []}, {"messages": []}])
def test_empty_prompts_are_refused(fields):
    for name in ("qwen", "llama2"):
        with pytest.raises(EmptyPrompt):
            text_of(name).encode(submit(**fields))


@pytest.mark.parametrize("fields", [{}, {"prompt": "a", "tokens": [1]}])
def test_exactly_one_form_of_prompt_is_required(fields):
    with pytest.raises(InvalidRequest, match="exactly one"):
        text_of("qwen").encode(submit(**fields))


def test_a_lone_surrogate_is_refused():
    with pytest.raises(InvalidRequest, match="prompt is not valid text"):
        text_of("qwen").encode(submit(prompt="a\ud800b"))
    with pytest.raises(InvalidRequest, match="messages is not valid text"):
        text_of("qwen").encode(submit(messages=[ChatMessage("user", "a\ud800b")]))


def test_the_prompt_and_one_token_must_fit_into_the_context():
    text = text_of("qwen", context=10)
    assert len(text.encode(submit(tokens=[5] * 9))) == 9
    with pytest.raises(
        ContextTooLong, match="has 10 tokens; the model's context has 10 tokens"
    ) as caught:
        text.encode(submit(tokens=[5] * 10))
    assert caught.value.detail == {"prompt_tokens": 10, "context_length": 10}


def test_a_far_too_long_prompt_is_refused_after_a_part_of_it_is_tokenized():
    text = text_of("qwen", context=100)
    seen = []
    encode = text._tokenizer.encode
    text._tokenizer.encode = lambda given, **kw: seen.append(len(given)) or encode(given, **kw)
    long = "many words " * 100_000
    for request in (submit(prompt=long), submit(messages=[ChatMessage("user", long)])):
        with pytest.raises(ContextTooLong, match="has more than"):
            text.encode(request)
    assert max(seen) == 800


def test_a_long_text_of_few_tokens_is_not_refused():
    text = text_of("qwen", context=100)
    word = max(text._tokenizer.get_vocab(), key=len)
    prompt = word * 90
    assert len(prompt) > 800
    try:
        found = len(text.encode(submit(prompt=prompt)))
    except ContextTooLong as error:
        found = error.detail["prompt_tokens"]
    assert (found < 100) == (len(text._tokenizer.encode(prompt)) < 100)


def test_eos_ends_a_completion_and_returns_held_back_text():
    text = text_of("qwen")
    assert text.eos_ids == {2}
    request = submit(prompt="a", stop=["never"])
    tokens = text._tokenizer.encode("so nev")
    assert complete(text, request, [5], [*tokens, 2, 7]) == ("so nev", True)


def test_a_stop_string_split_over_tokens_is_never_sent():
    text = text_of("qwen")
    tokens = text._tokenizer.encode("one🦊two")
    for stop, expected in [("🦊", "one"), ("e🦊t", "on"), ("o", ""), ("x", "one🦊two")]:
        out, stopped = complete(text, submit(prompt="a", stop=[stop]), [5], tokens)
        assert out == expected
        assert stopped == (stop != "x")


@pytest.mark.parametrize("name", ZOO)
def test_prompt_and_completion_join_to_one_text(name):
    text = text_of(name)
    tokens = text._tokenizer.encode(TEXTS[0], add_special_tokens=False)
    whole = text._tokenizer.decode(tokens)
    request = submit(prompt="x")
    out, _ = complete(text, request, tokens[:9], tokens[9:])
    assert text._tokenizer.decode(tokens[:9]) + out == whole


def test_a_completion_after_messages_starts_without_a_space():
    text = text_of("llama2")
    tokens = text._tokenizer.encode("The quick", add_special_tokens=False)
    request = submit(messages=[ChatMessage("user", "hi")])
    assert complete(text, request, [300, 301], tokens) == ("The quick", False)


def pieces(text, request, tokens):
    stream = text.stream(request, [5])
    out = [stream.push(token) for token in tokens]
    return out, stream


def test_stop_tokens_are_not_sent_and_ignore_eos_continues():
    text = text_of("qwen")
    tokens = text._tokenizer.encode("so never")
    request = submit(prompt="a", stop_tokens=[tokens[1]])
    out, stream = pieces(text, request, tokens[:2])
    assert (stream.ends, stream.ended, stream.stopped) == ({2, tokens[1]}, True, True)
    assert "".join(out) == text._tokenizer.decode(tokens[:1])
    going = submit(prompt="a", ignore_eos=True)
    out, stream = pieces(text, going, [tokens[0], 2, *tokens[1:]])
    assert (stream.ends, stream.stopped) == (frozenset(), False)
    assert "".join(out) + stream.finish() == "so never"


def test_nothing_ends_a_completion_before_min_tokens():
    text = text_of("qwen")
    tokens = text._tokenizer.encode("one two one two")
    request = submit(prompt="a", stop=["o"], min_tokens=3)
    stream = text.stream(request, [5])
    left = list(tokens)
    out = ""
    while not stream.stopped:
        out += stream.push(left.pop(0))
    assert len(tokens) - len(left) > 3
    assert out.startswith(text._tokenizer.decode(tokens[:3]))
    assert "o" not in out[len(text._tokenizer.decode(tokens[:3])) :]
    stream = text.stream(submit(prompt="a", min_tokens=2), [5])
    stream.push(2)
    stream.push(2)
    assert not stream.stopped
    stream.push(2)
    assert stream.stopped
    assert stream.ended


@pytest.mark.parametrize("name", ZOO)
def test_every_token_has_a_text(name):
    text = text_of(name)
    for token in range(VOCAB):
        logprob = text.token_logprob(token, -1.0)
        assert (logprob.token, logprob.logprob, logprob.top) == (token, -1.0, [])
        if logprob.bytes is not None:
            assert bytes(logprob.bytes).decode("utf-8", "replace") == logprob.text
            assert "\ufffd" in logprob.text


def test_token_texts_have_spaces_bytes_and_special_names():
    qwen, llama = text_of("qwen"), text_of("llama2")
    the = qwen._tokenizer.encode(" the")[0]
    assert qwen.token_logprob(the, -0.5, [(the, -0.5), (2, -1.0)]).top == [
        Alternative(the, qwen.token_logprob(the, 0.0).text, -0.5),
        Alternative(2, "<|im_end|>", -1.0),
    ]
    assert qwen.token_logprob(the, 0.0).text.startswith(" ")
    broken = [token for token in range(VOCAB) if qwen.token_logprob(token, 0.0).bytes]
    assert broken, "some tokens of a byte vocabulary are not valid text"
    byte = llama._tokenizer.convert_tokens_to_ids("<0xE4>")
    assert (llama.token_logprob(byte, 0.0).text, llama.token_logprob(byte, 0.0).bytes) == (
        "\ufffd",
        [0xE4],
    )
    spaced = next(t for t in range(VOCAB) if llama.token_logprob(t, 0.0).text.startswith(" "))
    assert "\u2581" not in llama.token_logprob(spaced, 0.0).text


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stop_tokens": [VOCAB]}, "stop_tokens"),
        ({"sampling": Sampling(logit_bias={VOCAB: 1.0})}, "sampling.logit_bias"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused_with_their_field(fields, field):
    request = Submit(rid="r", prompt="a", **{"sampling": Sampling(), **fields})
    with pytest.raises(InvalidRequest, match="outside the vocabulary of 700") as caught:
        text_of("qwen").encode(request)
    assert caught.value.detail == {"field": field}


def test_a_panic_of_the_tokenizer_fails_only_the_request(monkeypatch):
    class PanicException(BaseException):
        """The library's class has this name and base."""

    def panic(*_args: object, **_options: object) -> None:
        raise PanicException("chunk size must be non-zero")

    text = text_of("qwen")
    monkeypatch.setattr(type(text._tokenizer), "encode", panic)
    with pytest.raises(InvalidRequest, match=r"tokenizer fails on the prompt .*chunk size"):
        text.encode(submit(prompt="hello"))


def test_long_texts_are_counted_in_pieces(monkeypatch):
    text = text_of("qwen", context=50_000)
    encode, lengths = text._tokenizer.encode, []

    def observed(piece, **options):
        lengths.append(len(piece))
        return encode(piece, **options)

    monkeypatch.setattr(text._tokenizer, "encode", observed)
    with pytest.raises(ContextTooLong) as caught:
        text.encode(submit(prompt="q " * 1_000_000))
    assert caught.value.detail["prompt_tokens"] > 50_000
    assert max(lengths) <= 65_536
    assert sum(lengths) < 200_000
