"""Talk to the daemon from Python: `Client` blocks, `AsyncClient` does not.

Needs `protocol` and the standard library; never MLX. Errors are those of `protocol.errors`::

    with Client() as kvd:
        print(kvd.generate("demo", "To open a file,", max_tokens=32).text)
"""

from kvd.client.aio import AsyncClient, AsyncCompletion, AsyncLoad
from kvd.client.blocking import Client, Completion, Load

__all__ = ["AsyncClient", "AsyncCompletion", "AsyncLoad", "Client", "Completion", "Load"]
