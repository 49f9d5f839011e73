"""Describes a struct's fields for pages: name, type in words, default and docstring."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect as types

from kvd.config.http import KeyHash, Origin
from protocol.fields import ALIAS_PATTERN, MAX_BYTES, MAX_INT, MAX_S, TEXT_PATTERN
from protocol.kv import MAX_LAYERS

ENDLESS = frozenset({MAX_INT, MAX_BYTES, MAX_LAYERS, -MAX_LAYERS, MAX_S})
"""Bounds that pages omit, because no setting comes near them."""
PATTERNS = {
    ALIAS_PATTERN: "letters, digits and `._:/@+-`, not `-` first",
    KeyHash.__metadata__[0].pattern: "`sha256:` and 64 hexadecimal digits",
    Origin.__metadata__[0].pattern: "`https://host:port`, `null` or `*`",
}
PLURAL = re.compile(r"^(integer|number|text)\b")


@dataclass(frozen=True)
class Field:
    """One field of a struct."""

    name: str
    kind: types.Type
    required: bool
    default: Any
    text: str
    """The field's docstring as Markdown, on one line."""


def fields(struct: type[msgspec.Struct]) -> list[Field]:
    """Return a struct's fields; those of its base classes are last."""
    info = types.type_info(struct)
    assert isinstance(info, types.StructType)
    texts = docstrings(struct)
    own = struct.__annotations__
    return [
        Field(one.encode_name, one.type, one.required, _default(one), texts.get(one.name, ""))
        for one in sorted(info.fields, key=lambda field: field.name not in own)
    ]


def _default(field: types.Field) -> Any:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    factory = field.default_factory
    return factory() if factory is not msgspec.NODEFAULT else None


@cache
def docstrings(struct: type) -> dict[str, str]:
    """Return the docstrings of attributes, read from the source because Python drops them.

    Those of base classes are included.
    """
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if base is msgspec.Struct or not issubclass(base, msgspec.Struct):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        name = None
        for node in tree.body:
            match node:
                case ast.AnnAssign(target=ast.Name(id=target)):
                    name = target
                case ast.Expr(value=ast.Constant(value=str(text))) if name is not None:
                    found[name] = markdown(text)
                    name = None
                case _:
                    name = None
    return found


def markdown(text: str) -> str:
    """Return a docstring on one line, its literals in single backticks."""
    return " ".join(inspect.cleandoc(text).split()).replace("``", "`").replace("|", "\\|")


def words(kind: types.Type) -> str:
    """Return a type in words, with its bounds."""
    match kind:
        case types.UnionType(types=parts):
            text = _union([part for part in parts if not isinstance(part, types.NoneType)])
        case types.ListType(item_type=item) | types.VarTupleType(item_type=item):
            items = PLURAL.sub(r"\1s", words(item))
            text = f"list of {items}{_most(kind)}"
        case types.DictType(key_type=key, value_type=value):
            text = f"table from {words(key).partition(',')[0]} to {words(value)}{_most(kind)}"
        case types.StructType(cls=struct):
            text = struct.__name__
        case _:
            text = _scalar(kind)
    return text


def _most(kind: types.ListType | types.VarTupleType | types.DictType) -> str:
    return f", up to {kind.max_length}" if kind.max_length else ""


def _scalar(kind: types.Type) -> str:
    match kind:
        case types.BoolType():
            text = "`true` or `false`"
        case types.IntType():
            text = "integer" + _bounds(kind)
        case types.FloatType():
            text = "number" + _bounds(kind)
        case types.StrType():
            text = _text(kind)
        case types.BytesType():
            text = "text in base64"
        case types.LiteralType(values=values):
            text = _either([f"`{json.dumps(value)}`" for value in values])
        case types.AnyType():
            text = "any"
        case _:
            raise TypeError(kind)
    return text


def _union(parts: list[types.Type]) -> str:
    if {type(part) for part in parts} == {types.StrType, types.IntType}:
        return "bytes, or a text such as `8GiB`"  # only sizes have this type
    parts = sorted(parts, key=lambda part: not isinstance(part, types.StrType))
    return _either([words(part) for part in parts])


def _either(parts: list[str]) -> str:
    *others, last = parts
    return f"{', '.join(others)} or {last}" if others else last


def _text(kind: types.StrType) -> str:
    if kind.pattern not in {None, TEXT_PATTERN}:
        return PATTERNS.get(kind.pattern, f"text like `{kind.pattern}`")
    if kind.max_length is not None:
        least = f"{kind.min_length} to " if kind.min_length else "up to "
        return f"text, {least}{kind.max_length} characters"
    return "text"


def _bounds(kind: types.IntType | types.FloatType) -> str:
    low, above = kind.ge, kind.gt
    high, below = kind.le, kind.lt
    low, above, high, below = (
        None if bound in ENDLESS else bound for bound in (low, above, high, below)
    )
    step = f", a multiple of {kind.multiple_of}" if kind.multiple_of else ""
    if low is not None and high is not None:
        return f", {low:g} to {high:g}{step}"
    parts = [
        f"{low:g} or more" if low is not None else "",
        f"above {above:g}" if above is not None else "",
        f"at most {high:g}" if high is not None else "",
        f"below {below:g}" if below is not None else "",
    ]
    text = ", ".join(part for part in parts if part)
    return f", {text}{step}" if text else step
