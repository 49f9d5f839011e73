"""`Tokenize` commands: their tokens equal those of a request's prompt, and the worker handles at
most one of them between two steps, in order."""

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
def test_tokens_equal_those_of_a_request(name):
    text = text_of(name)
    result = text.tokenize(Tokenize(seq=3, prompt=TEXTS[0], limit=1000, texts=True))
    assert (result.seq, result.tokens) == (3, text.encode(prompt(prompt=TEXTS[0])))
    assert result.count == len(result.tokens) == len(result.texts)
    assert "".join(result.texts).strip().endswith(TEXTS[0][-3:].strip())


def test_messages_are_rendered_with_the_template():
    text, messages = text_of("qwen"), [ChatMessage("user", "hi")]
    result = text.tokenize(Tokenize(seq=1, messages=messages, limit=2))
    encoded = text.encode(prompt(messages=messages))
    assert (result.count, result.tokens, result.texts) == (len(encoded), encoded[:2], [])


def test_a_text_may_be_empty_or_exceed_the_context_within_limits():
    text = text_of("qwen", context=16)
    assert text.tokenize(Tokenize(seq=1, prompt="", limit=9)).count == 0
    assert text.tokenize(Tokenize(seq=1, prompt="a b c d e f g h i j k l m", limit=0)).count > 16
    with pytest.raises(ContextTooLong):
        text.tokenize(Tokenize(seq=1, prompt="a b c " * 1000))
    with pytest.raises(InvalidRequest):
        text.tokenize(Tokenize(seq=1, prompt="a", messages=[]))


class RecordingEngine(FakeEngine):
    """Records in ``order`` when steps run and texts are tokenized."""

    def step(self):
        order.append("step")
        return super().step()

    def tokenize(self, request):
        order.append(request.seq)
        if request.prompt == "breaks":
            raise ZeroDivisionError
        return super().tokenize(request)


order: list[object] = []


def test_one_text_is_tokenized_between_steps_and_errors_leave_rows_alone():
    order.clear()
    peer = Thread(RecordingEngine())
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
        peer.send(Tokenize(seq=6, prompt="idle"))  # while no request runs
        peer.wait_for(lambda: len(peer.of(Tokenized)) == 6)
    finally:
        peer.close()
    broken, empty, *counted, last = peer.of(Tokenized)
    assert (broken.error.code, empty.error.code, last.count) == ("internal", "empty_prompt", 4)
    assert [one.count for one in counted] == [7, 3, 3]
    assert (counted[1].tokens, counted[1].texts) == ([97, 98], ["a", "b"])
    assert end.usage.completion_tokens == 1000
    first = order.index(1)
    during = order[first : order.index(5) + 1]
    assert all("step" in (one, other) for one, other in itertools.pairwise(during))
