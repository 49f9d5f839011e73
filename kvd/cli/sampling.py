"""Options that say how a completion is drawn; `kvctl generate` and `kvctl chat` share them."""

from __future__ import annotations

import re
from typing import Annotated

import typer

_PANEL = "Sampling"

MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", metavar="N", help="Tokens at most (default: 512 or what fits)."),
]
Temperature = Annotated[
    float, typer.Option(metavar="T", rich_help_panel=_PANEL, help="0 is greedy.")
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p", metavar="P", rich_help_panel=_PANEL, help="Share of probability that is kept."
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        "--top-k", metavar="K", rich_help_panel=_PANEL, help="Tokens that are kept; 0 keeps all."
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p",
        metavar="P",
        rich_help_panel=_PANEL,
        help="Floor, as a share of the likeliest.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N", rich_help_panel=_PANEL, help="Same seed, same tokens (default: drawn)."
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        "--repetition-penalty",
        metavar="X",
        rich_help_panel=_PANEL,
        help="Above 1: tokens of prompt and completion become less likely.",
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        "--presence-penalty",
        metavar="X",
        rich_help_panel=_PANEL,
        help="Taken from tokens that the completion has, -2 to 2.",
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(
        "--frequency-penalty",
        metavar="X",
        rich_help_panel=_PANEL,
        help="The same for each time that it has them.",
    ),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        "--logit-bias",
        metavar="ID=BIAS",
        rich_help_panel=_PANEL,
        help="Added to a token's logit, -100 to 100; may be repeated.",
    ),
]
_BIAS = re.compile(r"(\d+)=([+-]?(?:\d+\.?\d*|\.\d+))")


def biases(texts: list[str] | None) -> dict[int, float]:
    """Return what ``--logit-bias`` says; a usage error for what is no ID=BIAS."""
    found: dict[int, float] = {}
    for text in texts or ():
        said = _BIAS.fullmatch(text.strip())
        if said is None or int(said[1]) in found:
            wrong = "names a token twice" if said else "is no ID=BIAS, such as 42=-5"
            raise typer.BadParameter(f"--logit-bias {wrong}: {text[:40]}")
        found[int(said[1])] = float(said[2])
    return found
