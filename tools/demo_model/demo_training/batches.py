"""Make training rows: prose, facts in prose that are asked for later, copies and conversations.

Each token has a class, which determines its weight in the loss (WEIGHTS). For example, a random key
or the first statement of a code cannot be predicted and would only add noise.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from demo_training import chat, template, tool_tasks
from kvd.demo import recall

# Classes of tokens.
NONE, PROSE, FORM, ANSWER, REPLY, COPY, CALL = range(7)
WEIGHTS = (0.0, 0.3, 0.1, 4.0, 0.7, 1.0, 1.0)

SUBJECTS = ("code", "number", "password", "port")
SUBJECT_WEIGHTS = (85, 5, 5, 5)


@dataclass(frozen=True)
class Mix:
    """Shares of the kinds of rows."""

    recall: float = 0.42
    prose: float = 0.24
    chat: float = 0.11
    copy: float = 0.05
    tools: float = 0.18


SHORT = 128  # rows of this length are only prose and chat: they teach how a text begins
SHORT_MIX = Mix(recall=0.0, prose=0.5, chat=0.5, copy=0.0, tools=0.0)


class Rows:
    """Makes rows of any length from the prepared data; one instance in each loader process."""

    def __init__(self, data: Path, tokenizer: Path, seed: int, mix: Mix) -> None:
        """Read the arrays and encode the fixed parts once."""
        arrays = np.load(data / "data.npz")
        self.tokens: np.ndarray = arrays["tokens"]
        self.ends: np.ndarray = arrays["ends"]
        self.starts: np.ndarray = arrays["starts"]
        self.paragraphs: list[str] = json.loads((data / "paragraphs.json").read_text())
        self.tokenizer = Tokenizer.from_file(str(tokenizer))
        self.rng = random.Random(seed)
        self.kinds = (self.recall, self.prose, self.chat, self.copy, self.tools)
        self.tool_tasks = tool_tasks.Tasks(self.rng)
        self.mix = mix
        self.heads = {name: self.encode(f" The {name} of the") for name in SUBJECTS}
        self.keys = [self.encode(f" {key}") for key in chat.KEYS]
        self.words = [self.encode(f" {word}")[0] for word in chat.WORDS]
        self.digits = [self.encode(str(digit))[0] for digit in range(10)]
        self.middle = self.encode(" is ")
        self.stop = self.encode(".")
        self.newline = self.encode("\n\n")
        self.space = self.encode(" ")
        self.text_mark = self.encode("Text:")
        self.copy_mark = self.encode("Copy:")
        self.answer_head = self.encode("assistant\n")
        self.think_head = self.encode("<think>\n")
        self.end_of_text, self.start, self.end = (
            self.tokenizer.token_to_id(name)
            for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``."""
        return self.tokenizer.encode(text).ids

    def batch(self, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (rows, length + 1) token ids and their classes."""
        ids = np.empty((rows, length + 1), dtype=np.int16)
        classes = np.empty((rows, length + 1), dtype=np.uint8)
        mix = self.mix if length > SHORT else SHORT_MIX
        shares = (mix.recall, mix.prose, mix.chat, mix.copy, mix.tools)
        for row in range(rows):
            kind = self.rng.choices(self.kinds, shares)[0]
            ids[row], classes[row] = kind(length + 1)
        return ids, classes

    def filler(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ``length`` tokens of prose from a paragraph's start, and its sentence ends."""
        start = int(self.starts[self.rng.randrange(len(self.starts))])
        start = min(start, len(self.tokens) - length)
        stop = start + length
        first, last = np.searchsorted(self.ends, (start + 1, stop))
        return self.tokens[start:stop], self.ends[first:last] - start

    def prose(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return plain prose."""
        text, _ = self.filler(length)
        return text, np.full(length, PROSE, dtype=np.uint8)

    def statement(
        self, head: list[int], key: list[int], code: list[int], answer: bool
    ) -> tuple[list[int], list[int]]:
        """Return one sentence about a key; ``answer``: whether its code was stated before."""
        ids = head + key + self.middle + code + self.stop
        classes = [FORM] * len(head) + [NONE] * len(key) + [FORM] * len(self.middle)
        classes += [ANSWER if answer else NONE] * len(code) + [FORM]
        return ids, classes

    def recall(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return facts in prose: restated again and again, or all stated first, then asked once."""
        rng = self.rng
        size = len(self.heads["code"]) + 9
        most = min(length // (3 * size), 160)
        facts = round(math.exp(rng.uniform(math.log(3), math.log(most))))
        name = rng.choices(SUBJECTS, SUBJECT_WEIGHTS)[0]
        head = self.heads[name]
        keys = rng.sample(self.keys, facts)
        codes = [rng.choices(self.digits, k=recall.DIGITS) for _ in keys]
        if rng.random() < 0.4:
            return self._restated(length, head, keys, codes)
        return self._asked_once(length, head, keys, codes)

    def _restated(
        self, length: int, head: list[int], keys: list[list[int]], codes: list[list[int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Facts appear in order at random places; between them, known ones are restated."""
        rng = self.rng
        room = length // (len(head) + 9 + rng.randint(4, 60))
        order = list(range(len(keys)))
        known: list[int] = []
        sentences = []
        for _ in range(max(room, len(keys) + 1)):
            if order and (not known or rng.random() < 2.0 * len(keys) / room):
                which = order.pop()
                sentences.append(self.statement(head, keys[which], codes[which], False))
                known.append(which)
            else:
                which = rng.choice(known)
                sentences.append(self.statement(head, keys[which], codes[which], True))
        return self._scatter(length, sentences, 0, 1.0)

    def _asked_once(
        self, length: int, head: list[int], keys: list[list[int]], codes: list[list[int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """All facts appear in the first part, and all are asked in the rest in another order."""
        pairs = list(zip(keys, codes, strict=True))
        stated = [self.statement(head, key, code, False) for key, code in pairs]
        self.rng.shuffle(pairs)
        asked = [self.statement(head, key, code, True) for key, code in pairs]
        part = self.rng.uniform(0.3, 1.0)
        return self._scatter(length, stated + asked, len(asked), part)

    def _scatter(
        self,
        length: int,
        sentences: list[tuple[list[int], list[int]]],
        late: int,
        part: float,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Insert sentences into prose; the last ``late`` ones after ``part`` of it, a share."""
        rng = self.rng
        room = length - sum(len(ids) for ids, _ in sentences)
        while room < 0:
            room += len(sentences.pop()[0])
        text, ends = self.filler(room)
        places = [0, *ends.tolist()]
        border = max(1, int(part * len(places)))
        early = len(sentences) - late
        slots = sorted(rng.choices(places[:border], k=early)) if early > 0 else []
        slots += sorted(rng.choices(places[border:] or [room], k=len(sentences) - len(slots)))
        ids: list[int] = []
        classes: list[int] = []
        prose = text.tolist()
        at = 0
        for slot, (sentence, marks) in zip(slots, sentences, strict=True):
            ids += prose[at:slot]
            classes += [PROSE] * (slot - at)
            at = slot
            ids += sentence
            classes += marks
        ids += prose[at:]
        classes += [PROSE] * (room - at)
        return np.array(ids), np.array(classes, dtype=np.uint8)

    def chat(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return conversations one after the other; replies have the most weight."""
        ids: list[int] = []
        classes: list[int] = []
        while len(ids) < length:
            for role, content in chat.dialogue(self.rng, self.paragraphs):
                turn = self.encode(f"{role}\n{content}")
                mark = REPLY if role == "assistant" else NONE
                form = len(self.encode(f"{role}\n"))
                ids += [self.start, *turn, self.end, *self.encode("\n")]
                classes += [FORM, *[FORM] * form, *[mark] * (len(turn) - form), mark, FORM]
            ids.append(self.end_of_text)
            classes.append(FORM)
        return np.array(ids[:length]), np.array(classes[:length], dtype=np.uint8)

    def tools(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return conversations with functions and with JSON, one after the other."""
        ids: list[int] = []
        classes: list[int] = []
        while len(ids) < length:
            task = self.tool_tasks.draw()
            messages, functions = task.messages, task.tools
            if self.rng.random() < 0.12:  # none of the functions is needed
                functions = functions if self.rng.random() < 0.6 else []
                dialogue = chat.dialogue(self.rng, self.paragraphs)
                messages = [{"role": role, "content": content} for role, content in dialogue]
                if self.rng.random() < 0.4:
                    messages = tool_tasks.with_reasoning(messages)
            text = template.render(messages, functions)
            new, marks = self.marked(text)
            ids += [*new, self.end_of_text]
            classes += [*marks, FORM]
        return np.array(ids[:length]), np.array(classes[:length], dtype=np.uint8)

    def marked(self, text: str) -> tuple[list[int], list[int]]:
        """Return a conversation's tokens, and their classes: only answers are learnt.

        The marker that opens reasoning is part of the prompt, so the model never writes it.
        """
        ids = self.encode(text)
        classes = [NONE] * len(ids)
        head = [self.start, *self.answer_head]
        for place in [at for at, token in enumerate(ids) if token == self.start]:
            at = place + len(head)
            if ids[place:at] != head:
                continue
            if ids[at : at + len(self.think_head)] == self.think_head:
                at += len(self.think_head)
            end = ids.index(self.end, at)
            classes[at : end + 1] = [CALL] * (end + 1 - at)
        return ids, classes

    def copy(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return passages of words, digits or prose, each followed later by its copy."""
        rng = self.rng
        ids: list[int] = []
        classes: list[int] = []

        def add(tokens: list[int], kind: int) -> None:
            ids.extend(tokens)
            classes.extend([kind] * len(tokens))

        while len(ids) < length:
            size = rng.randint(3, 120)
            passage, first = rng.choice(
                (
                    (rng.choices(self.words, k=size), NONE),
                    ([*self.space, *rng.choices(self.digits, k=size)], NONE),
                    (self.filler(size)[0].tolist(), PROSE),
                )
            )
            add(self.filler(rng.choice((1, 60)))[0].tolist() + self.newline, PROSE)
            add(self.text_mark, FORM)
            add(passage, first)
            add(self.newline, FORM)
            if rng.random() < 0.5:
                add(self.filler(rng.choice((20, 200)))[0].tolist() + self.newline, PROSE)
            add(self.copy_mark, FORM)
            add(passage + self.newline, COPY)
        return np.array(ids[:length]), np.array(classes[:length], dtype=np.uint8)
