"""Each form of answer, as tokens and as text, in pieces of any size, and cut off anywhere."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.answer.reading import Vocabulary, read, read_text, reader_of
from tests.worker.answer.samples import SAMPLES


def expected(sample):
    return [part if part[0] == "call" else (part[0], "", part[1]) for part in sample.parts]


def parsed(parts):
    return [
        (kind, name, json.loads(text) if kind == "call" else text) for kind, name, text in parts
    ]


def by_text(sample):
    """Whether the form's markers can be found by their text."""
    return sample.forms.harmony is None


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", SAMPLES)
def test_markers_that_are_tokens(name, size, streams):
    sample = SAMPLES[name]
    found = read_text(sample.forms, sample.text, size=size, extra=sample.extra, streams=streams)
    assert parsed(found) == expected(sample)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", [name for name, sample in SAMPLES.items() if by_text(sample)])
def test_markers_that_are_texts(name, size, streams):
    sample = SAMPLES[name]
    found = read_text(sample.forms, sample.text, size=size, by_token=False, streams=streams)
    assert parsed(found) == expected(sample)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_cut_loses_nothing_and_raises_nothing(data):
    sample = SAMPLES[data.draw(st.sampled_from(sorted(SAMPLES)))]
    by_token = not by_text(sample) or data.draw(st.booleans())
    streams, ended = data.draw(st.booleans()), data.draw(st.booleans())
    text = sample.text[: data.draw(st.integers(0, len(sample.text)))]
    options = {"by_token": by_token, "extra": sample.extra, "streams": streams, "ended": ended}
    found = read_text(sample.forms, text, **options)
    size = data.draw(st.integers(2, 40))
    assert read_text(sample.forms, text, size=size, **options) == found
    if streams and ended:  # a grammar rules that out: the call's beginning was passed on
        return
    whole = parsed(found[:-1])
    assert whole == expected(sample)[: len(whole)]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_text_in_any_pieces_gives_the_same_parts(data):
    sample = SAMPLES[data.draw(st.sampled_from(sorted(SAMPLES)))]
    vocabulary = Vocabulary(sample.forms, sample.extra)
    pieces = [*vocabulary.ids, "{", "}", '"', "\\", "name", "get_weather", ": ", ", ", " ", "\n"]
    pieces += ["arguments", "<", ">", "<parameter=city>", "</parameter>", "[", "]", "a", "é"]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=30)))
    text = sample.text[: data.draw(st.integers(0, len(sample.text)))] + text
    by_token = not by_text(sample) or data.draw(st.booleans())
    ended = data.draw(st.booleans())
    options = {"by_token": by_token, "extra": sample.extra, "ended": ended}
    found = read_text(sample.forms, text, **options)
    assert read_text(sample.forms, text, size=data.draw(st.integers(2, 60)), **options) == found
    for kind, name, arguments in found:
        if kind == "call" and ended:
            assert name
            assert isinstance(json.loads(arguments), dict)


def test_arguments_arrive_as_they_are_written_if_calls_are_streamed():
    sample = SAMPLES["qwen"]
    vocabulary = Vocabulary(sample.forms)
    reader = reader_of(vocabulary.forms, streams=True)
    cut = sample.text.index("Par") + 3
    found = []
    for token in vocabulary.tokens(sample.text[:cut]):
        reader.push(token.id, token.text, token.literal)
        found += reader.parts.take()
    assert "".join(one for one in found if isinstance(one, str)).endswith('{"city": "Par')


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_is_cut_off_keeps_what_there_is(streams):
    sample = SAMPLES["qwen"]
    text = sample.text[: sample.text.index("Par") + 3]
    found = read_text(sample.forms, text, ended=False, streams=streams)
    assert found[-1] == ("call", "get_weather", '{"city": "Par')


def test_read_is_what_the_helpers_say():
    vocabulary = Vocabulary(SAMPLES["qwen"].forms)
    tokens = vocabulary.tokens("ab<think>c", 2)
    assert [token.text + token.literal for token in tokens] == ["ab", "<think>", "c"]
    assert read(reader_of(vocabulary.forms), tokens) == [("text", "", "ab"), ("reasoning", "", "c")]
