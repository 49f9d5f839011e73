"""A custom tool for patches, with a Lark grammar as coding agents send it, and its real parser."""

from __future__ import annotations

import functools

import lark

from protocol.tools import Grammar, Tool

PATCH = r"""
start: "*** Begin Patch" LF file+ "*** End Patch" LF?
file: "*** Add File: " name LF ("+" /(.*)/ LF)+ -> added
    | "*** Delete File: " name LF
    | "*** Update File: " name LF ("*** Move to: " name LF)? change?
name: /(.+)/  // a path
change: (place | line)+ ("*** End of File" LF)?
place: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF

%import common.LF
"""
APPLY = Tool("apply_patch", "Edits files.", grammar=Grammar("lark", PATCH))
SAMPLE = (
    '*** Begin Patch\n*** Update File: a "b".txt\n@@ def f():\n-\treturn "\\x"\n+\treturn {\'é\'}\n'
    "*** Add File: new.xml\n+<a>\n+</a>\n*** End Patch\n"
)


@functools.cache
def parser_of(grammar: str) -> lark.Lark:
    """Return lark's parser of a grammar. It has no terminals that match an empty text."""
    return lark.Lark(grammar.replace("/(.*)/", "/(.+)/?"), parser="earley", lexer="dynamic")


def matches(text: str, grammar: str = PATCH) -> bool:
    try:
        parser_of(grammar).parse(text)
    except lark.exceptions.LarkError:
        return False
    return True
