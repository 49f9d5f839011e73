"""Generated tasks about tools and JSON: a request, the functions that could serve it, the answer.

A function is a verb and a noun (``get_weather``), or one of a few that agents often have. Its
parameters come from `PARAMETERS`; the request names their values in prose. One pair of verb and
noun in eight is held out (`is_held_out`): training never shows it.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from demo_training.words import CITIES, FIRST_NAMES, NOUNS, VERBS, WORDS

Message = dict[str, Any]
Value = str | int | float | bool | list[str]

MAX_TOOLS = 3


@dataclass(frozen=True)
class Parameter:
    """A parameter: its schema, a way to draw a value, and phrases that say the value."""

    schema: dict[str, Any]
    draw: Callable[[random.Random], Value]
    phrases: tuple[str, ...]


def _text(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))


def _title(rng: random.Random) -> str:
    return _text(rng, 1, 4).capitalize()


def _sentence(rng: random.Random) -> str:
    text = _text(rng, 2, 9).capitalize()
    return text + rng.choice((".", "", "", "!", "?"))


def _date(rng: random.Random) -> str:
    return f"{rng.randint(2020, 2030)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _time(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02}:{rng.choice(('00', '15', '30', '45', '05', '20'))}"


def _name(rng: random.Random) -> str:
    first = rng.choice(FIRST_NAMES)
    return first if rng.random() < 0.6 else f"{first} {rng.choice(WORDS).capitalize()}"


def _place(rng: random.Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.6 else _text(rng, 1, 2).title()


def _email(rng: random.Random) -> str:
    host = f"{rng.choice(WORDS)}.{rng.choice(('com', 'org', 'net', 'io'))}"
    return f"{rng.choice((rng.choice(FIRST_NAMES).lower(), rng.choice(WORDS)))}@{host}"


def _path(rng: random.Random) -> str:
    folders = rng.choices(WORDS, k=rng.randint(1, 3))
    name = f"{rng.choice(WORDS)}.{rng.choice(('txt', 'md', 'py', 'csv', 'json', 'log'))}"
    return rng.choice(("/", "", "~/")) + "/".join([*folders, name])


def _id(rng: random.Random) -> str:
    digits = "".join(rng.choices(string.digits, k=rng.randint(2, 6)))
    return rng.choice(("", "A", "K-", "user-", "x")) + digits


def _number(rng: random.Random) -> float | int:
    whole = rng.randint(0, 500)
    return whole if rng.random() < 0.4 else whole + rng.randint(1, 9) / 10


def _integer(rng: random.Random) -> int:
    return rng.randint(0, rng.choice((10, 100, 1000)))


def _items(rng: random.Random) -> list[str]:
    return rng.sample(WORDS, rng.randint(1, 4))


def _string(draw: Callable[[random.Random], str], *phrases: str) -> Parameter:
    return Parameter({"type": "string"}, draw, phrases)


def _choice(values: Sequence[str], *phrases: str) -> Parameter:
    schema = {"type": "string", "enum": list(values)}
    return Parameter(schema, lambda rng: rng.choice(list(values)), phrases)


_WHOLE = {"type": "integer"}
PARAMETERS: dict[str, Parameter] = {
    "city": _string(_place, "in {}", "for {}", "in the city of {}"),
    "location": _string(_place, "in {}", "at {}", "for {}"),
    "origin": _string(_place, "from {}", "starting in {}"),
    "destination": _string(_place, "to {}", "with destination {}"),
    "date": _string(_date, "on {}", "for {}", "with date {}"),
    "time": _string(_time, "at {}", "for {}"),
    "name": _string(_name, "called {}", "named {}", "with the name {}"),
    "person": _string(_name, "for {}", "with {}"),
    "email": _string(_email, "to {}", "for {}", "with the email {}"),
    "recipient": _string(_email, "to {}"),
    "title": _string(_title, 'with the title "{}"', 'titled "{}"'),
    "subject": _string(_title, 'with the subject "{}"', 'about "{}"'),
    "message": _string(_sentence, 'saying "{}"', 'with the message "{}"', 'that says "{}"'),
    "text": _string(_sentence, 'with the text "{}"', '"{}"'),
    "query": _string(lambda rng: _text(rng, 1, 4), 'for "{}"', "about {}"),
    "path": _string(_path, "in {}", "at {}", "at the path {}"),
    "file": _string(_path, "from {}", "in the file {}"),
    "id": _string(_id, "{}", "with id {}", "number {}"),
    "count": Parameter(_WHOLE, _integer, ("with count {}", "{} times")),
    "limit": Parameter(_WHOLE, _integer, ("with a limit of {}", "at most {}")),
    "minutes": Parameter(_WHOLE, _integer, ("for {} minutes", "of {} minutes")),
    "days": Parameter(_WHOLE, _integer, ("for {} days", "for the next {} days")),
    "age": Parameter(_WHOLE, _integer, ("of age {}", "aged {}")),
    "amount": Parameter({"type": "number"}, _number, ("of {}", "with the amount {}")),
    "price": Parameter({"type": "number"}, _number, ("for a price of {}", "at {}")),
    "level": Parameter(_WHOLE, _integer, ("to level {}", "at level {}")),
    "unit": _choice(("celsius", "fahrenheit"), "in {}", "in degrees {}"),
    "color": _choice(("red", "green", "blue", "white", "black"), "in {}", "with the color {}"),
    "priority": _choice(("low", "normal", "high"), "with {} priority"),
    "size": _choice(("small", "medium", "large"), "of size {}", "in {}"),
    "language": _choice(("English", "German", "French", "Spanish"), "in {}", "to {}"),
    "tags": Parameter(
        {"type": "array", "items": {"type": "string"}}, _items, ("tagged {}", "with the tags {}")
    ),
    "items": Parameter(
        {"type": "array", "items": {"type": "string"}}, _items, ("with {}", "of {}")
    ),
}  # fmt: skip
_ALIKE = ({"city", "location"}, {"email", "recipient"}, {"title", "subject"}, {"amount", "price"})
"""Parameters that one request does not have together: their phrases would be ambiguous."""
_GENERIC = (
    ({"type": "string"}, lambda rng: _text(rng, 1, 3)),
    ({"type": "string"}, _id),
    (_WHOLE, _integer),
    ({"type": "number"}, _number),
    ({"type": "boolean"}, lambda rng: rng.random() < 0.5),
)
COMMON = {
    "get_weather": (
        "Get the weather.", ("city", "unit", "days"), 1,
        ("What is the weather", "How is the weather", "Tell me the weather", "Get the weather"),
    ),
    "send_email": (
        "Send an email.", ("recipient", "subject", "message"), 2,
        ("Send an email", "Write an email", "Email"),
    ),
    "search_web": (
        "Search the web.", ("query", "limit"), 1,
        ("Search the web", "Search", "Look", "Find pages"),
    ),
    "set_timer": (
        "Set a timer.", ("minutes", "name"), 1, ("Set a timer", "Start a timer", "Set the timer"),
    ),
    "read_file": (
        "Read a file.", ("path",), 1, ("Read the file", "Show the file", "Open the file"),
    ),
    "get_time": (
        "Get the time.", ("city",), 1, ("What time is it", "What is the time", "Get the time"),
    ),
    "book_flight": (
        "Book a flight.", ("origin", "destination", "date"), 2,
        ("Book a flight", "I need a flight", "Find me a flight"),
    ),
    "add_event": (
        "Add an event to the calendar.", ("title", "date", "time"), 2,
        ("Add an event", "Plan an event", "Put an event in my calendar"),
    ),
}  # fmt: skip
_OPENINGS = ("", "", "", "Please ", "Can you ", "Could you ", "I want you to ", "Now ")
_NO_TOOL = "I have no function for that."
SYSTEM = ("You are a helpful assistant.", "You are demo, a small assistant.", "Use the functions.")


@dataclass(frozen=True)
class Task:
    """A conversation, and how the model is asked."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    thinks: bool = False


