"""The chat template of the embedded model, with tools, tool results and reasoning.

The forms are Qwen's: calls as JSON in ``<tool_call>``, results in ``<tool_response>``, reasoning
in ``<think>``. The wording is this model's own and short, because it costs tokens in every prompt.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import jinja2

MARKERS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip
"""Tokens of their own, at the end of the vocabulary."""

TEMPLATE = """\
{%- set first = messages[0] if messages and messages[0].role == 'system' else none -%}
{%- if tools -%}
{{ '<|im_start|>system\\n' }}
{%- if first %}{{ first.content + '\\n\\n' }}{% endif -%}
{{ 'Functions:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor -%}
{{ '\\n</tools>\\nTo call one, answer with its name and arguments as JSON:\\n' }}
{{- '<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- elif first -%}
{{ '<|im_start|>system\\n' + first.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- elif not (loop.first and first) -%}
{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for tool_call in message.tool_calls or [] -%}
{%- set tool_call = tool_call.function if tool_call.function else tool_call -%}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif -%}
{{ '<tool_call>\\n{"name": ' + (tool_call.name | tojson) + ', "arguments": ' }}
{{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking %}{{ '<think>\\n' }}{% endif -%}
{%- endif -%}
"""


@functools.cache
def _compiled() -> jinja2.Template:
    # As in transformers, which renders the template in use.
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE)


def render(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] = (),
    *,
    prompt: bool = False,
    thinks: bool = False,
) -> str:
    """Return the text of a conversation; ``prompt``: with the beginning of an answer."""
    return _compiled().render(
        messages=list(messages),
        tools=list(tools) or None,
        add_generation_prompt=prompt,
        enable_thinking=thinks,
    )
