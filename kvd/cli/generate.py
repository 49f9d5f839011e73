"""`kvctl generate` and `kvctl attach`: completions of one prompt, with their logprobs."""

from __future__ import annotations

import functools
from typing import Any

import rich_click as click

from kvd.cli.common import (
    CommonOptions,
    common_options,
    model_name,
    option,
    standard_panels,
)
from kvd.cli.console import print_message, read_stdin, stdout_console
from kvd.cli.logprobs import probabilities
from kvd.cli.options import KeepAlive, Tokens
from kvd.cli.sampling import logit_bias_option, sampling_options
from kvd.cli.stream import Stream, WholeChoices
from kvd.cli.structured import structured_options
from kvd.client import Completion
from kvd.host.exits import Exit
from protocol.errors import NotRunning
from protocol.tools import ChatOptions, Grammar, Tool
from protocol.types import ChatMessage

_END_PANEL = "When generation ends"
_end_option = functools.partial(option, panel=_END_PANEL)
_output_option = functools.partial(option, panel="Logprobs and scheduling")


@click.command(panels=standard_panels())
@model_name()
@click.argument(
    "prompt", help="Raw text, no chat template; - reads stdin, without its last newline."
)
@option("--n", "N", "Completions, 1 to 16.", default=1)
@sampling_options(temperature=0.0)
@logit_bias_option
@_end_option("--stop", "TEXT", "End before this text; repeatable.", multiple=True)
@_end_option(
    "--stop-token",
    "ID",
    "End before this token; repeatable.",
    name="stop_tokens",
    type=int,
    multiple=True,
)
@_end_option(
    "--min-tokens", "N", "Minimum tokens before a completion may end.", type=Tokens(), default=0
)
@click.option(
    "--ignore-eos", is_flag=True, help="Continue past the model's end token.", panel=_END_PANEL
)
@_end_option("--deadline", "SECONDS", "Fail if it takes longer.", name="deadline_s", type=float)
@structured_options()
@_output_option(
    "--logprobs",
    "N",
    "Show each token's probability and the N likeliest tokens (0 to 20).",
    type=int,
)
@_output_option("--prompt-logprobs", "N", "Show the same for the prompt's tokens.", type=int)
@_output_option("--priority", "N", "Higher priorities run first, -100 to 100.", default=0)
@_output_option(
    "--keep-alive",
    "TIME",
    "Unload the model after this time without requests: 5m, 0, or -1 for no limit.",
    name="keep_alive_s",
    type=KeepAlive(),
)
@_output_option(
    "--prefix-salt", "TEXT", "Share cached prompts only with requests that have this salt."
)
@common_options()
def generate(
    common: CommonOptions,
    model: str,
    prompt: str,
    *,
    grammar: Grammar | None,
    json_schema: Grammar | None,
    tools: list[Tool] | None,
    **options: Any,
) -> None:
    """Complete a prompt; stdout gets only the completion, token by token."""
    if grammar is not None and json_schema is not None:
        raise click.UsageError("--grammar and --json-schema exclude each other")
    with common.connected() as client:
        text = read_stdin() if prompt == "-" else prompt
        options["grammar"] = grammar or json_schema
        if tools is None:
            show(client.generate(model, text, **options), common)
        else:
            messages, chat = [ChatMessage("user", text)], ChatOptions(tools=tools)
            show(client.generate(model, messages=messages, chat=chat, **options), common)


@click.command()
@click.argument("request", help="The request's id, from the event `accepted`.")
@option("--n", "N", "Completions of the request.", default=1)
@common_options()
def attach(common: CommonOptions, request: str, n: int) -> None:
    """Fetch a completion that a restart of the daemon interrupted (`journal = "disk"`)."""
    with common.connected() as client:
        show(client.attach(request, choices=n), common)


def show(completion: Completion, common: CommonOptions) -> None:
    """Print a completion as it arrives; Ctrl-C cancels it."""
    kind = WholeChoices if len(completion.choices) > 1 else Stream
    stream = kind(completion, common)
    try:
        for event in stream:
            if common.json:
                common.print_json(event)
            else:
                stream.show(event)
    except NotRunning:
        if completion.request:
            print_message(
                "[dim]hint:[/] when a daemon runs again: kvctl attach {}", completion.request
            )
        raise
    finally:  # an error must not hide the text before it
        if not common.json:
            stream.end_line()
    if not common.json:
        _show_logprobs(completion)
    if completion.reason == "cancelled":
        raise SystemExit(Exit.INTERRUPTED)


def _show_logprobs(completion: Completion) -> None:
    several = len(completion.choices) > 1
    tables = [("PROMPT", completion.prompt_logprobs)]
    for number, choice in enumerate(completion.choices):
        tables.append((f"CHOICE {number}" if several else "TOKEN", choice.logprobs))
    console = stdout_console()
    for title, tokens in tables:
        if tokens:
            console.print()
            console.print(probabilities(title, tokens, console.width))
