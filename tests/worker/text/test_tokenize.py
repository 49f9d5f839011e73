"""Texts are tokenized between steps: one after each, in order, as requests would read them."""

from __future__ import annotations

import itertools

import pytest

from kvd.worker.fake.engine import FakeEngine
from kvd.worker.text.text import Text
from protocol.errors import ContextTooLong, InvalidRequest
from protocol.types import ChatMessage, Sampling
from protocol.worker import Submit, Tokenize, Tokenized
from tests.worker.process.peer import Thread, submit
from tests.worker.text.tokenizers_zoo import TEXTS, ZOO


def text_of(name, context=4096):
    return Text(ZOO[name](), vocab_size=700, context_length=context)


def prompt(**fields):
    return Submit(rid="r", sampling=Sampling(), **fields)


@pytest.mark.parametrize("name", ZOO)
def test_a_text_has_the_tokens_that_a_request_would_read(name):
    text = text_of(name)
    told = text.tokenize(Tokenize(seq=3, prompt=TEXTS[0], limit=1000, texts=True))
    assert (told.seq, told.tokens) == (3, text.encode(prompt(prompt=TEXTS[0])))
    assert told.count == len(told.tokens) == len(told.texts)
    assert "".join(told.texts).strip().endswith(TEXTS[0][-3:].strip())


def test_messages_are_counted_with_the_template():
    text, turns = text_of("qwen"), [ChatMessage("user", "hi")]
    told = text.tokenize(Tokenize(seq=1, messages=turns, limit=2))
    read = text.encode(prompt(messages=turns))
    assert (told.count, told.tokens, told.texts) == (len(read), read[:2], [])


def test_a_text_may_be_empty_and_longer_than_the_context_but_not_hopeless():
    text = text_of("qwen", context=16)
    assert text.tokenize(Tokenize(seq=1, prompt="", limit=9)).count == 0
    assert text.tokenize(Tokenize(seq=1, prompt="a b c d e f g h i j k l m", limit=0)).count > 16
    with pytest.raises(ContextTooLong):
        text.tokenize(Tokenize(seq=1, prompt="a b c " * 1000))
    with pytest.raises(InvalidRequest):
        text.tokenize(Tokenize(seq=1, prompt="a", messages=[]))


class Slow(FakeEngine):
    """Keeps in which order it steps and tokenizes."""

    def step(self):
        order.append("step")
        return super().step()

    def tokenize(self, request):
        order.append(request.seq)
        if request.prompt == "breaks":
            raise ZeroDivisionError
        return super().tokenize(request)


order: list[object] = []


def test_between_two_steps_one_text_is_tokenized_and_none_costs_a_row():
    order.clear()
    peer = Thread(Slow())
    try:
        peer.load("fake:tps=0")
        texts = ["breaks", "", "Grüße", "abc", "abc"]
        peer.send(
            submit("a", max_tokens=1000),
            *(
                Tokenize(seq=seq, prompt=one, limit=2, texts=True)
                for seq, one in enumerate(texts, 1)
            ),
        )
        [end] = peer.wait_for_end("a")
        peer.wait_for(lambda: len(peer.of(Tokenized)) == len(texts))
        peer.send(Tokenize(seq=6, prompt="idle"))  # and with nothing else to do
        peer.wait_for(lambda: len(peer.of(Tokenized)) == 6)
    finally:
        peer.close()
    broken, empty, *told, last = peer.of(Tokenized)
    assert (broken.error.code, empty.error.code, last.count) == ("internal", "empty_prompt", 4)
    assert [one.count for one in told] == [7, 3, 3]
    assert (told[1].tokens, told[1].texts) == ([97, 98], ["a", "b"])
    assert end.usage.completion_tokens == 1000
    first = order.index(1)
    during = order[first : order.index(5) + 1]
    assert all("step" in (one, other) for one, other in itertools.pairwise(during))
