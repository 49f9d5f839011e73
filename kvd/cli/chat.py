"""`kvctl chat`: messages and /commands. Replies go to stdout, everything else to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import rich_click as click

from kvd.cli import chat_history
from kvd.cli.common import (
    CommonOptions,
    common_options,
    find_model,
    model_name,
    option,
    standard_panels,
    status_with,
)
from kvd.cli.console import print_message, stdout_console, write
from kvd.cli.sampling import sampling_options
from kvd.cli.stream import Stream
from kvd.cli.word_wrap import WordWrap
from kvd.client import Client, Completion
from kvd.client.options import check_number
from kvd.host.units import parse_tokens
from protocol.errors import ContextTooLong, InvalidRequest, KvdError, NotRunning, UnknownModel
from protocol.messages import Event, Tokens
from protocol.types import ChatMessage


@dataclass(frozen=True)
class Settings:
    """Sampling settings, which `/set` changes."""

    max_tokens: int | None = None
    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


_READERS: dict[str, Callable[[str], float]] = {
    "max_tokens": parse_tokens,
    "top_k": int,
    "seed": int,
}
"""How a setting is read; all others are decimal numbers."""


@click.command(panels=standard_panels())
@model_name()
@option("--system", "TEXT", "A system message.")
@click.option("--no-history", is_flag=True, help="Do not store the lines that you type.")
@sampling_options(temperature=Settings.temperature)
@common_options()
def chat(
    common: CommonOptions, model: str, *, system: str | None, no_history: bool, **sampling: Any
) -> None:
    """Chat with a model; /help lists the commands."""
    with common.connected() as client:
        conversation = Chat(client, model, Settings(**sampling), common, system=system)
        conversation.run(store_history=not no_history)


class Chat:
    """One conversation, until /exit or the end of input; errors of a reply do not end it."""

    def __init__(
        self,
        client: Client,
        model: str,
        settings: Settings,
        common: CommonOptions,
        *,
        system: str | None = None,
        keep_alive_s: float | None = None,
    ) -> None:
        self._client = client
        self._model = model
        self._settings = settings
        self._common = common
        self._system = system
        self._keep_alive_s = keep_alive_s
        self._messages: list[ChatMessage] = []
        self._last: ReplyTiming | None = None
        self._commands: dict[str, tuple[Callable[[str], object], str]] = {
            "help": (self._help, "show this list"),
            "new": (self._new, "start a new conversation"),
            "retry": (self._retry, "ask the last question again"),
            "system": (
                self._set_system,
                "TEXT  set the system message and start a new conversation",
            ),
            "set": (
                self._set,
                "NAME VALUE  change a sampling setting (default resets it); alone: show all",
            ),
            "history": (self._history, "show the conversation so far"),
            "model": (
                self._set_model,
                "NAME  continue with another model; alone: show the current one",
            ),
            "stats": (self._stats, "tokens and speed of the last reply"),
            "save": (self._save, "FILE  write the conversation as JSON"),
            "exit": (self._exit, "leave (also Ctrl-D)"),
        }

    def run(self, *, store_history: bool = True) -> None:
        for name, value in asdict(self._settings).items():
            check_number(name, value)
        self._check_model(self._model)  # before the first question is typed
        interactive = sys.stdin.isatty()
        with (
            chat_history.line_editing(self._common, list(self._commands), store=store_history)
            if interactive
            else nullcontext()
        ):
            if interactive:
                print_message("[bold]{}[/]  /help lists commands, Ctrl-C ends a reply", self._model)
            while True:
                try:
                    text = _read(interactive=interactive)
                except EOFError:
                    break
                except KeyboardInterrupt:
                    print_message("\n[dim]Ctrl-D or /exit leaves[/]")
                    continue
                try:
                    self._handle(text)
                except _Leave:
                    break
            if interactive:
                print_message("")

    def _check_model(self, name: str) -> None:
        status = status_with(self._client, name)
        if name not in status.unloaded:  # the first question loads an unloaded model
            find_model(status, name)

    def _handle(self, line: str) -> None:
        if line.startswith("/"):
            name, _, rest = line[1:].partition(" ")
            if name in {"quit", "bye"}:
                name = "exit"
            if name not in self._commands:
                print_message("[yellow]no command /{}[/]; /help lists the commands", name)
                return
            self._commands[name][0](rest.strip())
        elif line:
            self._ask(line)

    def _ask(self, text: str) -> None:
        self._messages.append(ChatMessage("user", text))
        try:
            completion = self._client.generate(
                self._model,
                messages=self._all_messages(),
                keep_alive_s=self._keep_alive_s,
                **asdict(self._settings),
            )
            self._last = ReplyTiming(completion)
            self._stream(completion)
        except NotRunning:
            raise
        except KvdError as error:
            self._messages.pop()
            self._common.report(error)
            if isinstance(error, ContextTooLong):
                print_message("[dim]hint:[/] /new starts a new conversation")
            elif error.retryable:
                print_message("[dim]hint:[/] ask again: {}", text)
            return
        choice = completion.choices[0]
        if text := choice.text_of("text"):
            self._messages.append(
                ChatMessage("assistant", text, reasoning=choice.text_of("reasoning"))
            )
        else:
            self._messages.pop()  # chat templates expect user and assistant to alternate

    def _all_messages(self) -> list[ChatMessage]:
        system = [ChatMessage("system", self._system)] if self._system else []
        return [*system, *self._messages]

    def _stream(self, completion: Completion) -> None:
        width = stdout_console().width if sys.stdout.isatty() else None
        stream = Stream(completion, self._common, WordWrap(width) if width else None)
        for event in stream:
            if self._last is not None:
                self._last.record(event)
            if self._common.json:
                self._common.print_json(event)
            else:
                stream.show(event)
        if self._common.json:
            return
        stream.end_aside()
        write("\n")
        if completion.reason == "stop" and not completion.text_so_far:
            print_message("[dim]an empty reply[/]")
        if completion.reason == "cancelled":
            print_message("[dim]cancelled[/]")
        elif completion.reason == "length":
            print_message("[dim]the reply reached its token limit (/set max_tokens raises it)[/]")

    def _help(self, _: str) -> None:
        for name, (_do, text) in self._commands.items():
            print_message("  [bold]/{}[/]  {}", name, text)

    def _new(self, _: str) -> None:
        self._messages.clear()
        print_message("[dim]new conversation[/]")

    def _retry(self, _: str) -> None:
        while self._messages and self._messages[-1].role == "assistant":
            self._messages.pop()
        if self._messages:
            self._ask(self._messages.pop().content)
        else:
            print_message("[yellow]no question to ask again[/]")

    def _set_system(self, text: str) -> None:
        self._system = text or None
        self._new("")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name in {field.name for field in fields(Settings)}:
            try:
                number: Any = getattr(Settings(), name)
                if value != "default":
                    number = _READERS.get(name, float)(value)
                    check_number(name, number)
                self._settings = replace(self._settings, **{name: number})
            except ValueError:
                print_message("[yellow]{} is not a value for {}[/]", repr(value), name)
                return
            except InvalidRequest as error:
                print_message("[yellow]{}[/]", error.message)
                return
        elif name:
            print_message("[yellow]no setting {}[/]", name)
        for name, number in asdict(self._settings).items():
            print_message(f"  {name:18} {'default' if number is None else number}")

    def _history(self, _: str) -> None:
        for message in self._messages:
            print_message("[bold]{}[/]  {}", message.role, message.content)

    def _set_model(self, name: str) -> None:
        if name:
            try:
                self._check_model(name)
            except UnknownModel as error:
                print_message("[yellow]{}[/]", error.message)
                return
            self._model = name
        print_message("[bold]{}[/]", self._model)

    def _stats(self, _: str) -> None:
        print_message(
            self._last.summary() if self._last is not None else "[yellow]no reply so far[/]"
        )

    def _save(self, name: str) -> None:
        if not name:
            print_message("[yellow]name a file: /save FILE[/]")
            return
        saved = {"model": self._model, "messages": self._all_messages()}
        try:
            Path(name).expanduser().write_bytes(msgspec.json.format(msgspec.json.encode(saved)))
        except OSError as error:
            print_message("[yellow]cannot write {}: {}[/]", name, error.strerror)
        else:
            print_message("[dim]saved in {}[/]", name)

    def _exit(self, _: str) -> None:
        raise _Leave


_BLOCK = '"""'


