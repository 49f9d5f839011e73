r"""Turns a Lark grammar without recursion into one regular expression.

Inside a JSON string, a text is escaped. llguidance can escape a regular expression (a schema's
``pattern``), but no Lark grammar: its lexer takes the ``\`` of an escaped line break for a part of
``.+``, and never goes back. One expression has no such boundaries. It matches all texts of the
grammar, in whatever way they are divided into terminals.

The dialect is llguidance's (https://github.com/guidance-ai/llguidance, docs/syntax.md).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_CHARS = 50_000
"""Characters of a grammar that is turned, and of the expression."""
_MAX_DEPTH = 50
"""Groups and rules inside each other."""


class NotRegular(Exception):
    """The grammar cannot be turned into a regular expression."""


COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+|\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z_0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
"""Terminals of Lark's library ``common``."""
COMMON["SIGNED_FLOAT"] = f"[+-]?{COMMON['FLOAT']}"
COMMON["SIGNED_NUMBER"] = f"[+-]?{COMMON['NUMBER']}"

_TOKEN = re.compile(
    r"""
    (?P<skip>[ \t]+|(?://|\#)[^\n]*)
  | (?P<line>(?:\r?\n)+[ \t]*)
  | (?P<string>"(?:\\["\\/bfnrt]|\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|[^"\\\n])*"i?)
  | (?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)
  | (?P<name>[!?]*_?[a-zA-Z](?:[_a-zA-Z0-9]|-(?!>))*)
  | (?P<number>[+-]?[0-9]+)
  | (?P<sign>->|\.\.|%[a-z]+|[][(){}|:?*+~.,])
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:u(....)|x(..)|(.))", re.DOTALL)
_CONTROL = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class _Token(NamedTuple):
    kind: str
    text: str


@dataclass
class _Definitions:
    """The definitions of a grammar; a name's tokens are its expansions."""

    tokens: dict[str, list[_Token]] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)
    """Expressions of names: imported ones, and those that were expanded."""
    ignored: list[list[_Token]] = field(default_factory=list)


@functools.lru_cache(64)
def regex_of_lark(grammar: str) -> str:
    """Return the regular expression of a grammar; raises `NotRegular` with the reason.

    Conversations send the same grammar with each request, so the last ones are kept.
    """
    if len(grammar) > MAX_CHARS:
        raise NotRegular(f"it has {len(grammar)} characters, more than {MAX_CHARS}")
    definitions = _read(list(_tokens(grammar)))
    ignored = _joined(
        "|", (_Expansion(definitions, one, ()).whole() for one in definitions.ignored)
    )
    if "start" not in definitions.tokens:
        raise NotRegular("it has no rule 'start'")
    skip = f"(?:{ignored})*" if ignored else ""
    return skip + _Expansion(definitions, definitions.tokens["start"], ("start",), skip).whole()


def in_lark(regex: str) -> str:
    """Return a regular expression as a part of a Lark expression between slashes."""
    wanted = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return re.sub(r"\\.|/|\n", lambda found: wanted.get(found[0], found[0]), regex, flags=re.DOTALL)


def _tokens(grammar: str) -> Iterator[_Token]:
    at = 0
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        if found is None:
            raise NotRegular(f"{grammar[at : at + 20]!r} is unknown in a Lark grammar")
        at = found.end()
        if found.lastgroup != "skip":
            yield _Token(str(found.lastgroup), found[0])


def _read(tokens: list[_Token]) -> _Definitions:
    """Return the definitions, each of which ends with its line."""
    found = _Definitions()
    for line in _lines(tokens):
        head, rest = line[0], line[1:]
        if head.text == "%import":
            _read_import(rest, found)
        elif head.text == "%ignore":
            found.ignored.append(rest)
        elif head.kind == "name":
            colon = next((at for at, one in enumerate(rest) if one.text == ":"), None)
            priority = "".join(one.text for one in rest[:colon])
            if colon is None or not re.fullmatch(r"(\.[+-]?[0-9]+)?", priority):
                raise NotRegular(f"the definition of {head.text!r} has parameters or attributes")
            found.tokens[head.text.lstrip("!?")] = rest[colon + 1 :]
        else:
            raise NotRegular(f"{head.text!r} has no regular expression")
    return found


def _lines(tokens: list[_Token]) -> Iterator[list[_Token]]:
    """Yield the tokens of each definition. A line that begins with ``|`` continues the last one."""
    line: list[_Token] = []
    depth = 0
    for at, token in enumerate(tokens):
        depth += (token.text in ("(", "[", "{")) - (token.text in (")", "]", "}"))
        if token.kind != "line":
            line.append(token)
        elif depth <= 0 and (at + 1 == len(tokens) or tokens[at + 1].text != "|"):
            if line:
                yield line
            line = []
    if line:
        yield line


def _read_import(line: list[_Token], found: _Definitions) -> None:
    """Read ``common.NAME``, ``common.NAME -> OTHER`` or ``common (NAME, OTHER)``."""
    names = [token.text for token in line if token.kind == "name"]
    if names[:1] != ["common"] or len(names) < 2:
        raise NotRegular("it imports from another library than 'common'")
    if any(token.text == "->" for token in line):
        pairs = [(names[1], names[-1])]
    else:
        pairs = [(name, name) for name in names[1:]]
    for name, other in pairs:
        if name not in COMMON:
            raise NotRegular(f"'common' has no terminal {name!r}")
        found.known[other] = COMMON[name]


