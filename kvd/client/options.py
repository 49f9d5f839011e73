"""What a generate request may say, as keywords of both clients, and the request that they make.

The ranges are those of `protocol.types`, refused here already, with the option's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from msgspec import inspect

from protocol.errors import InvalidRequest
from protocol.messages import Generate
from protocol.types import ChatMessage, Sampling

Messages = Sequence[ChatMessage | tuple[str, str]]


class Options(TypedDict, total=False):
    """All optional; the fields of `protocol.messages.Generate` and `protocol.types.Sampling`."""

    max_tokens: int | None
    n: int
    stop: Sequence[str]
    stop_tokens: Sequence[int]
    ignore_eos: bool
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    priority: int
    deadline_s: float | None
    prefix_salt: str | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    logit_bias: Mapping[int, float]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float


class _Range:
    """What the protocol allows for one number."""

    def __init__(self, kind: inspect.IntType | inspect.FloatType) -> None:
        self.above = kind.gt
        self.low = kind.ge
        self.high = kind.le

    def __contains__(self, value: float) -> bool:
        # NaN is in no range, as every comparison with it fails.
        least = value > self.above if self.above is not None else value >= (self.low or 0)
        return bool(least and value <= (self.high or 0))

    def __str__(self) -> str:
        high = _plain(self.high or 0)
        if self.above is not None:
            return f"above {_plain(self.above)} and at most {high}"
        return f"between {_plain(self.low or 0)} and {high}"


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def _ranges(kinds: Iterable[Any]) -> dict[str, _Range]:
    found: dict[str, _Range] = {}
    for kind in kinds:
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        for field in info.fields:
            types = field.type.types if isinstance(field.type, inspect.UnionType) else [field.type]
            for one in types:
                if isinstance(one, inspect.IntType | inspect.FloatType) and one.le is not None:
                    found[field.encode_name] = _Range(one)
    return found


RANGES = _ranges((Generate, Sampling))


def check_number(name: str, value: float | None) -> None:
    """Refuse what `protocol.types` refuses, and what is no number in JSON: NaN and infinity."""
    if value is not None and value not in RANGES[name]:
        raise InvalidRequest(f"{name} must be {RANGES[name]}, not {value}", field=name)


def generate_request(
    request_id: str,
    model: str,
    prompt: str | None,
    messages: Messages | None,
    tokens: list[int] | None,
    options: Options,
) -> Generate:
    """Return the request; raises `InvalidRequest` for numbers out of range."""
    said: dict[str, Any] = dict(options)
    for name in RANGES.keys() & said.keys():
        check_number(name, said[name])
    drawn = {name: said.pop(name) for name in Sampling.__struct_fields__ if name in said}
    if "logit_bias" in drawn:
        drawn["logit_bias"] = dict(drawn["logit_bias"])
    for name in ("stop", "stop_tokens"):
        said[name] = list(said.get(name, ()))
    try:
        return Generate(
            id=request_id,
            model=model,
            prompt=prompt,
            messages=turns(messages),
            tokens=tokens,
            sampling=Sampling(**drawn),
            **said,
        )
    except ValueError as error:  # what its fields are together
        name, _, text = str(error).partition(": ")
        raise InvalidRequest(f"{name} {text}", field=name) from error


def turns(messages: Messages | None) -> list[ChatMessage] | None:
    """Return a conversation as it travels."""
    if messages is None:
        return None
    return [one if isinstance(one, ChatMessage) else _turn(*one) for one in messages]


def _turn(role: Any, content: str) -> ChatMessage:
    return ChatMessage(role, content)
