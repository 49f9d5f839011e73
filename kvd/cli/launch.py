"""`kvctl launch`: start a coding agent that uses a model of the daemon."""

from __future__ import annotations

import http.client
import os
import shlex
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import rich_click as click

from kvd.cli import completion
from kvd.cli.agents import AGENTS, Agent, Settings, Target
from kvd.cli.common import CommonOptions, common_options, find_model, option
from kvd.cli.console import format_message, print_message, stderr_console, write
from kvd.client import Client
from kvd.host.home import Home
from protocol import atomic_file
from protocol.errors import (
    AgentError,
    InvalidRequest,
    NotRunning,
    PermissionDenied,
    UnknownModel,
    UnsupportedModel,
)
from protocol.types import ChatAbilities, DaemonStatus, ModelStatus

KEY_VARIABLE = "KVD_API_KEY"
SMALL_CONTEXT = 32_768
"""Tokens below which agents have little room: their own instructions and tools take 10 to 20
thousand."""
_QUICK_S = 10.0
"""Seconds for the daemon to answer over HTTP."""


@click.command()
@click.argument("agent", type=click.Choice(list(AGENTS)), help="The agent.")
@click.argument(
    "arguments", nargs=-1, type=click.UNPROCESSED, help="Arguments for the agent, after --."
)
@option(
    "--model",
    "NAME",
    "The model (default: the only one).",
    shell_complete=completion.model_names,
)
@click.option(
    "--print", "only_print", is_flag=True, help="Print the command instead of running it."
)
@common_options()
def launch(
    common: CommonOptions,
    agent: str,
    *,
    arguments: tuple[str, ...],
    model: str | None,
    only_print: bool,
) -> None:
    """Start a coding agent with a model of the daemon.

    The agent gets the daemon's address, the model and its context window as environment variables
    or arguments; none of its files is changed. The model is loaded first and must be able to call
    tools. If the HTTP API requires a key, set KVD_API_KEY. The exit status is the agent's.
    """
    chosen = AGENTS[agent]
    with common.guarded():
        program = chosen.program if only_print else _find(chosen, agent)
        with common.connected() as client:
            target = _target(client, model, chosen)
        settings = chosen.settings(target)
        command = [program, *settings.arguments, *arguments]
        if only_print or common.json:
            _print(common, command, settings)
        else:
            _run(command, settings)


def _find(agent: Agent, name: str) -> str:
    path = shutil.which(agent.program)
    if path is None:
        raise AgentError(
            f"{name} is not installed: there is no {agent.program} in PATH; `{agent.install}` "
            "installs it"
        )
    return path


def _target(client: Client, name: str | None, agent: Agent) -> Target:
    """Return what the agent must know; loads the model. Raises errors with advice."""
    status = client.status()
    origin = _origin(status)
    key = os.environ.get(KEY_VARIABLE, "")
    _get_models(origin, key)
    model = _loaded(client, _choose(status) if name is None else name)
    assert model.info is not None, "a ready model has a description"
    _check_tools(model.name, model.info.chat)
    context = model.info.context_length
    if context < SMALL_CONTEXT:
        print_message(
            "[bold yellow]note:[/] the context of {} has {} tokens, and agents need about {}",
            model.name,
            context,
            SMALL_CONTEXT,
        )
    reasons = model.info.chat is not None and bool(model.info.chat.reasoning)
    catalogue = ""
    if agent.needs_catalogue:  # now it has the context of the model, which is loaded
        catalogue = _save_catalogue(Home(Path(status.home)), _get_models(origin, key))
    return Target(origin, model.name, context, key, reasons, catalogue)


def _origin(status: DaemonStatus) -> str:
    """Return the daemon's TCP address as this machine reaches it."""
    for address in status.http:
        parts = urlsplit(address)
        if parts.scheme != "http" or parts.hostname is None:
            continue
        local = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(parts.hostname)  # noqa: S104 - no bind
        return f"http://{local}:{parts.port}" if local else address
    reasons = [f"{one.observed}; {one.advice}" for one in status.problems if "http" in one.key]
    raise NotRunning(
        "the daemon has no HTTP address that an agent could use; "
        + (reasons[0] if reasons else "set enabled and tcp of [http] in config.toml to true")
    )


