"""`kvctl pin` and `kvctl unpin`."""

from __future__ import annotations

import rich_click as click

from kvd.cli.common import CommonOptions, common_options, model_argument
from kvd.cli.console import print_message


@click.command()
@model_argument
@common_options()
def pin(common: CommonOptions, model: str) -> None:
    """Never unload a model to make room."""
    _pin(common, model, pinned=True)


@click.command()
@model_argument
@common_options()
def unpin(common: CommonOptions, model: str) -> None:
    """Allow a model to be unloaded to make room."""
    _pin(common, model, pinned=False)


def _pin(common: CommonOptions, model: str, *, pinned: bool) -> None:
    with common.connected() as client:
        reply = client.pin(model, pinned=pinned)
        if common.json:
            common.print_json({"model": reply.model, "pinned": reply.pinned})
        else:
            print_message("{} is {}", reply.model, "pinned" if reply.pinned else "not pinned")
