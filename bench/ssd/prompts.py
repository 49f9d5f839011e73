"""Prompts of the chats: texts for a daemon, token ids for an engine."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer

from kvd import demo
from kvd.bench.prompts import Prompts, words_of
from kvd.demo.recall import filler_sentences
from protocol.types import ChatMessage

TURN_TOKENS = 160
"""Tokens that the second turn adds: the answer and the next question."""
QUESTION_TOKENS = 120
"""Tokens of the second question."""
_IDS = range(300, 4000)
"""Tokens that the embedded model's tokenizer has; models with random weights use it too."""


def tokens(count: int, *, seed: int) -> list[int]:
    """Return random tokens; other seeds give other beginnings."""
    return random.Random(seed).choices(_IDS, k=count)


def folder_of(model: str) -> Path:
    """Return the folder of ``demo`` or of a model that is given by its folder."""
    return demo.path() if model == "demo" else Path(model)


class Chats:
    """Chats for one model, each with another beginning."""

    def __init__(self, model: str, tokens: int) -> None:
        """``tokens``: those of the first question, without the chat template's."""
        tokenizer = Tokenizer.from_file(str(folder_of(model) / "tokenizer.json"))
        self._prompts = Prompts(
            lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
            words_of(" ".join(filler_sentences())),
        )
        self._tokens = tokens

    def first(self, number: int) -> list[ChatMessage]:
        """Return the first turn of a chat: one long question."""
        rng = random.Random(f"chat {number}")
        return [ChatMessage("user", self._prompts.text(rng, self._tokens))]

    def second(self, number: int, answer: str) -> list[ChatMessage]:
        """Return the second turn, after the first one's answer."""
        question = self._prompts.text(random.Random(f"question {number}"), QUESTION_TOKENS)
        added = [ChatMessage("assistant", answer), ChatMessage("user", question)]
        return self.first(number) + added


def fp16_bytes_per_token(model: str) -> int:
    """Return the bytes of one token's keys and values in fp16, in all layers of a model folder."""
    config = json.loads((folder_of(model) / "config.json").read_text())
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    sides = 2 * config.get("num_key_value_heads", heads) * width
    return 2 * int(sides) * int(config["num_hidden_layers"])
