"""Hostile chat templates: tokens, or an error of the request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from protocol.errors import KvdError
from protocol.types import ChatMessage
from protocol.worker import Tokenize
from tests.fuzz.child import InChild
from tests.fuzz.mutations import edited_bytes, either
from tests.fuzz.target import Check

_SNIPPETS = [
    b"{% for m in messages %}", b"{% endfor %}", b"{% for i in range(50) %}", b"{{ m.content }}",
    b"{% if true %}", b"{% else %}", b"{% endif %}", b"{% set x = messages %}", b"{{ x }}",
    b"{{ messages[99].content }}", b"{{ messages[0]['role'] * 1000 }}", b"{{ nothing.at.all }}",
    b"{{ range(10 ** 9) }}", b"{{ 'x' * 10 ** 6 }}", b"{{ 'x' * 10 ** 11 }}",
    b"{{ [0] * 10 ** 10 }}", b"{{ 1 / 0 }}", b"{{ 10 ** 400 }}", b"{{ raise_exception('no') }}",
    b"{{ raise_exception(1) }}",
    b"{{ messages.__class__.__mro__[1].__subclasses__() }}", b"{{ self.__init__.__globals__ }}",
    b"{{ cycler.__init__.__globals__.os.popen('id').read() }}", b"{{ ''.format.__globals__ }}",
    b"{{ '{0.__class__}'.format(messages) }}", b"{{ messages.append(1) }}",
    b"{{ messages.clear() }}",
    b"{% include '/etc/passwd' %}", b"{% import 'os' as os %}", b"{% extends x %}",
    b"{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", b"{% break %}", b"{% continue %}",
    b"{% generation %}", b"{% endgeneration %}", b"{{ strftime_now('%' * 3000) }}",
    b"{{ messages | tojson }}", b"{{ messages | map('upper') | list }}",
    b"{{ 'a' | center(10 ** 6) }}",
    b"{{ messages | tojson(indent=10 ** 6) }}", b"{{ 'a' | indent(10 ** 6) }}", b"{{ '\\ud800' }}",
    b"{{ '%1000000d' | format(1) }}", b"{{ namespace(a=1).a }}", b"{# comment", b"{% raw %}",
    b"{{ '\\x00' }}", b"{{ caller() }}", b"{{ loop.index }}", b"{{ bos_token }}", b"{{ tools }}",
    b"{{ dict(messages[0]) }}", b"{{ lipsum(n=100) }}", b"{{ '('*300 ~ ')'*300 }}",
    b"{{ " + b"(" * 150 + b"1" + b")" * 150 + b" }}", b"{{ " + b"-" * 3000 + b"1 }}",
]  # fmt: skip


@st.composite
def _assembled(draw: DrawFn) -> bytes:
    return b"".join(draw(st.lists(st.sampled_from(_SNIPPETS), min_size=1, max_size=8)))


class Templates(InChild):
    name = "templates"
    examples = 100

    def inputs(self) -> SearchStrategy[bytes]:
        return either(_assembled(), edited_bytes(self.seeds(), _SNIPPETS))

    def serve(self, folder: Path) -> Check:
        from kvd.worker.text.text import Text
        from tests.worker.text.tokenizers_zoo import byte_level, wrap

        del folder
        messages = [ChatMessage("system", "Be short."), ChatMessage("user", "Hi {{ x }} \ud800")]

        def check(data: bytes) -> None:
            wrapper = wrap(byte_level(), template=data.decode("utf-8", "surrogateescape"))
            text = Text(wrapper, vocab_size=600, context_length=2000)
            for count in _counts(text, messages):
                assert count >= 0

        return check


def _counts(text: object, messages: list[ChatMessage]) -> Iterator[int]:
    for given in (messages[:1], messages):
        try:
            yield text.tokenize(Tokenize(seq=1, messages=given, limit=10, texts=True)).count
        except KvdError as error:
            msgspec.msgpack.encode(error.info())
            yield 0
