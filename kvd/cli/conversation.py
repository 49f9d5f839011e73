"""One conversation: turns, history and /commands. Replies go to stdout, all else to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from kvd.cli import chat_history
from kvd.cli.common import Terms, model_in, stdout_console, talk
from kvd.cli.stream import Stream
from kvd.cli.word_wrap import Wrap
from kvd.client import Client, Completion
from kvd.client.options import check_number
from protocol.errors import ContextTooLong, InvalidRequest, KvdError, NotRunning, UnknownModel
from protocol.messages import Event, Tokens
from protocol.types import ChatMessage


@dataclass(frozen=True)
class Settings:
    """What `/set` changes."""

    max_tokens: int | None = None
    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


_INTEGERS = {"max_tokens", "top_k", "seed"}


class Chat:
    """One conversation. Lives until /exit or the end of input, whatever a reply does."""

    def __init__(
        self,
        client: Client,
        model: str,
        settings: Settings,
        terms: Terms,
        *,
        system: str | None = None,
    ) -> None:
        self._client = client
        self._model = model
        self._settings = settings
        self._terms = terms
        self._system = system
        self._turns: list[ChatMessage] = []
        self._last: Clock | None = None
        self._commands: dict[str, tuple[Callable[[str], object], str]] = {
            "help": (self._help, "show this"),
            "new": (self._new, "forget the conversation"),
            "retry": (self._retry, "ask the last question again"),
            "system": (self._set_system, "TEXT  set the system message, and start anew"),
            "set": (
                self._set,
                "NAME VALUE  change a sampling value, or to default; alone: show",
            ),
            "history": (self._history, "show the conversation so far"),
            "model": (self._set_model, "NAME  go on with another model; alone: show"),
            "stats": (self._stats, "tokens and speed of the last reply"),
            "save": (self._save, "FILE  write the conversation as JSON"),
            "exit": (self._exit, "leave (also Ctrl-D)"),
        }

    def run(self, *, keep: bool = True) -> None:
        """Converse until the user leaves; `keep` what they type for the next time."""
        for name, value in asdict(self._settings).items():
            check_number(name, value)
        self._require_model()
        interactive = sys.stdin.isatty()
        with (
            chat_history.kept(self._terms, list(self._commands), keep=keep)
            if interactive
            else nullcontext()
        ):
            if interactive:
                talk("[bold]{}[/]  /help lists commands, Ctrl-C ends a reply", self._model)
            while True:
                try:
                    text = _read(interactive=interactive)
                except EOFError:
                    break
                except KeyboardInterrupt:
                    talk("\n[dim]Ctrl-D or /exit leaves[/]")
                    continue
                try:
                    self._line(text)
                except _Leave:
                    break
            if interactive:
                talk("")

    def _require_model(self) -> None:
        """Say now, and not after the first question, that there is no such model."""
        self._check_model(self._model)

    def _check_model(self, name: str) -> None:
        status = self._client.status()
        if name not in status.unloaded:  # those come with the first question
            model_in(status, name)

    def _line(self, line: str) -> None:
        if line.startswith("/"):
            name, _, rest = line[1:].partition(" ")
            if name in {"quit", "bye"}:
                name = "exit"
            if name not in self._commands:
                talk("[yellow]no command /{}[/]; /help lists them", name)
                return
            self._commands[name][0](rest.strip())
        elif line:
            self._ask(line)

    def _ask(self, text: str) -> None:
        self._turns.append(ChatMessage("user", text))
        messages = [ChatMessage("system", self._system)] if self._system else []
        try:
            completion = self._client.generate(
                self._model, messages=[*messages, *self._turns], **asdict(self._settings)
            )
            self._last = Clock(completion)
            self._stream(completion)
        except NotRunning:
            raise
        except KvdError as error:
            self._turns.pop()
            self._terms.complain(error)
            if isinstance(error, ContextTooLong):
                talk("[dim]hint:[/] /new starts a new conversation")
            elif error.retryable:
                talk("[dim]hint:[/] ask again: {}", text)
            return
        if completion.text_so_far:
            self._turns.append(ChatMessage("assistant", completion.text_so_far))
        else:
            self._turns.pop()  # two questions in a row are no conversation

    def _stream(self, completion: Completion) -> None:
        wide = stdout_console().width if sys.stdout.isatty() else None
        stream = Stream(completion, Wrap(wide) if wide else None)
        for event in stream:
            if self._last is not None:
                self._last.see(event)
            if self._terms.json:
                self._terms.print_json(event)
            else:
                stream.show(event)
        if self._terms.json:
            return
        sys.stdout.write("\n")
        sys.stdout.flush()
        if completion.reason == "stop" and not completion.text_so_far:
            talk("[dim]an empty reply[/]")
        if completion.reason == "cancelled":
            talk("[dim]cancelled[/]")
        elif completion.reason == "length":
            talk("[dim]cut: the reply was as long as it may be (/set max_tokens)[/]")

    def _help(self, _: str) -> None:
        for name, (_do, text) in self._commands.items():
            talk("  [bold]/{}[/]  {}", name, text)

    def _new(self, _: str) -> None:
        self._turns.clear()
        talk("[dim]new conversation[/]")

    def _retry(self, _: str) -> None:
        while self._turns and self._turns[-1].role == "assistant":
            self._turns.pop()
        if self._turns:
            self._ask(self._turns.pop().content)
        else:
            talk("[yellow]nothing to ask again[/]")

    def _set_system(self, text: str) -> None:
        self._system = text or None
        self._new("")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name in {field.name for field in fields(Settings)}:
            try:
                number: Any = getattr(Settings(), name)
                if value != "default":
                    number = int(value) if name in _INTEGERS else float(value)
                    check_number(name, number)
                self._settings = replace(self._settings, **{name: number})
            except ValueError:
                talk("[yellow]{} is no value for {}[/]", repr(value), name)
                return
            except InvalidRequest as error:
                talk("[yellow]{}[/]", error.message)
                return
        elif name:
            talk("[yellow]no setting {}[/]", name)
        for name, number in asdict(self._settings).items():
            talk(f"  {name:18} {'default' if number is None else number}")

    def _history(self, _: str) -> None:
        for turn in self._turns:
            talk("[bold]{}[/]  {}", turn.role, turn.content)

    def _set_model(self, name: str) -> None:
        if name:
            try:
                self._check_model(name)
            except UnknownModel as error:
                talk("[yellow]{}[/]", error.message)
                return
            self._model = name
        talk("[bold]{}[/]", self._model)

    def _stats(self, _: str) -> None:
        talk(self._last.said() if self._last is not None else "[yellow]no reply so far[/]")

    def _save(self, name: str) -> None:
        if not name:
            talk("[yellow]give a file: /save FILE[/]")
            return
        first = [ChatMessage("system", self._system)] if self._system else []
        whole = {"model": self._model, "messages": [*first, *self._turns]}
        try:
            Path(name).expanduser().write_bytes(msgspec.json.format(msgspec.json.encode(whole)))
        except OSError as error:
            talk("[yellow]cannot write {}: {}[/]", name, error.strerror)
        else:
            talk("[dim]saved in {}[/]", name)

    def _exit(self, _: str) -> None:
        raise _Leave


_BLOCK = '"""'


