"""Python clients of the daemon: `Client` blocks, `AsyncClient` runs on an asyncio loop.

Both raise the errors of `protocol.errors` and never import MLX::

    with Client() as kvd:
        print(kvd.generate("demo", "To open a file,", max_tokens=32).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvd.client.blocking import Client, Completion, Load

if TYPE_CHECKING:
    from kvd.client.aio import AsyncClient, AsyncCompletion, AsyncLoad

__all__ = ["AsyncClient", "AsyncCompletion", "AsyncLoad", "Client", "Completion", "Load"]


def __getattr__(name: str) -> Any:
    # Importing asyncio takes as long as everything that the blocking client needs.
    if name in __all__:
        from kvd.client import aio  # noqa: PLC0415

        return getattr(aio, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
