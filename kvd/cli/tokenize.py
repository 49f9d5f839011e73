"""`kvctl tokenize`: the tokens of a text, or their number."""

from __future__ import annotations

import sys

import rich_click as click

from kvd.cli.common import CommonOptions, common_options, model_name
from kvd.cli.console import print_message, read_stdin
from protocol.messages import MAX_LISTED_TOKENS


@click.command()
@model_name()
@click.argument("text", help="The text; - reads stdin, without its last newline.")
@click.option("--count", "-c", is_flag=True, help="Print only the number of tokens.")
@click.option("--chat", is_flag=True, help="Wrap it in the model's chat template as a question.")
@common_options()
def tokenize(common: CommonOptions, model: str, text: str, *, count: bool, chat: bool) -> None:
    """Print a text's tokens, one per line: the id, a tab, and the token's text in quotes."""
    with common.connected() as client:
        content = read_stdin() if text == "-" else text
        reply = client.tokenize(
            model,
            None if chat else content,
            messages=[("user", content)] if chat else None,
            limit=0 if count else MAX_LISTED_TOKENS,
            texts=not count,
        )
        if common.json:
            values: dict[str, object] = {"count": reply.count}
            if not count:
                values |= {"tokens": reply.tokens, "texts": reply.texts}
            common.print_json(values)
        elif count:
            sys.stdout.write(f"{reply.count}\n")
        else:
            for token, piece in zip(reply.tokens, reply.texts, strict=True):
                sys.stdout.write(f"{token}\t{piece!r}\n")
    if not count and reply.count > len(reply.tokens):
        print_message(f"the first {len(reply.tokens)} of {reply.count} tokens")
