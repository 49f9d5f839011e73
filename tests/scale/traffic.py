"""Clients of a router: streams while a daemon dies, and conversations with cached prefixes."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.scale.fleet import DAEMONS, Fleet, Member

PATH = "/v1/chat/completions"
STREAM_S = 180.0
"""Timeout of a stream that usually takes some seconds, because the machine may be busy."""


def place_of(headers: Mapping[str, str]) -> str:
    """Return the address of the daemon that answered: the last one that the router tried."""
    if (base := headers.get("x-litellm-model-api-base")) is not None:
        return base.removeprefix("http://").removesuffix("/v1")
    return re.split(", | : ", headers.get("x-kvd-daemon", ""))[-1]


def chat(*texts: str, system: str = "", **fields: Any) -> dict[str, Any]:
    """Return the body of a chat: messages of the user and the assistant in turns."""
    roles = ("user", "assistant")
    said = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    head = [{"role": "system", "content": system}] if system else []
    return {"model": "fast", "messages": head + said, "max_tokens": 8, "seed": 1} | fields


@dataclass
class Stream(threading.Thread):
    """Reads a streamed chat in the background."""

    url: str
    body: dict[str, Any]
    headers: dict[str, str]
    text: str = ""
    status: int = 0
    place: str = ""
    """Address of the daemon that answered."""
    complete: bool = False
    """Whether the stream ended as it should."""
    error: str = ""
    begun: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self.start()

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        body = self.body | {"stream": True}
        try:
            with httpx.stream(
                "POST",
                f"{self.url}/v1/chat/completions",
                json=body,
                headers=self.headers,
                timeout=STREAM_S,
            ) as answer:
                self.status = answer.status_code
                self.place = place_of(answer.headers)
                for line in answer.iter_lines():
                    self._read(line)
        except httpx.HTTPError as error:
            self.error = repr(error)
        finally:
            self.begun.set()

    def _read(self, line: str) -> None:
        if line == "data: [DONE]":
            self.complete = True
        elif line.startswith("data: "):
            piece = json.loads(line[6:])
            if "error" in piece:
                self.error = str(piece["error"])
            for choice in piece.get("choices", ()):
                self.text += choice["delta"].get("content") or ""
            if self.text:
                self.begun.set()

    def finished(self) -> Stream:
        self.join(STREAM_S)
        assert not self.is_alive(), "the stream did not end"
        return self


@dataclass(frozen=True)
class Hits:
    """Prompt tokens of a conversation's requests, and how many of them were cached."""

    prompt: int = 0
    cached: int = 0

    @property
    def rate(self) -> float:
        return self.cached / self.prompt

    def __add__(self, other: Hits) -> Hits:
        return Hits(self.prompt + other.prompt, self.cached + other.cached)


def hits_of(usage: dict[str, Any]) -> Hits:
    return Hits(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


SYSTEM = "You are an agent. " * 60


def converse(client: httpx.Client, salt: str, session: int, *, by_header: bool) -> Hits:
    """Send a conversation of several requests, each with the texts before it; return its hits."""
    said = [f"Task {session}: " + f"read file {session} and report. " * 12]
    found = Hits()
    for _ in range(6):
        body = chat(*said, system=SYSTEM, cache_salt=salt)
        headers = {"X-Session-Id": f"{salt}-{session}"} if by_header else {}
        answer = client.post(PATH, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        found += hits_of(answer.json()["usage"])
        said += [answer.json()["choices"][0]["message"]["content"], "Go on, please. " * 30]
    return found


def converse_all(client: httpx.Client, salt: str, *, by_header: bool = False) -> Hits:
    """Hold 12 conversations of 6 requests, 6 at once; ``by_header``: with a session in a header."""

    def hold(number: int) -> Hits:
        return converse(client, salt, number, by_header=by_header)

    with ThreadPoolExecutor(6) as pool:
        return sum(pool.map(hold, range(12)), Hits())


@dataclass
class Streams:
    """Streams of as many sessions through a router, one of whose daemons is killed."""

    url: str
    all: list[Stream]
    model: str
    tokens: int
    headers: dict[str, str]

    @classmethod
    def begun(
        cls,
        url: str,
        count: int,
        *,
        model: str,
        tokens: int,
        headers: dict[str, str] | None = None,
    ) -> Streams:
        """Start them and wait until each has tokens."""
        streams = cls(url, [], model, tokens, headers or {})
        streams.all = [streams._begin(number) for number in range(count)]
        assert all(stream.begun.wait(STREAM_S) for stream in streams.all)
        assert not any(stream.error for stream in streams.all)
        return streams

    def _begin(self, number: int) -> Stream:
        body = chat("Count", model=self.model, max_tokens=self.tokens, seed=number)
        return Stream(self.url, body, self.headers | {"X-Session-Id": f"session-{number}"})

    def kill_most_used(self, fleet: Fleet) -> Member:
        share = Counter(stream.place for stream in self.all)
        assert len(share) == DAEMONS, share
        victim = fleet.at(share.most_common(1)[0][0])
        assert victim.running(self.model) == share[victim.place], "some have ended already"
        victim.signal(9)
        return victim

    def check(self, victim: Member) -> list[Stream]:
        """Check that only the victim's streams broke, visibly, and that their retries succeed."""
        for stream in self.all:
            stream.finished()
        lost = [stream for stream in self.all if stream.place == victim.place]
        kept = [stream for stream in self.all if stream.place != victim.place]
        assert [stream.error for stream in kept if stream.error or not stream.complete] == []
        assert all(stream.error for stream in lost), "a cut stream shows it"
        retries = [self._begin(self.all.index(stream)) for stream in lost]
        for old, new in zip(lost, retries, strict=True):
            assert (new.finished().error, new.complete) == ("", True)
            assert new.text.startswith(old.text), "the retry has the same tokens"
            assert new.place != victim.place
        return lost
