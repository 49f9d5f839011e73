"""Compares a tokenizer of transformers with its record on the vocabulary, texts and conversations.

The samples aim at what differs between tokenizers: spaces, line ends, characters of several bytes,
combining and invalid characters, special and added tokens with and without spaces around them,
digits, code, and long texts. Conversations use all that kvd passes to templates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kvd.worker.process.cpu_limit import limit_cpu
from kvd.worker.text.failures import is_failure
from kvd.worker.text.fast_tokenizer import FastTokenizer
from kvd.worker.text.template import TEMPLATE_SECONDS
from kvd.worker.text.tokenizer_record import TokenizerRecord

_CHUNK = 256
_ADDED = 200
"""Added tokens that are tried within texts: the first and the last of them."""
_ATTEMPTS = 3
"""Times that a conversation is rendered, because templates may contain the time."""
_TEXTS = (
    "", " ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u200b", "\u3000", "\ufeff", "\0", "a",
    " a", "a ", "  a  b  ", "Hello, world!", "don't , stop . it 's we 've they 're I 'm 'll ?",
    "The quick brown fox jumps over the lazy dog. 1234567890 3.14159 1,000,000 0x1F",
    "naïve café — Grüße aus Köln, ¿qué tal? e\u0301 n\u0303", "Привет, мир! Ελλάδα. שלום عليكم",
    "こんにちは世界。你好\uff0c世界\uff01안녕하세요 ไทย हिन्दी", "\U0001d518\U0001d52b \ufb01 Ⅷ ½ ²",
    "\ufffd\ufffe\U0010ffff",
    "😀 👩‍👩‍👧‍👦 🇩🇪 👍🏽 ❤️",
    "def f(x):\n    return x + 1  # two  spaces\r\n\tif x:\n\n\n\t\tpass\n",
    '{"a": [1, 2.5e-3, null], "b": "\\u00e9\\n"}', "<s> </s> <unk> [INST] <|im_start|>user\n<pad>",
    "▁under▁score <0x0A> ##piece Ġbyte Ċline", "https://example.com/a?b=c&d=%20#e user@host",
    "ALLCAPS camelCase snake_case kebab-case", "x" * 400, "ab " * 300, "word\n" * 200,
    "\ud800", "a\udfffb",
)  # fmt: skip
_USER = {"role": "user", "content": "What is  2 + 2?\n<b>&amp;</b> \"'"}
_ANSWER = {"role": "assistant", "content": "It is 4."}
_SYSTEM = {"role": "system", "content": "You are brief. "}
_FUNCTION = {
    "name": "weather",
    "description": "The weather of a place <now>",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string", "enum": ["Köln", "Łódź"]}, "days": {}},
        "required": ["place"],
    },
}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_ARGUMENTS = {"place": "Köln", "days": 2, "exact": True, "more": None, "list": [1.5, "x"]}


def _call(arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


_RESULT = {"role": "tool", "content": '{"t": 20}', "tool_call_id": "call00001", "name": "weather"}
_CHATS: tuple[tuple[list[dict[str, Any]], dict[str, Any]], ...] = (
    ([_USER], {}),
    ([_USER], {"add_generation_prompt": False}),
    ([_SYSTEM, _USER], {}),
    ([_SYSTEM, _USER, _ANSWER, _USER], {}),
    ([_USER, _ANSWER, _SYSTEM, _USER], {}),
    ([_SYSTEM], {}),
    ([_ANSWER], {}),
    ([_USER, _USER], {}),
    ([{"role": "developer", "content": "x"}, _USER], {}),
    ([{"role": "user", "content": ""}], {}),
    ([{"role": "user", "content": None}], {}),
    ([{"role": "user", "content": [{"type": "text", "text": "parts"}]}], {}),
    ([_USER, {**_ANSWER, "reasoning_content": "because"}, _USER], {}),
    ([_USER, {**_ANSWER, "thinking": "because"}, _USER], {}),
    ([_USER], {"tools": _TOOLS}),
    ([_SYSTEM, _USER], {"tools": _TOOLS}),
    ([_USER, _call(_ARGUMENTS), _RESULT], {"tools": _TOOLS}),
    ([_USER, _call('{"place": "Köln"}'), _RESULT, _ANSWER, _USER], {"tools": _TOOLS}),
    ([_USER, _call(_ARGUMENTS)], {}),
    ([_USER], {"enable_thinking": True}),
    ([_USER], {"enable_thinking": False}),
    ([_USER], {"thinking": True, "reasoning_effort": "low"}),
    ([_USER], {"documents": [{"title": "One", "text": "Two"}]}),
)


class NotConvertibleError(Exception):
    """The record does not represent the tokenizer; the text says why."""


def compare(wrapper: Any, record: TokenizerRecord) -> None:
    """Raise `NotConvertibleError` for the first difference.

    ``wrapper``: the `mlx_lm.tokenizer_utils.TokenizerWrapper` from which the record was made.
    """
    slow, fast = wrapper._tokenizer, FastTokenizer(record)  # noqa: SLF001 - as in `record_of`
    _same("the vocabulary", slow.get_vocab, fast.get_vocab)
    _same("the number of tokens", lambda: len(slow), lambda: len(fast))
    _same("added tokens", lambda: _added(slow), lambda: _added(fast))
    size = 1 + max(slow.get_vocab().values(), default=-1)
    for start in range(0, size, _CHUNK):
        tokens = list(range(start, min(start + _CHUNK, size)))
        _compare_tokens(slow, fast, tokens)
    for text in _texts(fast):
        _compare_text(slow, fast, text)
    if record.chat_template is not None:
        for number, (messages, options) in enumerate(_CHATS):
            _compare_chat(number, slow, fast, messages, options)


def _added(tokenizer: Any) -> dict[int, tuple[Any, ...]]:
    return {
        token: (one.content, one.special, one.lstrip, one.rstrip, one.single_word, one.normalized)
        for token, one in tokenizer.added_tokens_decoder.items()
    }


def _compare_tokens(slow: Any, fast: FastTokenizer, tokens: list[int]) -> None:
    where = f"tokens {tokens[0]} to {tokens[-1]}"
    _same(
        f"the names of {where}",
        lambda: slow.convert_ids_to_tokens(tokens),
        lambda: fast.convert_ids_to_tokens(tokens),
    )
    _compare_decoded(where, slow, fast, tokens)


def _compare_decoded(where: str, slow: Any, fast: FastTokenizer, tokens: list[int]) -> None:
    for options in (
        {"skip_special_tokens": True, "clean_up_tokenization_spaces": False},
        {"skip_special_tokens": False},
    ):
        _same(
            f"the text of {where}",
            partial(slow.decode, tokens, **options),
            partial(fast.decode, tokens, **options),
        )


def _texts(tokenizer: FastTokenizer) -> Iterator[str]:
    yield from _TEXTS
    yield "\n".join(_TEXTS[:-2]) * 5
    added = [one.content for one in tokenizer.added_tokens_decoder.values()]
    for content in added if len(added) <= _ADDED else added[: _ADDED // 2] + added[-_ADDED // 2 :]:
        yield f"a{content}b {content} c  {content}{content}\n{content.upper()} {content}s"


def _compare_text(slow: Any, fast: FastTokenizer, text: str) -> None:
    where = f"the text {text[:40]!r}"
    for special in (False, True):
        _same(
            f"the tokens of {where}",
            partial(slow.encode, text, add_special_tokens=special),
            partial(fast.encode, text, add_special_tokens=special),
        )
    try:
        tokens = fast.encode(text)
    except (TypeError, UnicodeError):  # lone surrogates
        return
    _compare_decoded(where, slow, fast, tokens)
    options = {"add_special_tokens": False, "return_offsets_mapping": True}
    _same(
        f"the positions in {where}",
        lambda: list(map(tuple, slow(text, **options)["offset_mapping"])),
        lambda: list(map(tuple, fast(text, **options)["offset_mapping"])),
    )


def _compare_chat(
    number: int,
    slow: Any,
    fast: FastTokenizer,
    messages: list[dict[str, Any]],
    options: dict[str, Any],
) -> None:
    given = {"add_generation_prompt": True, "tokenize": False, "return_dict": False, **options}

    def rendered(tokenizer: Any) -> Callable[[], str]:
        return lambda: limit_cpu(
            TEMPLATE_SECONDS, lambda: tokenizer.apply_chat_template(messages, **given)
        )

    for attempt in range(_ATTEMPTS):
        try:
            return _same(f"conversation {number}", rendered(slow), rendered(fast))
        except NotConvertibleError:
            if attempt == _ATTEMPTS - 1:
                raise
    return None


def _same(what: str, slow: Callable[[], Any], fast: Callable[[], Any]) -> None:
    one, other = _result(slow), _result(fast)
    if one != other:
        shown = f"{str(one)[:80]!r} with transformers, {str(other)[:80]!r} without"
        raise NotConvertibleError(f"{what} differ: {shown}")


def _result(compute: Callable[[], Any]) -> Any:
    """Return a result, or the type and text of the error."""
    try:
        return compute()
    except (MemoryError, TimeoutError) as error:
        raise NotConvertibleError(f"a comparison took too much ({error})") from error
    except (TypeError, UnicodeError):  # their texts name the called function
        return TypeError
    except BaseException as error:  # tokenizers and templates raise any type
        if not is_failure(error):
            raise
        return (type(error).__name__, str(error))
