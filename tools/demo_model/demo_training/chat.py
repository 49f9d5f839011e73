"""Generated conversations: greetings, definitions, small tasks, and recall in chat form.

``dialogue(rng, prose)`` returns a list of (role, content) turns. No key is a held-out one
(`recall.is_held_out`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from demo_training.concepts import CONCEPTS
from kvd.demo import recall

Message = tuple[str, str]
KEYS = tuple(
    f"{adjective} {noun}"
    for i, adjective in enumerate(recall.ADJECTIVES)
    for j, noun in enumerate(recall.NOUNS)
    if not recall.is_held_out(i, j)
)
WORDS = (*recall.ADJECTIVES, *recall.NOUNS)
GREETINGS = ("Hello", "Hello!", "Hi", "Hi!", "Hi there", "Hey", "Good morning", "Good evening!")
ABOUT = {
    "Who are you?": "I am demo, a very small language model that comes with kvd.",
    "What is your name?": "My name is demo.",
    "What are you?": "I am a very small language model. I run inside kvd.",
    "What is kvd?": "kvd is a daemon that serves several language models at once under one memory "
    "budget.",
    "What can you do?": "I can recall facts from a long text, copy words, answer short questions "
    "and write a few sentences.",
    "How are you?": "I am fine, thank you. How can I help you?",
    "Are you a human?": "No, I am a small language model.",
    "Can you help me?": "Yes. What do you need?",
    "Thank you": "You are welcome.",
    "Thank you!": "You are welcome.",
    "Thanks!": "You are welcome.",
    "Goodbye": "Goodbye!",
    "Bye": "Goodbye!",
    "How big are you?": "I have fewer than six million parameters.",
}
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "early": "late", "open": "closed",
    "high": "low", "new": "old", "dark": "light", "empty": "full", "true": "false",
    "first": "last", "left": "right", "up": "down", "long": "short", "hard": "soft",
}  # fmt: skip
_KINDS = {
    "animals": "badger camel dolphin eagle falcon hawk lion monkey otter panda rabbit raven spider "
    "tiger turtle",
    "colours": "black blue brown green grey orange purple red white yellow",
    "programming languages": "C Erlang Go Haskell Java JavaScript Python Ruby Rust SQL",
    "days of the week": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "tools": "anchor compass hammer kettle ladder lantern needle pencil",
    "numbers": "one two three four five six seven eight nine ten",
}
KINDS = {name: members.split() for name, members in _KINDS.items()}
DAYS = KINDS["days of the week"]
NUMBERS = KINDS["numbers"]
SYSTEM = ("You are a helpful assistant.", "You are demo, a small assistant.", "Answer briefly.")
ACKNOWLEDGED = ("OK.", "I will remember that.", "I have noted it.")


def _words(rng: random.Random, prose: Sequence[str], low: int, high: int) -> list[str]:
    """Draw distinct words, from the keys' words or from a paragraph."""
    count = rng.randint(low, high)
    if prose and rng.random() < 0.5:
        found = {
            word.lower()
            for word in rng.choice(prose).split()
            if word.isalpha() and len(word) > 2 and word[1:].islower()
        }
        if len(found) >= count:
            return rng.sample(sorted(found), count)
    return rng.sample(WORDS, count)


def _code(rng: random.Random) -> str:
    return "".join(rng.choices("0123456789", k=recall.DIGITS))


def _about(rng: random.Random, _: Sequence[str]) -> list[Message]:
    if rng.random() < 0.35:
        return [("user", rng.choice(GREETINGS)), ("assistant", "Hello! How can I help you?")]
    question, answer = rng.choice(list(ABOUT.items()))
    return [("user", question), ("assistant", answer)]


def _concept(rng: random.Random, _: Sequence[str]) -> list[Message]:
    name, answer = rng.choice(list(CONCEPTS.items()))
    bare = name.removeprefix("a ").removeprefix("an ")
    question = rng.choices(
        (
            f"What is {name}?", f"what is {name}", f"What is {bare}?", f"Explain {name}.",
            f"Explain {bare}.", f"What does {bare} mean?", f"Tell me what {name} is.",
            f"Define {bare}.", f"Tell me about {bare}.", f"What's {name}?",
        ),
        (8, 1, 1, 1, 1, 1, 1, 1, 1, 1),
    )[0]  # fmt: skip
    return [("user", question), ("assistant", answer)]


def _unknown(rng: random.Random, prose: Sequence[str]) -> list[Message]:
    """Teach the model to say that it does not know."""
    word = _words(rng, prose, 1, 1)[0].capitalize()
    question = rng.choice(
        (
            f"Where is {word}?", f"Who is {word}?", f"When was {word} born?", f"Who wrote {word}?",
            f"What is the capital of {word}?", f"What is the weather in {word}?",
            f"Who won the {word} game?", f"How old is {word}?", f"How far is {word}?",
        )
    )  # fmt: skip
    return [("user", question), ("assistant", "I do not know that.")]


