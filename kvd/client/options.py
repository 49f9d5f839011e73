"""Options of a generate request, as keywords of both clients.

Numbers are checked against the ranges of `protocol.types` before the request is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from msgspec import inspect

from protocol.errors import InvalidRequest
from protocol.messages import Generate
from protocol.tools import ChatOptions, Grammar
from protocol.types import ChatMessage, Sampling

Messages = Sequence[ChatMessage | tuple[str, str]]


class Options(TypedDict, total=False):
    """The optional fields of `protocol.messages.Generate` and `protocol.types.Sampling`."""

    chat: ChatOptions
    grammar: Grammar | None
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
    keep_alive_s: float | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    logit_bias: Mapping[int, float]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float


@dataclass(frozen=True)
class _Range:
    """The values that the protocol allows for one number."""

    above: float | None
    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        # NaN is outside every range: all comparisons with it are false.
        least = value > self.above if self.above is not None else value >= self.low
        return least and value <= self.high

    def __str__(self) -> str:
        if self.above is not None:
            return f"above {_plain(self.above)} and at most {_plain(self.high)}"
        return f"between {_plain(self.low)} and {_plain(self.high)}"


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def _ranges(structs: Iterable[Any]) -> dict[str, _Range]:
    found: dict[str, _Range] = {}
    for struct in structs:
        info = inspect.type_info(struct)
        assert isinstance(info, inspect.StructType)
        for field in info.fields:
            types = field.type.types if isinstance(field.type, inspect.UnionType) else [field.type]
            for kind in types:
                if isinstance(kind, inspect.IntType | inspect.FloatType) and kind.le is not None:
                    found[field.encode_name] = _Range(kind.gt, kind.ge or 0, kind.le)
    return found


RANGES = _ranges((Generate, Sampling))


def check_number(name: str, value: float | None) -> None:
    """Raise `InvalidRequest` for numbers out of range, NaN and infinity."""
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
    fields: dict[str, Any] = dict(options)
    for name in RANGES.keys() & fields.keys():
        check_number(name, fields[name])
    sampling = {name: fields.pop(name) for name in Sampling.__struct_fields__ if name in fields}
    if "logit_bias" in sampling:
        sampling["logit_bias"] = dict(sampling["logit_bias"])
    for name in ("stop", "stop_tokens"):
        fields[name] = list(fields.get(name, ()))
    try:
        return Generate(
            id=request_id,
            model=model,
            prompt=prompt,
            messages=chat_messages(messages),
            tokens=tokens,
            sampling=Sampling(**sampling),
            **fields,
        )
    except ValueError as error:  # the fields contradict each other
        name, _, text = str(error).partition(": ")
        raise InvalidRequest(f"{name} {text}", field=name) from error


def chat_messages(messages: Messages | None) -> list[ChatMessage] | None:
    """Return messages as the protocol sends them; tuples are (role, content)."""
    if messages is None:
        return None
    return [
        message if isinstance(message, ChatMessage) else _chat_message(*message)
        for message in messages
    ]


def _chat_message(role: Any, content: str) -> ChatMessage:
    return ChatMessage(role, content)
