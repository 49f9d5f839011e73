"""The facts about a tokenizer that a worker needs to work without transformers, and their encoding.

`kvd.worker.tools.convert_tokenizer` makes records, `kvd.worker.text.tokenizer_cache` keeps them.
"""

from __future__ import annotations

import hashlib

import msgspec

_DIGEST_BYTES = 16
_FORMAT = b"kvd tokenizer 1\n"


class DamagedRecordError(ValueError):
    """The bytes are not those of a record."""


class TokenizerRecord(msgspec.Struct, frozen=True, kw_only=True, tag="record"):
    """A tokenizer that behaves with the library ``tokenizers`` alone as with transformers."""

    tokenizer: bytes
    """The JSON that ``tokenizers`` reads."""
    chat_template: str | dict[str, str] | None
    """The template, or several by name; None: the model has none."""
    special_tokens: dict[str, str]
    """Variables of templates, such as ``bos_token``."""
    special_ids: list[int]
    bos_id: int | None
    eos_id: int | None
    eos_ids: list[int]
    """All tokens that end an answer."""
    model_max_length: int | None
    """Tokens that the tokenizer's files allow; None: unknown."""
    splits_special: bool
    """Whether special tokens in texts are tokenized like other text."""
    cleans_up: bool
    """Whether decoding removes spaces before punctuation by default."""
    tool_parser: str
    """Name of mlx-lm's parser of the model's tool calls; empty: it has none."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    """Why a tokenizer needs transformers."""

    reason: str


Entry = TokenizerRecord | Refusal
_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


def to_bytes(entry: Entry) -> bytes:
    body = msgspec.msgpack.encode(entry)
    return _FORMAT + _digest(body) + body


def from_bytes(data: bytes) -> Entry:
    """Return an entry; raises `DamagedRecordError`."""
    start = len(_FORMAT) + _DIGEST_BYTES
    body = memoryview(data)[start:]
    if not data.startswith(_FORMAT) or data[len(_FORMAT) : start] != _digest(body):
        raise DamagedRecordError("its checksum does not match")
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedRecordError(str(error)) from error


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