class _Expansion:
    """The expansions of one name, from its tokens.

    ``stack``: names that are being expanded. ``skip``: text that may follow each terminal of a
    rule.
    """

    def __init__(
        self,
        definitions: _Definitions,
        tokens: list[_Token],
        stack: tuple[str, ...],
        skip: str = "",
    ) -> None:
        self._definitions = definitions
        self._tokens = tokens
        self._stack = stack
        self._skip = skip
        self._at = 0
        self._depth = len(stack)

    def whole(self) -> str:
        found = self._choice()
        if self._at < len(self._tokens):
            raise NotRegular(f"{self._tokens[self._at].text!r} has no regular expression")
        return found

    def _peek(self) -> _Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else _Token("end", "")

    def _take(self) -> _Token:
        token = self._peek()
        self._at += 1
        return token

    def _choice(self) -> str:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NotRegular(f"more than {_MAX_DEPTH} groups or rules are inside each other")
        first = self._sequence()
        others = _joined("", self._other_options())
        self._depth -= 1
        return _bounded(f"(?:{first}{others})" if others else first)

    def _other_options(self) -> Iterator[str]:
        while self._peek().text == "|" and self._peek().kind == "sign":
            self._take()
            yield f"|{self._sequence()}"

    def _sequence(self) -> str:
        found = _joined("", self._parts())
        if self._peek().text == "->":  # an alias
            self._at += 2
        return found

    def _parts(self) -> Iterator[str]:
        while (token := self._peek()).kind != "end" and token.text not in ("|", ")", "]", "->"):
            yield self._repeated()

    def _repeated(self) -> str:
        found = self._atom()
        while (token := self._peek()).text in ("?", "*", "+", "~", "{") and token.kind == "sign":
            self._take()
            if token.text in ("~", "{"):
                found = f"(?:{found}){self._count(closed=token.text == '{')}"
            else:
                found = f"(?:{found}){token.text}"
        return _bounded(found)

    def _count(self, *, closed: bool) -> str:
        """Read ``~ 2``, ``~ 2..3``, ``{2}``, ``{2,}``, ``{,3}`` or ``{2,3}``."""
        least = self._take().text if self._peek().kind == "number" else ""
        most = least
        if self._peek().text == (separator := "," if closed else ".."):
            self._take()
            most = self._take().text if self._peek().kind == "number" else ""
        if (closed and self._take().text != "}") or not (least or most) or separator in least:
            raise NotRegular("a number of repetitions cannot be read")
        return f"{{{least or 0},{most}}}"

    def _atom(self) -> str:
        token = self._take()
        if token.kind == "string":
            if self._peek().text == "..":
                self._take()
                return self._skipping(_range(token, self._take()))
            return self._skipping(_literal(token.text))
        if token.kind == "regex":
            return self._skipping(_expression(token.text))
        if token.kind == "name":
            return self._name(token.text)
        if token.text in ("(", "["):
            found = self._choice()
            if self._take().text != (")" if token.text == "(" else "]"):
                raise NotRegular("a bracket is not closed")
            return f"(?:{found})" + ("?" if token.text == "[" else "")
        raise NotRegular(f"{token.text!r} has no regular expression")

    def _name(self, name: str) -> str:
        is_terminal = name.lstrip("_")[:1].isupper()
        skip = "" if is_terminal else self._skip
        if name not in self._definitions.known:
            if name in self._stack:
                raise NotRegular(f"{name!r} refers to itself")
            if name not in self._definitions.tokens:
                raise NotRegular(f"{name!r} is not defined")
            tokens = self._definitions.tokens[name]
            found = _Expansion(self._definitions, tokens, (*self._stack, name), skip).whole()
            self._definitions.known[name] = f"(?:{found})"
        found = self._definitions.known[name]
        return self._skipping(found) if is_terminal else found

    def _skipping(self, terminal: str) -> str:
        return terminal + self._skip


def _joined(separator: str, pieces: Iterable[str]) -> str:
    """Join pieces; raises `NotRegular` at the first one that makes the expression too long."""
    found, size = list[str](), 0
    for piece in pieces:
        size += len(piece)
        _check_size(size)
        found.append(piece)
    return separator.join(found)


def _bounded(expression: str) -> str:
    _check_size(len(expression))
    return expression


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise NotRegular(f"its expression has more than {MAX_CHARS} characters")


def _value(string: str) -> str:
    """Return the text of a quoted string."""

    def char(found: re.Match[str]) -> str:
        code = found[1] or found[2]
        return chr(int(code, 16)) if code else _CONTROL.get(found[3], found[3])

    return _ESCAPE.sub(char, string[1:-1])


def _literal(token: str) -> str:
    value = _value(token.removesuffix("i"))
    text = re.sub(r"[\\.+*?()|\[\]{}^$]", r"\\\g<0>", value)
    return f"(?i:{text})" if token.endswith("i") else f"(?:{text})"


def _range(first: _Token, last: _Token) -> str:
    ends = [_value(token.text) for token in (first, last) if token.kind == "string"]
    if len(ends) != 2 or any(len(end) != 1 for end in ends):
        raise NotRegular("a range is not between two characters")
    return "[" + "-".join(re.sub(r"[]\[\\^&~-]", r"\\\g<0>", end) for end in ends) + "]"


def _expression(token: str) -> str:
    body, _, flags = token[1:].rpartition("/")
    if set(flags) - set("ims"):
        raise NotRegular(f"the flags {flags!r} of an expression are unknown")
    body = body.replace(r"\/", "/")
    return f"(?{flags}:{body})"
