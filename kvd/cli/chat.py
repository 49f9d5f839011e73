"""`kvctl chat`: its options; the conversation itself is in `kvd.cli.conversation`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvd.cli import sampling as how
from kvd.cli.common import HomeOption, JsonOption, ModelArgument, SocketOption, terms
from kvd.cli.conversation import Chat, Settings


def chat(
    context: typer.Context,
    model: ModelArgument,
    *,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message.")] = None,
    no_history: Annotated[
        bool, typer.Option("--no-history", metavar="", help="Keep nothing of what is typed.")
    ] = False,
    max_tokens: how.MaxTokens = None,
    temperature: how.Temperature = 0.7,
    top_p: how.TopP = 1.0,
    top_k: how.TopK = 0,
    min_p: how.MinP = 0.0,
    seed: how.Seed = None,
    repetition_penalty: how.RepetitionPenalty = 1.0,
    presence_penalty: how.PresencePenalty = 0.0,
    frequency_penalty: how.FrequencyPenalty = 0.0,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Converse with a model; /help lists the commands."""
    wanted = terms(context, home, socket, json=json)
    settings = Settings(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )
    with wanted.connected() as client:
        Chat(client, model, settings, wanted, system=system).run(keep=not no_history)
