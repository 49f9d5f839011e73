"""Coding agents that `kvctl launch` starts: how each is pointed at kvd. Pure.

Each gets its settings as environment variables or arguments, which win over its own files and
change none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

MAX_OUTPUT_TOKENS = 32_000
"""Most tokens that an agent asks for in one answer; fewer if the context is smaller."""
_SHARE_OF_CONTEXT = 4
"""One answer takes at most a fourth of the context, or agents find no room for the conversation."""


@dataclass(frozen=True)
class Target:
    """What an agent needs to know about kvd."""

    origin: str
    """Address without a path, such as ``http://127.0.0.1:11711``."""
    model: str
    context: int
    """Tokens of the model's context."""
    key: str = ""
    """API key; empty: none is required."""
    reasons: bool = False
    """Whether the model can reason."""
    catalogue: str = ""
    """File with the models for Codex; empty: none."""

    @property
    def max_output(self) -> int:
        return max(1, min(MAX_OUTPUT_TOKENS, self.context // _SHARE_OF_CONTEXT))

    @property
    def some_key(self) -> str:
        """The key, or a text for agents that do not start without one."""
        return self.key or "none"


@dataclass(frozen=True)
class Settings:
    """What is added to an agent's environment and command line."""

    environment: dict[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    """Variables that would send requests elsewhere, or with another key."""
    arguments: tuple[str, ...] = ()
    """Arguments before those of the user."""


@dataclass(frozen=True)
class Agent:
    """A program, and its settings for a target."""

    program: str
    install: str
    """Command that installs it."""
    settings: Callable[[Target], Settings]
    needs_catalogue: bool = False
    """Whether it reads `Target.catalogue`."""


def _claude(target: Target) -> Settings:
    names = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    return Settings(
        {
            "ANTHROPIC_BASE_URL": target.origin,
            "ANTHROPIC_AUTH_TOKEN": target.some_key,
            **{f"ANTHROPIC_{name}": target.model for name in names},
            "CLAUDE_CODE_SUBAGENT_MODEL": target.model,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.context),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.max_output),
            # A line that changes with each request would change the prompt's beginning.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        },
        removed=("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"),
    )


def _codex(target: Target) -> Settings:
    provider: dict[str, str] = {
        "name": "kvd",
        "base_url": f"{target.origin}/v1",
        "wire_api": "responses",
    }
    environment = {}
    if target.key:
        provider["env_key"] = "KVD_API_KEY"
        environment["KVD_API_KEY"] = target.key
    table = ", ".join(f"{name} = {_toml(value)}" for name, value in provider.items())
    values = {
        "model": _toml(target.model),
        "model_provider": _toml("kvd"),
        "model_providers.kvd": f"{{ {table} }}",
        "model_context_window": str(target.context),
    }
    if target.catalogue:  # without it, Codex offers no tool for patches
        values["model_catalog_json"] = _toml(target.catalogue)
    arguments = [part for name, value in values.items() for part in ("-c", f"{name}={value}")]
    return Settings(environment, arguments=tuple(arguments))


def _opencode(target: Target) -> Settings:
    model = {
        "name": target.model,
        "tool_call": True,
        "reasoning": target.reasons,
        "limit": {"context": target.context, "output": target.max_output},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "kvd",
        "options": {"baseURL": f"{target.origin}/v1", "apiKey": target.some_key},
        "models": {target.model: model},
    }
    name = f"kvd/{target.model}"
    config = {"provider": {"kvd": provider}, "model": name, "small_model": name}
    return Settings({"OPENCODE_CONFIG_CONTENT": msgspec.json.encode(config).decode()})


def _qwen(target: Target) -> Settings:
    return Settings(
        {
            "OPENAI_BASE_URL": f"{target.origin}/v1",
            "OPENAI_API_KEY": target.some_key,
            "OPENAI_MODEL": target.model,
        }
    )


def _toml(text: str) -> str:
    """Return a text as a string of TOML; JSON's strings are a part of them."""
    return msgspec.json.encode(text).decode()


AGENTS = {
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Agent("codex", "npm install -g @openai/codex", _codex, needs_catalogue=True),
    "opencode": Agent("opencode", "npm install -g opencode-ai", _opencode),
    "qwen": Agent("qwen", "npm install -g @qwen-code/qwen-code", _qwen),
}
"""By the name that `kvctl launch` takes."""