def _read(*, interactive: bool) -> str:
    """Read a question: a line, or what stands between two lines' triple quotes."""
    text = _line("› " if interactive else "")  # noqa: RUF001 - a prompt, not an angle
    if not text.lstrip().startswith(_BLOCK):
        return text.strip()
    text = text.lstrip().removeprefix(_BLOCK)
    while not text.rstrip().endswith(_BLOCK):
        text += "\n" + _line("… " if interactive else "")
    return text.rstrip().removesuffix(_BLOCK).strip("\n")


def _line(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    sys.stderr.write(prompt)  # replies go into a file: the prompt does not
    sys.stderr.flush()
    return input()


class Clock:
    """When the parts of a reply came."""

    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        self._began = time.monotonic()
        self._first: float | None = None
        self._last = self._began

    def see(self, event: Event) -> None:
        """Note that something came."""
        if isinstance(event, Tokens):
            self._last = time.monotonic()
            self._first = self._first or self._last

    def said(self) -> str:
        """Return it in words."""
        usage = self._completion.usage
        if usage is None:
            return "[yellow]the last reply did not end[/]"
        parts = [f"prompt {usage.prompt_tokens} tokens"]
        if usage.cached_tokens:
            parts[0] += f" ({usage.cached_tokens} from the cache)"
        reply = f"reply {usage.completion_tokens} tokens"
        if self._first is not None:
            parts.append(f"first token after {self._first - self._began:.2f} s")
            if self._last > self._first:
                speed = (len(self._completion.tokens) - 1) / (self._last - self._first)
                reply += f", {speed:.1f} a second"
        return "; ".join([*parts, reply])


class _Leave(Exception):
    pass