def _save_catalogue(home: Home, models: bytes) -> str:
    """Write the models to a file of the daemon's cache; return its path."""
    path = home.cache / "codex-models.json"
    atomic_file.write(path, models)  # atomic: another agent may start at this moment
    return str(path)


def _get_models(origin: str, key: str) -> bytes:
    """Return the body of ``/v1/models``.

    Raises an error if the HTTP API does not answer, or does not accept the key.
    """
    parts = urlsplit(origin)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_QUICK_S)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        connection.request("GET", "/v1/models", headers=headers)
        response = connection.getresponse()
        code, body = response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        raise NotRunning(f"{origin} does not answer: {error}; see `kvctl status`") from error
    finally:
        connection.close()
    if code == 401:
        raise PermissionDenied(
            f"the HTTP API does not accept the key in {KEY_VARIABLE}; `kvctl key new NAME --save` "
            "makes another one"
            if key
            else f"the HTTP API requires a key: set {KEY_VARIABLE}; `kvctl key new NAME --save` "
            "makes one"
        )
    if code != 200:
        raise NotRunning(f"{origin}/v1/models answers {code}; see `kvctl logs`")
    return body


def _choose(status: DaemonStatus) -> str:
    names = sorted({*(model.name for model in status.models), *status.unloaded})
    if len(names) == 1:
        return names[0]
    if not names:
        raise UnknownModel("the daemon has no model; `kvctl load` adds one")
    raise InvalidRequest(f"choose a model with --model: {', '.join(names)}", field="model")


def _loaded(client: Client, name: str) -> ModelStatus:
    """Return the status of a model that is ready; a text to tokenize loads it."""
    waiting = format_message("waiting for {}", name)
    with stderr_console().status(waiting, spinner="dots"):
        client.tokenize(name, "a", limit=0)
    return find_model(client.status(), name)


def _check_tools(name: str, chat: ChatAbilities | None) -> None:
    if chat is None:
        raise UnsupportedModel(
            f"{name} has no chat template, so agents cannot use it; load an instruction-tuned model"
        )
    if not chat.tools:
        raise UnsupportedModel(
            f"{name} cannot call tools, which agents need: its chat template does not allow it; "
            "load another model (docs/models.md)"
        )


def _print(common: CommonOptions, command: Sequence[str], settings: Settings) -> None:
    if common.json:
        common.print_json(
            {
                "command": command,
                "environment": settings.environment,
                "removed": settings.removed,
            }
        )
        return
    unset = [f"-u {name}" for name in settings.removed]
    given = [f"{name}={_quoted(value)}" for name, value in settings.environment.items()]
    prefix = ["env", *unset, *given] if unset or given else []
    write(" ".join([*prefix, shlex.join(command)]) + "\n")


def _quoted(value: str) -> str:
    """Return a value for the shell, with the key as a variable: what is printed gets into logs."""
    key = os.environ.get(KEY_VARIABLE, "")
    parts = value.split(key) if key else [value]
    return f'"${KEY_VARIABLE}"'.join(shlex.quote(part) if part else "" for part in parts) or "''"


def _run(command: Sequence[str], settings: Settings) -> NoReturn:
    """Become the agent: it has the terminal, the signals and the exit status."""
    environment = _environment(os.environ, settings)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and programs inherit it
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execve(command[0], list(command), environment)  # noqa: S606 - the user's own agent
    except OSError as error:
        raise AgentError(f"{command[0]} does not start: {error.strerror}") from error


def _environment(given: Mapping[str, str], settings: Settings) -> dict[str, str]:
    kept = {name: value for name, value in given.items() if name not in settings.removed}
    return kept | settings.environment
