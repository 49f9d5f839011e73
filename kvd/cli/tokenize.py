"""`kvctl tokenize`: the tokens that a model reads for a text, or how many they are."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvd.cli.common import HomeOption, JsonOption, ModelArgument, SocketOption, stdin, talk, terms
from protocol.messages import MAX_LISTED_TOKENS


def tokenize(
    context: typer.Context,
    model: ModelArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text; - reads stdin.")],
    *,
    count: Annotated[
        bool, typer.Option("--count", "-c", metavar="", help="Print only how many there are.")
    ] = False,
    chat: Annotated[
        bool,
        typer.Option("--chat", metavar="", help="As a question in the model's chat template."),
    ] = False,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Print a text's tokens, a line each: the id, a tab, and the token's text in quotes."""
    wanted = terms(context, home, socket, json=json)
    with wanted.connected() as client:
        said = stdin() if text == "-" else text
        told = client.tokenize(
            model,
            None if chat else said,
            messages=[("user", said)] if chat else None,
            limit=0 if count else MAX_LISTED_TOKENS,
            texts=not count,
        )
        if wanted.json:
            counted = {"count": told.count}
            wanted.print_json(
                counted if count else {**counted, "tokens": told.tokens, "texts": told.texts}
            )
        elif count:
            sys.stdout.write(f"{told.count}\n")
        else:
            for token, piece in zip(told.tokens, told.texts, strict=True):
                sys.stdout.write(f"{token}\t{piece!r}\n")
    if not count and told.count > len(told.tokens):
        talk(f"the first {len(told.tokens)} of {told.count} tokens")
