"""`kvctl run`: loads a model if it must, then answers one prompt or chats."""

from __future__ import annotations

import sys
from typing import Any

import rich_click as click

from kvd.cli import local_models
from kvd.cli.chat import Chat, Settings
from kvd.cli.common import (
    CommonOptions,
    common_options,
    model_source,
    option,
    standard_panels,
    status_with,
)
from kvd.cli.console import read_stdin
from kvd.cli.generate import show
from kvd.cli.load import follow
from kvd.cli.options import KeepAlive
from kvd.cli.pull import folder_of_models, pull_model
from kvd.cli.pulled import origin_of
from kvd.cli.sampling import sampling_options
from kvd.client import Client
from kvd.config.sources import absolute
from protocol.errors import UnknownModel
from protocol.model_source import is_hub_id, short_name
from protocol.types import ChatMessage


@click.command(panels=standard_panels())
@model_source("What to run.")
@click.argument("prompt", required=False, help="One question; - reads stdin. Without it: a chat.")
@option("--system", "TEXT", "A system message.")
@click.option("--pull", "may_pull", is_flag=True, help="Download the model if it is missing.")
@option(
    "--keep-alive",
    "TIME",
    "Unload the model after this time without requests: 5m, 0, or -1 for no limit.",
    name="keep_alive_s",
    type=KeepAlive(),
)
@sampling_options(temperature=Settings.temperature)
@common_options()
def run(
    common: CommonOptions,
    model: str,
    prompt: str | None,
    *,
    system: str | None,
    may_pull: bool,
    keep_alive_s: float | None,
    **sampling: Any,
) -> None:
    """Load a model if needed, then answer a PROMPT, or chat."""
    with common.connected() as client:
        name = _ready(common, client, absolute(model), may_pull=may_pull)
        if prompt is None and sys.stdin.isatty():
            chat = Chat(
                client,
                name,
                Settings(**sampling),
                common,
                system=system,
                keep_alive_s=keep_alive_s,
            )
            chat.run()
            return
        text = read_stdin() if prompt in {None, "-"} else str(prompt)
        messages = [ChatMessage("system", system)] if system else []
        messages.append(ChatMessage("user", text))
        completion = client.generate(name, messages=messages, keep_alive_s=keep_alive_s, **sampling)
        show(completion, common)


def _ready(common: CommonOptions, client: Client, model: str, *, may_pull: bool) -> str:
    """Return the name for requests, after the model was loaded if it was not."""
    status = status_with(client, model)
    states = {one.name: one.state for one in status.models}
    if model not in states and model not in status.unloaded:
        model = _source(common, model, may_pull=may_pull)
    name = model if model in states else short_name(model)
    if states.get(name) != "ready":
        follow(client.load(model), common, name)
    return name


def _source(common: CommonOptions, model: str, *, may_pull: bool) -> str:
    """Return what to load for a model that the daemon does not know; pull it if the user agrees."""
    if not is_hub_id(model):
        return model
    folder = folder_of_models(common) / short_name(model)
    origin = origin_of(folder)
    if origin is not None and origin.source == model:
        return folder.name
    if any(one.source == model and one.complete for one in local_models.in_hub_cache()):
        return model
    agrees = may_pull or (
        sys.stdin.isatty()
        and click.confirm(f"{model} is not on this machine. Download it?", err=True)
    )
    if not agrees:
        raise UnknownModel(
            f"{model} is not on this machine; `kvctl pull {model}` or --pull downloads it",
            model=model,
        )
    return pull_model(common, model).name
