"""Sampling options of `kvctl generate` and `kvctl chat`, named as `Client.generate` names them."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

import rich_click as click

from kvd.cli.common import option_group

if TYPE_CHECKING:
    from kvd.cli.common import Decorator

_BIAS = re.compile(r"(\d+)=([+-]?(?:\d+\.?\d*|\.\d+))")
_option = functools.partial(click.option, panel="Sampling")


def sampling_options(*, temperature: float) -> Decorator:
    """Give a command these options; ``temperature`` is that option's default."""
    return option_group(
        click.option(
            "--max-tokens",
            metavar="N",
            type=int,
            help="Maximum tokens of a completion (default: 512, or what fits).",
        ),
        _option("--temperature", metavar="T", type=float, default=temperature, help="0 is greedy."),
        _option(
            "--top-p",
            metavar="P",
            type=float,
            default=1.0,
            help="Keep the likeliest tokens with this total probability.",
        ),
        _option(
            "--top-k",
            metavar="K",
            type=int,
            default=0,
            help="Keep this many of the likeliest tokens; 0 keeps all.",
        ),
        _option(
            "--min-p",
            metavar="P",
            type=float,
            default=0.0,
            help="Minimum probability, relative to the likeliest token.",
        ),
        _option(
            "--seed",
            metavar="N",
            type=int,
            help="The same seed gives the same tokens (default: random).",
        ),
        _option(
            "--repetition-penalty",
            metavar="X",
            type=float,
            default=1.0,
            help="Above 1: tokens of prompt and completion become less likely.",
        ),
        _option(
            "--presence-penalty",
            metavar="X",
            type=float,
            default=0.0,
            help="Subtracted from the logits of tokens in the completion, -2 to 2.",
        ),
        _option(
            "--frequency-penalty",
            metavar="X",
            type=float,
            default=0.0,
            help="Subtracted once for each occurrence in the completion, -2 to 2.",
        ),
    )


def _biases(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for text in texts:
        found = _BIAS.fullmatch(text.strip())
        if found is None or int(found[1]) in biases:
            wrong = "names a token twice" if found else "is not ID=BIAS, such as 42=-5"
            raise click.BadParameter(f"{text[:40]!r} {wrong}")
        biases[int(found[1])] = float(found[2])
    return biases


logit_bias_option: Decorator = _option(
    "--logit-bias",
    metavar="ID=BIAS",
    multiple=True,
    callback=_biases,
    help="Added to a token's logit, -100 to 100; repeatable.",
)
