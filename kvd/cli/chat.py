"""`kvctl chat`: its options; the conversation itself is in `kvd.cli.conversation`."""

from __future__ import annotations

from typing import Any

import rich_click as click

from kvd.cli.common import CommonOptions, common_options, model_name, option, standard_panels
from kvd.cli.conversation import Chat, Settings
from kvd.cli.sampling import sampling_options


@click.command(panels=standard_panels())
@model_name()
@option("--system", "TEXT", "A system message.")
@click.option("--no-history", is_flag=True, help="Do not store the lines that you type.")
@sampling_options(temperature=Settings.temperature)
@common_options()
def chat(
    common: CommonOptions, model: str, *, system: str | None, no_history: bool, **sampling: Any
) -> None:
    """Chat with a model; /help lists the commands."""
    with common.connected() as client:
        conversation = Chat(client, model, Settings(**sampling), common, system=system)
        conversation.run(store_history=not no_history)
