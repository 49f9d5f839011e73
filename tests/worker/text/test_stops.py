"""Stop strings: the first one that is complete ends the text, for every split of the text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.worker.text.stops import MAX_STOP_CHARS, StopFilter
from protocol.errors import InvalidRequest
from tests.cpu_time import takes_less_than


def run(stops, pieces):
    """Return the whole text, and the stop string that ended it."""
    out = StopFilter(stops)
    text = "".join(out.push(piece) for piece in pieces)
    return text + out.finish(), out.found


def reference(stops, text):
    """Search every prefix of the text, shortest first, for a stop string at its end."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, ""


def test_without_stop_strings_text_is_not_held_back():
    out = StopFilter()
    assert [out.push("abc"), out.push(""), out.push("d"), out.finish()] == ["abc", "", "d", ""]


def test_a_stop_string_split_over_pieces_is_held_back_and_never_sent():
    out = StopFilter(["</end>"])
    assert [out.push(p) for p in ("a</", "en", "d>b", "c")] == ["a", "", "", ""]
    assert out.stopped
    assert out.finish() == ""


def test_text_that_does_not_become_a_stop_string_is_sent():
    out = StopFilter(["</end>"])
    assert [out.push(p) for p in ("a</", "en", "x")] == ["a", "", "</enx"]
    assert not out.stopped


def test_finish_returns_the_held_back_text():
    assert run(["stop"], ["so", " st"]) == ("so st", "")


def test_a_stop_string_at_the_very_start_leaves_nothing():
    assert run(["\n"], ["\nabc"]) == ("", "\n")


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["abcd", "bc"], "xabcd", ("xa", "bc")),  # the inner one is complete first
        (["bc", "abc"], "xabcd", ("x", "abc")),  # both at once: the longer
        (["aab"], "aaab", ("a", "aab")),
        (["abab"], "abaabab", ("aba", "abab")),
        (["👩‍👧"], "x👩‍👦👩‍👧y", ("x👩‍👦", "👩‍👧")),
        (["ab", "ab"], "cab", ("c", "ab")),
    ],
)
def test_overlaps(stops, text, expected):
    assert run(stops, [text]) == expected
    assert run(stops, list(text)) == expected


@settings(deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    pieces=st.lists(st.text("abc", max_size=6), max_size=12),
)
def test_any_split_gives_the_text_of_the_reference(stops, pieces):
    text = "".join(pieces)
    assert run(stops, pieces) == reference(stops, text)
    assert run(stops, list(text)) == reference(stops, text)


@settings(deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    text=st.text("abc", max_size=30),
)
def test_only_a_possible_stop_string_is_held_back(stops, text):
    out = StopFilter(stops)
    sent = ""
    for at, char in enumerate(text):
        sent += out.push(char)
        if out.stopped:
            return
        held = text[len(sent) : at + 1]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_empty_and_huge_stop_strings_are_refused():
    with pytest.raises(InvalidRequest, match="empty") as caught:
        StopFilter([""])
    assert caught.value.detail == {"field": "stop"}
    with pytest.raises(InvalidRequest, match="4096"):
        StopFilter(["x" * (MAX_STOP_CHARS + 1)])


def test_worst_case_stop_strings_take_linear_time():
    out = StopFilter(["a" * 4095 + str(at) for at in range(10)] + ["ab"] * 6)
    assert takes_less_than(2, lambda: [out.push("aaaa") for _ in range(2000)])
