"""`kvctl generate`: one prompt, one or several completions, and how likely they were."""

from __future__ import annotations

from typing import Annotated

import typer

from kvd.cli import sampling as how
from kvd.cli.common import (
    HomeOption,
    JsonOption,
    ModelArgument,
    SocketOption,
    Terms,
    stdin,
    stdout_console,
    talk,
    terms,
)
from kvd.cli.logprobs import probabilities
from kvd.cli.stream import Several, Stream
from kvd.client import Completion
from kvd.host.exits import Exit
from protocol.errors import NotRunning

_END = "Where it ends"
_MORE = "What is told, and when"


def generate(
    context: typer.Context,
    model: ModelArgument,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="Raw text, no chat template; - reads stdin.")
    ],
    *,
    max_tokens: how.MaxTokens = None,
    n: Annotated[int, typer.Option("--n", metavar="N", help="Completions, 1 to 16.")] = 1,
    temperature: how.Temperature = 0.0,
    top_p: how.TopP = 1.0,
    top_k: how.TopK = 0,
    min_p: how.MinP = 0.0,
    seed: how.Seed = None,
    repetition_penalty: how.RepetitionPenalty = 1.0,
    presence_penalty: how.PresencePenalty = 0.0,
    frequency_penalty: how.FrequencyPenalty = 0.0,
    logit_bias: how.LogitBias = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", rich_help_panel=_END, help="End before this text; may be repeated."
        ),
    ] = None,
    stop_token: Annotated[
        list[int] | None,
        typer.Option(
            "--stop-token", metavar="ID", rich_help_panel=_END, help="The same, of a token."
        ),
    ] = None,
    min_tokens: Annotated[
        int,
        typer.Option(
            "--min-tokens", metavar="N", rich_help_panel=_END, help="Do not end before so many."
        ),
    ] = 0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            metavar="",
            rich_help_panel=_END,
            help="The model's own end ends nothing.",
        ),
    ] = False,
    deadline: Annotated[
        float | None,
        typer.Option(
            "--deadline", metavar="SECONDS", rich_help_panel=_END, help="Fail if it takes longer."
        ),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs",
            metavar="N",
            rich_help_panel=_MORE,
            help="Show how likely each token was, and the N likeliest (0 to 20).",
        ),
    ] = None,
    prompt_logprobs: Annotated[
        int | None,
        typer.Option(
            "--prompt-logprobs",
            metavar="N",
            rich_help_panel=_MORE,
            help="The same of the prompt's tokens.",
        ),
    ] = None,
    priority: Annotated[
        int,
        typer.Option(
            "--priority", metavar="N", rich_help_panel=_MORE, help="Higher goes first, -100 to 100."
        ),
    ] = 0,
    prefix_salt: Annotated[
        str | None,
        typer.Option(
            "--prefix-salt",
            metavar="TEXT",
            rich_help_panel=_MORE,
            help="Share cached prompts with requests of this salt only.",
        ),
    ] = None,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Complete a prompt; only the completion goes to stdout, as it comes."""
    wanted = terms(context, home, socket, json=json)
    bias = how.biases(logit_bias)
    with wanted.connected() as client:
        completion = client.generate(
            model,
            stdin() if prompt == "-" else prompt,
            max_tokens=max_tokens,
            n=n,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=bias,
            stop=stop or (),
            stop_tokens=stop_token or (),
            min_tokens=min_tokens,
            ignore_eos=ignore_eos,
            deadline_s=deadline,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            priority=priority,
            prefix_salt=prefix_salt,
        )
        _show(completion, wanted)
        if completion.reason == "cancelled":
            raise typer.Exit(Exit.INTERRUPTED)


def attach(
    context: typer.Context,
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="The request, as `accepted` named it.")
    ],
    *,
    n: Annotated[int, typer.Option("--n", metavar="N", help="The completions that it has.")] = 1,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Fetch a completion whose daemon died: what it had, and the rest (`journal = "disk"`)."""
    wanted = terms(context, home, socket, json=json)
    with wanted.connected() as client:
        completion = client.attach(request, choices=n)
        _show(completion, wanted)
        if completion.reason == "cancelled":
            raise typer.Exit(Exit.INTERRUPTED)


def _show(completion: Completion, wanted: Terms) -> None:
    stream = Several(completion) if len(completion.choices) > 1 else Stream(completion)
    try:
        for event in stream:
            if wanted.json:
                wanted.print_json(event)
            else:
                stream.show(event)
    except NotRunning:
        if completion.request:
            talk("[dim]hint:[/] once a daemon runs: kvctl attach {}", completion.request)
        raise
    finally:  # what came before an error is shown whole
        if not wanted.json:
            stream.end_line()
    if not wanted.json:
        _show_logprobs(completion)


def _show_logprobs(completion: Completion) -> None:
    several = len(completion.choices) > 1
    told = [("PROMPT", completion.prompt_logprobs)]
    for number, choice in enumerate(completion.choices):
        told.append((f"CHOICE {number}" if several else "TOKEN", choice.logprobs))
    console = stdout_console()
    for title, tokens in told:
        if tokens:
            console.print()
            console.print(probabilities(title, tokens, console.width))