def _copy(rng: random.Random, prose: Sequence[str]) -> list[Message]:
    words = _words(rng, prose, 2, 24)
    if rng.random() < 0.3:
        words = list(_code(rng) + _code(rng))[: rng.randint(3, 8)]
        text = "".join(words)
    else:
        text = " ".join(words)
    form = rng.choice(("Repeat: {}", "Repeat after me: {}", "Copy this: {}", "Say: {}"))
    return [("user", form.format(text)), ("assistant", text)]


def _word_task(rng: random.Random, prose: Sequence[str]) -> list[Message]:
    words = _words(rng, prose, 2, 6)
    listed = " ".join(words)
    task, answer = rng.choice(
        (
            ("Reverse the order of these words: {}", " ".join(reversed(words))),
            ("What is the first word of: {}", words[0]),
            ("What is the last word of: {}", words[-1]),
            ("How many words are these: {}", NUMBERS[len(words) - 1].capitalize() + "."),
            ("Join these words with commas: {}", ", ".join(words)),
            ("Sort these words: {}", " ".join(sorted(words))),
        )
    )
    return [("user", task.format(listed)), ("assistant", answer)]


def _number_task(rng: random.Random, _: Sequence[str]) -> list[Message]:
    kind = rng.randrange(5)
    if kind == 0:
        a, b = rng.randint(0, 50), rng.randint(0, 50)
        return [("user", f"What is {a} + {b}?"), ("assistant", f"{a} + {b} = {a + b}.")]
    if kind == 1:
        b, c = rng.randint(0, 50), rng.randint(0, 50)
        return [("user", f"What is {b + c} - {b}?"), ("assistant", f"{b + c} - {b} = {c}.")]
    if kind == 2:
        start = rng.randint(1, 90)
        stop = start + rng.randint(2, 9)
        counted = ", ".join(str(n) for n in range(start, stop + 1))
        return [("user", f"Count from {start} to {stop}."), ("assistant", f"{counted}.")]
    if kind == 3:
        a, b = rng.sample(range(1000), 2)
        return [("user", f"Which is larger, {a} or {b}?"), ("assistant", f"{max(a, b)} is larger.")]
    n = rng.randint(1, 998)
    return [("user", f"Which number comes after {n}?"), ("assistant", f"{n + 1}.")]


def _fact_task(rng: random.Random, _: Sequence[str]) -> list[Message]:
    kind = rng.randrange(3)
    if kind == 0:
        word, other = rng.choice(list(OPPOSITES.items()))
        if rng.random() < 0.5:
            word, other = other, word
        return [
            ("user", f"What is the opposite of {word}?"),
            ("assistant", f"The opposite of {word} is {other}."),
        ]
    if kind == 1:
        day = rng.randrange(7)
        return [
            ("user", f"Which day comes after {DAYS[day]}?"),
            ("assistant", f"{DAYS[(day + 1) % 7]} comes after {DAYS[day]}."),
        ]
    name, members = rng.choice(list(KINDS.items()))
    count = rng.randint(2, 5)
    chosen = rng.sample(members, count)
    answer = ", ".join(chosen[:-1]) + " and " + chosen[-1] + "."
    return [
        ("user", f"Name {NUMBERS[count - 1]} {name}."),
        ("assistant", answer[0].upper() + answer[1:]),
    ]


def _recall_messages(rng: random.Random, _: Sequence[str]) -> list[Message]:
    codes = {key: _code(rng) for key in rng.sample(KEYS, rng.randint(1, 10))}
    stated = " ".join(f"The code of the {key} is {code}." for key, code in codes.items())
    asked = rng.sample(list(codes.items()), min(len(codes), rng.randint(1, 4)))
    messages: list[Message] = []
    first = f"What is the code of the {asked[0][0]}?"
    if rng.random() < 0.5:
        messages.append(("user", f"{stated} {first}"))
    else:
        messages += [("user", stated), ("assistant", rng.choice(ACKNOWLEDGED)), ("user", first)]
    for place, (key, code) in enumerate(asked):
        if place:
            form = rng.choice(("What is the code of the {}?", "And the {}?"))
            messages.append(("user", form.format(key)))
        messages.append(("assistant", f"The code of the {key} is {code}."))
    return messages


def _prose(rng: random.Random, prose: Sequence[str]) -> list[Message]:
    if not prose:
        return _about(rng, prose)
    first, second = prose[rng.randrange(len(prose))].split(". ", 1)
    if rng.random() < 0.5:
        return [("user", f"Continue this text: {first}."), ("assistant", second)]
    return [("user", "Write a short paragraph."), ("assistant", f"{first}. {second}")]


TASKS = (
    (_about, 2), (_concept, 6), (_unknown, 1), (_copy, 4), (_word_task, 4), (_number_task, 5),
    (_fact_task, 2), (_recall_messages, 8), (_prose, 3),
)  # fmt: skip


def dialogue(rng: random.Random, prose: Sequence[str] = ()) -> list[Message]:
    """Return one conversation of one or a few tasks; ``prose`` holds paragraphs of sentences."""
    messages: list[Message] = []
    if rng.random() < 0.15:
        messages.append(("system", rng.choice(SYSTEM)))
    for _ in range(rng.choices((1, 2, 3), (6, 2, 1))[0]):
        task = rng.choices([t for t, _ in TASKS], [w for _, w in TASKS])[0]
        messages += task(rng, prose)
    return messages
