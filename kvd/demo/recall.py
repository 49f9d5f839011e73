"""Recall tasks: facts scattered in filler prose, one of which is asked for at the end.

The demo model is good at such tasks, and a lossy KV cache damages them first. The tasks are
deterministic by seed and use keys that the model was not trained on. The filler is held-out prose
that ships with this file. Nothing here imports a model or an array library.

    task = make_recall_prompt(seed=7, length_tokens=1024, tokenizer=tokenizer)
    completion = ...                      # greedy, raw text (no chat template), 6 tokens or more
    right = digits_right(completion, task.answer)    # 0 to 4
"""

from __future__ import annotations

import functools
import gzip
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_ADJECTIVES = (
    "amber ancient bitter bold brave bright broken bronze calm clever cold copper crimson "
    "curious dark distant dusty early electric empty faint fierce frozen gentle giant golden "
    "green grey hidden hollow humble iron ivory jolly late lazy little lonely lucky marble "
    "mighty narrow noble orange pale patient plain proud purple quiet rapid royal rusty "
    "scarlet secret sharp silent silver sleepy smooth tiny velvet wild young"
)
_NOUNS = (
    "anchor arrow badger basket beacon bell bridge camel candle canyon castle cedar circle "
    "comet compass crown desert dolphin dragon eagle engine falcon feather forest fountain "
    "garden glacier hammer harbor hawk island jacket kettle ladder lantern lemon lion maple "
    "meadow mirror monkey mountain needle ocean otter panda parrot pebble pencil pirate "
    "planet rabbit raven river robot rocket saddle shadow spider temple tiger tower turtle "
    "window"
)
ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())
DIGITS = 4
QUESTION = " The code of the {key} is"
STATEMENT = QUESTION + " {code}."

_SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z])")


class Tokenizer(Protocol):
    """The interface that the tasks need; the tokenizers of mlx-lm and transformers have it."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the token ids of ``text``."""


@dataclass(frozen=True)
class RecallTask:
    """One prompt, the digits that a greedy completion must begin with, and all its facts.

    ``prompt`` is ``context`` plus the text of the first question. The other questions can follow
    the same context, for example to try a shared prefix.
    """

    prompt: str
    answer: str
    context: str
    questions: tuple[tuple[str, str], ...]


def is_held_out(adjective: int, noun: int) -> bool:
    """Return whether a key, given as two word indices, is kept out of training: one in eight."""
    return (3 * adjective + 5 * noun) % 8 == 0


@functools.cache
def held_out_keys() -> tuple[str, ...]:
    """Return every key that training never shows."""
    return tuple(
        f"{adjective} {noun}"
        for i, adjective in enumerate(ADJECTIVES)
        for j, noun in enumerate(NOUNS)
        if is_held_out(i, j)
    )


@functools.cache
def filler_sentences() -> tuple[str, ...]:
    """Return the shipped held-out prose; each sentence begins with its space or newlines."""
    path = Path(__file__).with_name("filler.txt.gz")
    text = gzip.decompress(path.read_bytes()).decode()
    sentences = []
    for paragraph in text.split("\n\n"):
        first, *rest = _SENTENCE.split(paragraph)
        sentences += ["\n\n" + first, *(" " + sentence for sentence in rest)]
    return tuple(sentences)


def make_recall_prompt(
    seed: int, length_tokens: int, tokenizer: Tokenizer, facts: int = 24
) -> RecallTask:
    """Build the task of ``seed``: at most ``length_tokens`` tokens, and only a few fewer.

    A fact takes 13 tokens, so 24 facts need about 320. Raises ValueError if they do not fit.
    """
    rng = random.Random(f"recall {seed} {length_tokens} {facts}")  # noqa: S311
    codes = {
        key: "".join(rng.choices("0123456789", k=DIGITS))
        for key in rng.sample(held_out_keys(), facts)
    }
    statements = [STATEMENT.format(key=key, code=code) for key, code in codes.items()]
    questions = [(QUESTION.format(key=key), code) for key, code in codes.items()]
    rng.shuffle(questions)
    used = sum(len(tokenizer.encode(text)) for text in [*statements, questions[0][0]])
    if used > length_tokens:
        raise ValueError(f"{facts} facts take {used} tokens, more than {length_tokens}")
    parts = _filler(rng, length_tokens - used, tokenizer)
    places = sorted(rng.choices(range(1, len(parts) + 1), k=facts), reverse=True)
    for statement, place in zip(statements, places, strict=True):
        parts.insert(place, statement)
    context = "".join(parts).lstrip()
    while len(tokenizer.encode(context + questions[0][0])) > length_tokens:
        context = context.partition(" ")[2]  # the first word takes more tokens without its space
    return RecallTask(
        prompt=context + questions[0][0],
        answer=questions[0][1],
        context=context,
        questions=tuple(questions),
    )


def digits_right(completion: str, answer: str) -> int:
    """Count the digits of ``answer`` that are at the same positions in the completion."""
    given = completion.lstrip()[: len(answer)]
    return sum(a == b for a, b in zip(given, answer, strict=False))


def _filler(rng: random.Random, budget: int, tokenizer: Tokenizer) -> list[str]:
    """Return consecutive sentences of ``budget`` tokens; the first one is cut until it fits."""
    sentences = filler_sentences()
    place = rng.randrange(len(sentences))
    parts: list[str] = []
    left = budget
    while left > 0:
        text = sentences[place % len(sentences)]
        place -= 1
        while text and len(tokenizer.encode(text)) > left:
            text = text.lstrip().partition(" ")[2]
            text = text and " " + text
        if not text:
            break
        parts.insert(0, text)
        left -= len(tokenizer.encode(text))
    return parts
