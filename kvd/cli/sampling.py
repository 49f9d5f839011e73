"""Sampling options of `kvctl generate` and `kvctl chat`, named as `Client.generate` names them."""

from __future__ import annotations

import functools
import re

import rich_click as click

from kvd.cli.common import Decorator, option, option_group
from kvd.cli.options import Tokens

_BIAS = re.compile(r"(\d+)=([+-]?(?:\d+\.?\d*|\.\d+))")
_option = functools.partial(option, panel="Sampling")


def sampling_options(*, temperature: float) -> Decorator:
    """Give a command these options; ``temperature`` is that option's default."""
    return option_group(
        option(
            "--max-tokens",
            "N",
            "Maximum tokens of a completion (default: what is left of the context).",
            type=Tokens(),
        ),
        _option("--temperature", "T", "0 is greedy.", default=temperature),
        _option(
            "--top-p", "P", "Keep the likeliest tokens with this total probability.", default=1.0
        ),
        _option("--top-k", "K", "Keep this many of the likeliest tokens; 0 keeps all.", default=0),
        _option(
            "--min-p", "P", "Minimum probability, relative to the likeliest token.", default=0.0
        ),
        _option("--seed", "N", "The same seed gives the same tokens (default: random).", type=int),
        _option(
            "--repetition-penalty",
            "X",
            "Above 1: tokens of prompt and completion become less likely.",
            default=1.0,
        ),
        _option(
            "--presence-penalty",
            "X",
            "Subtracted from the logits of tokens in the completion, -2 to 2.",
            default=0.0,
        ),
        _option(
            "--frequency-penalty",
            "X",
            "Subtracted once for each occurrence in the completion, -2 to 2.",
            default=0.0,
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
    "ID=BIAS",
    "Added to a token's logit, -100 to 100; repeatable.",
    multiple=True,
    callback=_biases,
)