@dataclass(frozen=True)
class _Function:
    name: str
    noun: str
    description: str
    parameters: dict[str, Parameter]
    required: int
    openings: tuple[str, ...]

    @property
    def tool(self) -> dict[str, Any]:
        properties = {name: parameter.schema for name, parameter in self.parameters.items()}
        schema = {
            "type": "object",
            "properties": properties,
            "required": list(properties)[: self.required],
        }
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}


def is_held_out(verb: int, noun: int) -> bool:
    """Return whether training never shows the function of this verb and noun: one in eight."""
    return (3 * verb + 5 * noun) % 8 == 0


class Tasks:
    """Draws tasks; ``held_out``: with functions that training never shows, and only with calls."""

    def __init__(self, rng: random.Random, *, held_out: bool = False) -> None:
        self._rng = rng
        self._held_out = held_out

    def draw(self) -> Task:
        """Return one task of any kind."""
        rng = self._rng
        kinds = (self.call, self.json_answer, self.no_call, self.result)
        return rng.choices(kinds, (6, 2, 1, 2))[0]()

    # Calls.

    def call(self) -> Task:
        """Return a request that one or two calls serve."""
        rng = self._rng
        functions = self._functions(rng.randint(1, MAX_TOOLS))
        asked = rng.sample(functions, 2 if len(functions) > 1 and rng.random() < 0.15 else 1)
        requests, calls = [], []
        for function in asked:
            request, arguments = self._request(function)
            requests.append(request)
            calls.append({"name": function.name, "arguments": arguments})
        text = requests[0]
        if len(requests) == 2:
            second = requests[1][0].lower() + requests[1][1:]
            text += rng.choice((" and ", " and then ", ", then ")) + second
        answer: Message = {"role": "assistant", "content": "", "tool_calls": calls}
        thinks = rng.random() < 0.2
        if thinks:
            names = " and ".join(call["name"] for call in calls)
            answer["content"] = f"<think>\nThe user needs {names}.\n</think>\n"
        tools = [function.tool for function in functions]
        return Task([*self._system(), _user(self._ended(text)), answer], tools, thinks)

    def no_call(self) -> Task:
        """Return a request that none of the functions serves."""
        *functions, other = self._functions(self._rng.randint(2, MAX_TOOLS + 1))
        request, _ = self._request(other)
        answer = {"role": "assistant", "content": _NO_TOOL}
        messages = [*self._system(), _user(self._ended(request)), answer]
        return Task(messages, [function.tool for function in functions])

    def result(self) -> Task:
        """Return a call with its result, and the answer that states the result."""
        rng = self._rng
        task = self.call()
        while task.thinks or len(task.messages[-1]["tool_calls"]) > 1:
            task = self.call()
        kind = rng.random()
        if kind < 0.15:
            problem = _text(rng, 1, 4)
            content, answer = json.dumps({"error": problem}), f"It failed: {problem}."
        elif kind < 0.35:
            content = answer = _sentence(rng).rstrip(".!?") + "."
        else:
            drawn = self._values(rng.randint(1, 3))
            content = json.dumps(drawn, ensure_ascii=False)
            answer = " ".join(f"The {name} is {_said(value)}." for name, value in drawn.items())
        messages = [
            *task.messages,
            {"role": "tool", "content": content},
            {"role": "assistant", "content": answer},
        ]
        return Task(messages, task.tools)

    # JSON.

    def json_answer(self) -> Task:
        """Return facts in prose, a schema, and the facts as JSON."""
        rng = self._rng
        values = self._values(rng.randint(1, 5))
        schema = {
            "type": "object",
            "properties": {name: self._schema(value) for name, value in values.items()},
            "required": list(values),
        }
        stated = list(values.items())
        rng.shuffle(stated)
        facts = " ".join(f"The {name} is {_said(value)}." for name, value in stated)
        asked = rng.choice(("Answer in JSON with this schema:", "Return JSON of this schema:"))
        encoded = json.dumps(schema, ensure_ascii=False)
        parts = [facts, f"{asked} {encoded}"]
        if rng.random() < 0.3:
            parts.reverse()
        answer = {"role": "assistant", "content": json.dumps(values, ensure_ascii=False)}
        return Task([*self._system(), _user("\n".join(parts)), answer], [])

    def _values(self, count: int) -> dict[str, Value]:
        rng = self._rng
        found: dict[str, Value] = {}
        while len(found) < count:
            if rng.random() < 0.6:
                name = rng.choice(list(PARAMETERS))
                found[name] = PARAMETERS[name].draw(rng)
            else:
                found[rng.choice(WORDS)] = rng.choice(_GENERIC)[1](rng)
        return found

    def _schema(self, value: Value) -> dict[str, Any]:
        if isinstance(value, list):
            return {"type": "array", "items": {"type": "string"}}
        kinds = {bool: "boolean", int: "integer", float: "number", str: "string"}
        return {"type": kinds[type(value)]}

    # Functions.

    def _functions(self, count: int) -> list[_Function]:
        found: dict[str, _Function] = {}
        nouns: set[str] = set()
        while len(found) < count:
            function = self._function()
            if function.noun not in nouns or self._rng.random() < 0.3:
                found[function.name] = function
                nouns.add(function.noun)
        return list(found.values())

    def _function(self) -> _Function:
        rng = self._rng
        if not self._held_out and rng.random() < 0.15:
            return self._common()
        verb, noun = self._pair()
        name = rng.choices(
            (f"{verb}_{noun}", f"{verb}{noun.capitalize()}", f"{noun}_{verb}", f"{noun}.{verb}"),
            (6, 2, 1, 1),
        )[0]
        article = "an" if noun[0] in "aeiou" else "a"
        described = rng.choice(
            (
                f"{verb.capitalize()} {article} {noun}.",
                f"{verb.capitalize()} the {noun}.",
                f"Use this to {verb} {article} {noun}.",
                "",
            )
        )
        count = rng.choices((0, 1, 2, 3, 4), (1, 5, 5, 3, 1))[0]
        parameters = self._parameters(count)
        required = rng.randint(0, count) if rng.random() < 0.5 else count
        object_ = rng.choice((f"the {noun}", f"{article} {noun}", f"my {noun}"))
        return _Function(
            name, noun, described, parameters, required, (f"{verb.capitalize()} {object_}",)
        )

    def _common(self) -> _Function:
        name, (described, all_, required, openings) = self._rng.choice(list(COMMON.items()))
        kept = all_[: self._rng.randint(required, len(all_))]
        parameters = {one: PARAMETERS[one] for one in kept}
        return _Function(name, name, described, parameters, required, openings)

    def _pair(self) -> tuple[str, str]:
        while True:
            verb, noun = self._rng.randrange(len(VERBS)), self._rng.randrange(len(NOUNS))
            if is_held_out(verb, noun) == self._held_out:
                return VERBS[verb], NOUNS[noun]

    def _parameters(self, count: int) -> dict[str, Parameter]:
        rng = self._rng
        found: dict[str, Parameter] = {}
        while len(found) < count:
            if rng.random() < 0.7:
                name = rng.choice(list(PARAMETERS))
                if any(name in alike and alike & (found.keys() - {name}) for alike in _ALIKE):
                    continue
                parameter = PARAMETERS[name]
                if rng.random() < 0.4:  # say its name, so that unknown ones are found like this
                    phrases = (f"with {name} {{}}", f"with the {name} {{}}", f"{name} {{}}")
                    parameter = Parameter(parameter.schema, parameter.draw, phrases)
            else:
                name = rng.choice(WORDS)
                schema, draw = rng.choice(_GENERIC)
                phrases = (f"with {name} {{}}", f"with the {name} {{}}", f"and {name} {{}}")
                parameter = Parameter(schema, draw, phrases)
            found[name] = parameter
        return found

    def _request(self, function: _Function) -> tuple[str, dict[str, Value]]:
        """Return a request in prose, and the arguments that it states."""
        rng = self._rng
        names = list(function.parameters)
        given = [
            name
            for place, name in enumerate(names)
            if place < function.required or rng.random() < 0.5
        ]
        arguments = {name: function.parameters[name].draw(rng) for name in given}
        order = list(given)
        if rng.random() < 0.3:
            rng.shuffle(order)
        clauses = [
            rng.choice(function.parameters[name].phrases).format(_said(arguments[name]))
            for name in order
        ]
        start = rng.choice(function.openings)
        opening = rng.choice(_OPENINGS)
        if opening and not start.startswith(("What", "How", "I ")):
            start = opening + start[0].lower() + start[1:]
        return " ".join([start, *clauses]), arguments

    def _ended(self, text: str) -> str:
        if text[-1] in '.!?"' or self._rng.random() < 0.2:
            return text
        asks = text.startswith(("What", "How", "Can", "Could"))
        return text + ("?" if asks else ".")

    def _system(self) -> list[Message]:
        if self._rng.random() < 0.8:
            return []
        return [{"role": "system", "content": self._rng.choice(SYSTEM)}]


def with_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation whose answers begin with reasoning, which repeats the question."""
    found: list[Message] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant":
            asked = " ".join(found[-1]["content"].split()[:8])
            content = f"<think>\nThe user says: {asked}\n</think>\n{content}"
        found.append({"role": message["role"], "content": content})
    return found


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _said(value: Value) -> str:
    """Return a value as the request says it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        *first, last = value
        return f"{', '.join(first)} and {last}" if first else last
    return str(value)
