"""The key ``models`` of ``/v1/models``: the models as Codex's catalogue describes them.

Saved to a file, the body is a ``model_catalog_json`` of Codex. From it Codex learns the context
window, and that it may send its tool for patches with a grammar.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

if TYPE_CHECKING:
    from protocol.types import DaemonStatus, ModelStatus

_INSTRUCTIONS = """\
You are a coding agent that works in the user's project through tools.
Read the files that a task concerns before you change them. Run commands with the shell tool. \
Search with rg. Change files with apply_patch, in small patches that keep the project's style. \
Check your changes with the project's own tests where they exist.
Work until the task is done, then say briefly what you changed and what you checked. \
If something is unclear and a guess could do harm, ask."""
_OUTPUT_TOKENS = 10_000
"""Tokens of a command's output that Codex keeps, as for its own models."""


class EffortLevel(msgspec.Struct, frozen=True):
    """A reasoning effort that the model knows."""

    effort: str
    description: str


class CatalogueModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model in Codex's catalogue. All fields but those that may be absent are required."""

    slug: str
    display_name: str
    context_window: int | UnsetType = UNSET
    """Absent while the model is not loaded."""
    supported_reasoning_levels: list[EffortLevel] = []
    description: str = "served by kvd"
    shell_type: str = "shell_command"
    visibility: str = "list"
    supported_in_api: bool = True
    priority: int = 1
    base_instructions: str = _INSTRUCTIONS
    support_verbosity: bool = False
    truncation_policy: dict[str, Any]
    supports_parallel_tool_calls: bool = True
    experimental_supported_tools: list[str] = []
    apply_patch_tool_type: str = "freeform"
    input_modalities: tuple[str, ...] = ("text",)


def catalogue(status: DaemonStatus) -> list[CatalogueModel]:
    """Return all models that a request may name."""
    loaded = [_entry(model.name, model) for model in status.models]
    unloaded = [_entry(name) for name in status.unloaded]
    return sorted([*loaded, *unloaded], key=lambda model: model.slug)


def _entry(name: str, status: ModelStatus | None = None) -> CatalogueModel:
    info = None if status is None else status.info
    efforts = [] if info is None or info.chat is None else info.chat.efforts
    return CatalogueModel(
        slug=name,
        display_name=name,
        context_window=UNSET if info is None else info.context_length,
        supported_reasoning_levels=[EffortLevel(effort, effort) for effort in efforts],
        truncation_policy={"mode": "tokens", "limit": _OUTPUT_TOKENS},
    )
