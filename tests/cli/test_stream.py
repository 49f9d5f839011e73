"""What `kvctl generate` and `chat` show of a waiting request, on a terminal and in a pipe."""

from __future__ import annotations

import pytest
from rich.console import Console

from kvd.cli import stream
from kvd.cli.common import CommonOptions
from kvd.client import Completion
from protocol.messages import Event, Paused, Queued, Resumed, Tokens

EVENTS: list[Event] = [
    Queued(id="1", position=3),
    Paused(id="1", reason="restart"),
    Resumed(id="1"),
    Paused(id="1", reason="memory"),
    Tokens(id="1", index=0, tokens=[5], text="so"),
    Queued(id="1", position=1),
    Paused(id="1", reason="restart"),
]


def messages_for(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(stream, "stderr_console", lambda: Console(force_terminal=terminal))
    monkeypatch.setattr(stream, "print_message", lines.append)
    completion = Completion.__new__(Completion)
    shown = stream.Stream(completion, CommonOptions())
    for event in EVENTS:
        shown.show(event)
    return lines


def test_a_terminal_shows_why_a_request_waits_until_its_first_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = messages_for(monkeypatch, terminal=True)

    words = ("position 3", "worker restarts", "need the memory")
    assert all(word in line for word, line in zip(words, lines, strict=True))
    assert capsys.readouterr().out == "so"


def test_a_pipe_gets_only_the_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    assert messages_for(monkeypatch, terminal=False) == []
