"""Answers `explain`: collects the numbers of a forecast.

The worker of a loaded model reports what its rows cost. Without a worker, or if it has no formulas
for its model, the costs are estimated from the model's files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from actors.machines.forecast import Question, forecast
from actors.machines.governors import devices_of
from protocol.kv import KVSpec
from protocol.model_source import is_source
from protocol.policy import ModelPolicy

if TYPE_CHECKING:
    from actors.machines.governors import Governors
    from actors.ports import EstimateModel
    from actors.status import StatusTable
    from protocol.explain_messages import Explain
    from protocol.forecast import Forecast
    from protocol.segments import PrefixSpace


@dataclass(frozen=True)
class Explainer:
    """Answers `Explain` messages."""

    status: StatusTable
    governors: Governors
    estimate_model: EstimateModel
    max_rows: int
    """Rows that a worker runs at once."""
    stored: Callable[[str], PrefixSpace | None] = lambda _: None
    """Returns what the prefix store has for a model."""

    async def __call__(self, asked: Explain) -> Forecast:
        """Return the forecast; raise a `KvdError` if the model cannot be found or read."""
        status = self.status.models.get(asked.model)
        known = self.status.lookup(asked.model)
        source = known.source if known is not None else status.source if status else asked.model
        kv = known.kv if known is not None else status.kv if status else asked.kv or KVSpec()
        own = known.policy.ranks if known else max(1, len(status.ranks)) if status else 1
        ranks = asked.ranks or own
        if status is None and known is None and not is_source(asked.model):
            raise self.status.unknown_model(asked.model)
        info = status.info if status is not None and ranks == own else None
        if info is not None and info.costs is not None:
            costs, schemes, longest = info.costs, info.kv_schemes, info.context_length
        else:
            estimate = await self.estimate_model(source, kv, ranks)
            costs, schemes, longest = estimate.costs, estimate.schemes, estimate.context_length
        if known is not None and known.policy.max_context is not None:
            longest = min(longest, known.policy.max_context)
        own_policy = known.policy if known is not None else ModelPolicy()
        device = own_policy.device if asked.device is None else asked.device
        placed = replace(own_policy, ranks=ranks, device=device)
        if (missing := self.status.missing_device(asked.model, placed)) is not None:
            raise missing
        places = devices_of(placed, self.status.devices)
        governor = min(
            (self.governors.devices[it] for it in places), key=lambda it: it.available_bytes
        )
        question = Question(
            asked.model,
            costs.divided(len(places)),
            schemes,
            rows=min(asked.rows, self.max_rows),
            context=min(asked.context or longest, longest),
            max_rows=self.max_rows,
        )
        found = forecast(
            question,
            governor,
            asyncio.get_running_loop().time(),
            source=source,
            state=status.state if status else "comes on demand" if known else "not loaded",
            measured=info is not None and info.costs is not None,
            policy=known.policy if known is not None else None,
        )
        return replace(found, stored=self.stored(asked.model))
