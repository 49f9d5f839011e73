"""Wrong values are explained in words, for every form of constraint that the protocol uses."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from protocol.fields import Alias
from protocol.messages import Request
from protocol.validation import describe_error


class Inner(msgspec.Struct):
    role: Literal["a", "b"]


class Zoo(msgspec.Struct, forbid_unknown_fields=True):
    """One field for each form of constraint."""

    share: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.0
    over: Annotated[float, Meta(gt=0.5)] = 1.0
    below: Annotated[float, Meta(lt=3.0)] = 1.0
    chunk: Annotated[int, Meta(ge=64, le=8192, multiple_of=64)] = 64
    text: Annotated[str, Meta(min_length=1, max_length=4)] = "x"
    code: Annotated[str, Meta(min_length=2, pattern="^[a-z]+$")] = "xx"
    alias: Alias | None = None
    few: Annotated[list[int], Meta(min_length=1, max_length=1)] | None = None
    inner: list[Inner] = []
    bits: Literal[2, 3] = 2
    yes: bool = False
    either: str | Annotated[int, Meta(gt=0)] | None = None
    steps: Annotated[tuple[Inner, ...], Meta(max_length=1)] = ()
    by_number: dict[Annotated[int, Meta(ge=-2, lt=2)], Inner] = {}
    least: int = 0
    most: int = 9

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ValueError(f"least: must not be above most: {self.most}\nat all")


@pytest.mark.parametrize(
    ("value", "field", "says"),
    [
        ({"share": -1}, "share", "must be at least 0"),
        ({"share": 11}, "share", "must be at most 10"),
        ({"share": None}, "share", "must be a number, not null"),
        ({"share": "x"}, "share", "must be a number, not a text"),
        ({"share": {}}, "share", "must be a number, not an object"),
        ({"over": 0.5}, "over", "must be more than 0.5"),
        ({"below": 3}, "below", "must be less than 3"),
        ({"chunk": 65}, "chunk", "must be a multiple of 64"),
        ({"chunk": 64.5}, "chunk", "must be a whole number, not a number with a fraction"),
        ({"chunk": 10**30}, "chunk", "must be at most 8192"),
        ({"text": ""}, "text", "must not be empty"),
        ({"text": "xxxxx"}, "text", "must have at most 4 characters"),
        ({"code": "x"}, "code", "must have at least 2 characters"),
        ({"code": "XX"}, "code", "must match the pattern '^[a-z]+$'"),
        ({"alias": " "}, "alias", "may hold letters, digits and ._:/@+- only, and must not"),
        ({"alias": 3}, "alias", "must be a text or null, not a number"),
        ({"few": []}, "few", "must not be empty"),
        ({"few": [1, 2]}, "few", "must have at most 1 item"),
        ({"few": [None]}, "few[0]", "must be a whole number, not null"),
        ({"few": "x"}, "few", "must be a list or null, not a text"),
        ({"inner": [{"role": "a"}, {}]}, "inner[1].role", "is missing"),
        ({"inner": [{"role": "c"}]}, "inner[0].role", "must be one of a, b, not 'c'"),
        ({"inner": [{"role": "c" * 50}]}, "inner[0].role", "must be one of a, b"),
        ({"inner": [{"role": "\x1b"}]}, "inner[0].role", r"must be one of a, b, not '\x1b'"),
        ({"inner": [3]}, "inner[0]", "must be an object, not a number"),
        ({"bits": 7}, "bits", "must be one of 2, 3, not 7"),
        ({"yes": 1}, "yes", "must be true or false, not a number"),
        ({"either": 0}, "either", "must be at least 1"),
        ({"either": True}, "either", "must be a whole number or a text or null, not a boolean"),
        ({"shrae": 1}, "shrae", "is an unknown key; did you mean share?"),
        ({"qqqq": 1}, "qqqq", "is an unknown key; known keys: share, over"),
        ({"steps": [{"role": "c"}]}, "steps[0].role", "must be one of a, b, not 'c'"),
        ({"by_number": {"0": {"role": "c"}}}, "by_number[...].role", "must be one of a, b"),
        ({"by_number": []}, "by_number", "must be an object, not a list"),
        ({"least": 10}, "least", "must not be above most: 9"),
        ([], "", "must be an object, not a list"),
    ],
)
def test_every_message_form(value: Any, field: str, says: str):
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(json.dumps(value), type=Zoo)
    place, text = describe_error(str(caught.value), Zoo)

    assert field == place
    assert text.startswith(f"{field or 'the value'} {says}")
    assert "`" not in text
    assert "cccccc" not in text, "a long value is not repeated"


@pytest.mark.parametrize(
    ("key", "says"), [("x", "must be a whole number, not a text"), ("5", "must be at most 1")]
)
def test_errors_distinguish_keys_from_values(key: str, says: str):
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(json.dumps({"by_number": {key: {"role": "a"}}}), type=Zoo)

    assert describe_error(str(caught.value), Zoo) == ("by_number", f"a key of by_number {says}")


def test_a_number_out_of_range():
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(b'{"share":1e400}', type=Zoo)

    assert describe_error(str(caught.value), Zoo) == (
        "share",
        "share is a number too large to be read",
    )


def test_an_unknown_form_is_returned_unchanged():
    text = "Something new - at `$.a.b`"

    assert describe_error(text, Zoo) == ("a.b", text)


def forms(kind: msgspec.inspect.Type) -> set[str]:
    """Return the constraints that a type uses, anywhere inside."""
    found: set[str] = set()
    for name in kind.__struct_fields__:
        value = getattr(kind, name)
        if name in CONSTRAINTS and value is not None:
            found.add(name)
        inner = value if isinstance(value, tuple) else (value,)
        for it in inner:
            if isinstance(it, msgspec.inspect.Field):
                found |= forms(it.type)
            elif isinstance(it, msgspec.inspect.Type):
                found |= forms(it)
    return found


CONSTRAINTS = {"gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "pattern", "tz"}


def test_every_form_that_the_protocol_uses_is_tested():
    used = forms(msgspec.inspect.type_info(Request))

    assert {"ge", "le", "min_length", "max_length", "pattern"} <= used
    assert used <= forms(msgspec.inspect.type_info(Zoo))
