"""The number of values of a body is bounded before it is decoded."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.http import json_size
from kvd.http.json_size import check_size
from protocol.errors import InvalidRequest

values = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a"\\,[{:é', max_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text('b",[{\\'), inner),
    max_leaves=40,
)


def counted(value) -> tuple[int, int, int]:
    """Return the containers, the commas between values, and the strings."""
    if isinstance(value, str):
        return 0, 0, 1
    if not isinstance(value, dict | list):
        return 0, 0, 0
    inner = [counted(one) for one in (value.values() if isinstance(value, dict) else value)]
    names = len(value) if isinstance(value, dict) else 0
    containers, commas, strings = (sum(column) for column in zip((0, 0, 0), *inner, strict=True))
    return 1 + containers, max(0, len(value) - 1) + commas, names + strings


@given(values, st.booleans(), st.sampled_from([None, 1]))
def test_only_values_count_and_not_the_characters_of_texts(value, is_ascii, indent):
    body = json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode()
    containers, commas, strings = counted(value)
    limits = {
        "MOST_CONTAINERS": containers,
        "MOST_STRINGS": strings,
        "MOST_VALUES": containers + commas,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "_SMALL_BYTES", 0)
        for name, limit in limits.items():
            patch.setattr(json_size, name, limit)
        check_size(body, containers + commas)
        for name, limit in limits.items():
            if limit:
                patch.setattr(json_size, name, limit - 1)
                with pytest.raises(InvalidRequest, match="send at most"):
                    check_size(body, json_size.MOST_VALUES)
                patch.setattr(json_size, name, limit)


def test_a_long_text_full_of_brackets_is_accepted():
    content = '[{"a", "b"}],' * 100_000
    check_size(json.dumps({"messages": [{"role": "user", "content": content}]}).encode())


@pytest.mark.parametrize("piece", [b"[]", b'""', b"0", b'{"a":1}'])
def test_a_body_of_many_small_values_is_refused(piece):
    with pytest.raises(InvalidRequest, match="send at most"):
        check_size(b'{"model":"m","x":[%b]}' % b",".join([piece] * 300_000))


def test_a_million_tokens_are_accepted_where_tokens_may_be():
    check_size(b'{"prompt":[%b]}' % b",".join([b"1"] * 1_000_000), 2_000_000)
