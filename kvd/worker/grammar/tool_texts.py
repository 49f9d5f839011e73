"""What the grammars of custom tools, which take one text, allow."""

from __future__ import annotations

from kvd.worker.grammar.lark_regex import NotRegular, regex_of_lark
from kvd.worker.grammar.schema_limits import MAX_TEXT_CHARS
from protocol.tools import Tool

_FRAME_CHARS = 16
"""Characters around the expression in the schema's ``pattern``."""


class ToolTexts:
    """The grammars of one answer's custom tools. Without ``enforced``, they take any text."""

    def __init__(self, *, enforced: bool = True) -> None:
        self.enforced = enforced
        self.found = False
        """Whether a grammar is enforced."""
        self.notes: list[str] = []
        """Why grammars are not enforced."""

    def regex(self, tool: Tool) -> str | None:
        """Return the regular expression of a tool's text; None: any text."""
        if tool.grammar is None or not self.enforced:
            return None
        try:
            regex = tool.grammar.value
            if tool.grammar.kind == "lark":
                regex = regex_of_lark(regex)
            _check_length(regex)
        except NotRegular as reason:
            self.notes.append(
                f"the grammar of the tool {tool.name} is not enforced: {reason}; calls have the"
                " right form, and any text"
            )
            return None
        self.found = True
        return regex


def _check_length(regex: str) -> None:
    if len(regex) > MAX_TEXT_CHARS - _FRAME_CHARS:
        raise NotRegular(
            f"its regular expression has {len(regex)} characters, above {MAX_TEXT_CHARS}"
        )
