"""The limits of the budget: its minimum, and the memory of the machine."""

from __future__ import annotations

from kvd.host.memory import BUDGET_SHARE, default_budget
from kvd.host.units import format_bytes, parse_bytes
from protocol.types import HostMemory, Problem

MIN_BUDGET_BYTES = 64 * 2**20
"""Less than any model needs: a worker holds 75 MiB with the embedded model."""


def parse_budget(text: str | int) -> int:
    """Return the bytes of a budget such as ``8GiB``; raises ValueError below the minimum."""
    size = parse_bytes(text)
    if size < MIN_BUDGET_BYTES:
        raise ValueError(
            f"{format_bytes(size)} is less than the minimum of "
            f"{format_bytes(MIN_BUDGET_BYTES)}; write the unit too, as in 8GiB"
        )
    return size


def compare_with_machine(budget_bytes: int, host: HostMemory) -> list[Problem]:
    """Return a problem if the budget exceeds what models can use, or is a guess."""
    if host.accelerator_hidden and budget_bytes == default_budget(host):
        return [
            Problem(
                key="budget",
                observed="NVIDIA's driver does not report the memory of the GPU, so the budget is "
                f"{format_bytes(budget_bytes)}, three quarters of the machine's memory",
                advice="set budget to what models may use of the GPU's memory",
            )
        ]
    most = host.accelerator_limit or host.total
    if budget_bytes <= most:
        return []
    return [
        Problem(
            key="budget",
            observed=f"the budget of {format_bytes(budget_bytes)} is more than the "
            f"{format_bytes(most)} that models can use here",
            advice=f"set budget to at most {format_bytes(int(BUDGET_SHARE * most))}",
        )
    ]
