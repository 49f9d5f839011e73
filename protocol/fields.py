"""Types of fields with their limits, for structs of both protocols."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_BYTES = 2**63 - 1
MAX_INT = 2**31 - 1
"""Limit of counts and token ids. JSON itself has none, but msgpack and arrays do."""
MAX_S = 365 * 24 * 3600.0
"""Limit of durations in seconds. Infinity and very large numbers overflow the system's timers."""

Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
PositiveCount = Annotated[int, Meta(ge=1, le=MAX_INT)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_S)]
PositiveSeconds = Annotated[float, Meta(gt=0.0, le=MAX_S)]
KeepAliveSeconds = Annotated[float, Meta(ge=-MAX_S, le=MAX_S)]
"""Seconds that a model stays loaded after its last request; negative: without a limit."""

TEXT_PATTERN = r"^[^\x00]*\Z"
TEXT_RULE = "must not contain NUL, which no path and no argument of a program can hold"
Name = Annotated[str, Meta(min_length=1, max_length=256, pattern=TEXT_PATTERN)]
Source = Annotated[str, Meta(min_length=1, max_length=4096, pattern=TEXT_PATTERN)]
"""What a model is loaded from: an embedded name, a folder or a Hub id."""
ALIAS_PATTERN = r"^(?!-)[A-Za-z0-9._:/@+-]+\Z"
"""Names appear in tables, logs and command lines, so control characters and spaces are excluded."""
ALIAS_RULE = "may hold letters, digits and ._:/@+- only, and must not start with -"
Alias = Annotated[str, Meta(min_length=1, max_length=256, pattern=ALIAS_PATTERN)]

MAX_CHOICES = 16
MAX_RANKS = 8
MAX_DEVICES = 64
MAX_LOGPROBS = 20
"""Most likely tokens reported per position; OpenAI's limit."""
MAX_LOGIT_BIASES = 1024
"""Maximum entries of ``logit_bias``, which are sent to the device when a row joins the batch."""
NO_LOGPROB = -9999.0
"""Logprob for a probability of 0, because JSON has no infinity; as in OpenAI and vLLM."""

TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
"""OpenAI's range; negative values favour tokens that occurred."""
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Ranks = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Device = Annotated[int, Meta(ge=0, lt=MAX_DEVICES)]
Choice = Annotated[int, Meta(ge=0, lt=MAX_CHOICES)]
"""Position of a choice among those of its request."""
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Priority = Annotated[int, Meta(ge=-100, le=100)]
DeadlineSeconds = Annotated[float, Meta(gt=0.0, le=7 * 24 * 3600.0)]
Salt = Annotated[str, Meta(max_length=256)]
StopTexts = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=16)]
StopTokens = Annotated[list[TokenId], Meta(max_length=64)]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=MAX_LOGIT_BIASES)
]