def _read(*, interactive: bool) -> str:
    """Read a question: one line, or several between triple quotes."""
    text = _read_line("› " if interactive else "")  # noqa: RUF001 - a prompt, not an angle
    if not text.lstrip().startswith(_BLOCK):
        return text.strip()
    text = text.lstrip().removeprefix(_BLOCK)
    while not text.rstrip().endswith(_BLOCK):
        text += "\n" + _read_line("… " if interactive else "")
    return text.rstrip().removesuffix(_BLOCK).strip("\n")


def _read_line(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    sys.stderr.write(prompt)  # stdout is a file or a pipe and gets only replies
    sys.stderr.flush()
    return input()


class ReplyTiming:
    """When the parts of a reply arrived."""

    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        self._began = time.monotonic()
        self._first: float | None = None
        self._last = self._began

    def record(self, event: Event) -> None:
        if isinstance(event, Tokens):
            self._last = time.monotonic()
            self._first = self._first or self._last

    def summary(self) -> str:
        usage = self._completion.usage
        if usage is None:
            return "[yellow]the last reply was interrupted[/]"
        parts = [f"prompt {usage.prompt_tokens} tokens"]
        if usage.cached_tokens:
            parts[0] += f" ({usage.cached_tokens} from the cache)"
        reply = f"reply {usage.completion_tokens} tokens"
        if self._first is not None:
            parts.append(f"first token after {self._first - self._began:.2f} s")
            if self._last > self._first:
                speed = (len(self._completion.tokens) - 1) / (self._last - self._first)
                reply += f", {speed:.1f} tokens/s"
        return "; ".join([*parts, reply])


class _Leave(Exception):
    pass
