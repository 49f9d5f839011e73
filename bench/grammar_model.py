"""A model of steps with grammars: what host and device do when, and how long a step takes.

    python -m bench.grammar_model

One thread launches passes and draws, and waits for tokens and masks. The device computes what was
launched, in order. A pass is launched in `PIECES` parts; the device can begin each of them at once.
For each order of reading tokens and launching passes (`kvd.worker.core.read_order`), prints the
speed relative to steps without grammars. If tokens are read first and the masks take at most
`TOGETHER` milliseconds, pass and draw are launched together. The times are assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvd.worker.core.masks import TOGETHER_SECONDS

PIECES = 3
"""Parts of a launch: MLX commits about 100 operations at once, and a pass has some 200."""
TOGETHER = 1e3 * TOGETHER_SECONDS
STEPS = 80
Order = Literal["without", "launch first", "read first"]


@dataclass(frozen=True)
class Times:
    """Milliseconds of one step's parts."""

    device: float
    """Computing a pass, on the device."""
    masks: float
    """Computing masks in threads, once the tokens are read."""
    prepare: float = 1.0
    """Planning the step and building its operations, on the host."""
    launch: float = 1.6
    draw: float = 0.15
    """Building the draw of a step with masks, in addition to that of a draw without them."""
    apart: float = 0.75
    """Launching a draw apart from its pass."""
    sample: float = 0.1
    """Drawing tokens, on the device."""
    read: float = 0.1
    """Reading tokens that are ready, on the host."""
    deliver: float = 0.8
    """Writing the text of the last tokens, on the host; before the draw if masks are missing."""


@dataclass(frozen=True)
class Step:
    """Milliseconds of a step, once all steps take the same time."""

    period: float
    waits: float
    """Waiting for tokens and masks, on the host."""
    spent: float
    """What depends on the order: that, and launching a draw apart from its pass."""


class _Device:
    def __init__(self) -> None:
        self.free_at = 0.0
        """Time at which it has computed everything that was launched."""

    def run(self, launched_at: float, takes: float) -> None:
        self.free_at = max(self.free_at, launched_at) + takes


def step_of(order: Order, times: Times) -> Step:
    """Return the steady step of an order."""
    device = _Device()
    now = token_at = masks_at = 0.0
    ends, waits, apart = [0.0], [0.0], False
    for _ in range(STEPS):
        waited, delivers_first, apart = 0.0, False, order != "without"
        now += times.prepare
        if order == "read first":
            waited += max(0.0, token_at - now)
            now = max(now, token_at) + times.read
            masks_at = now + times.masks
            waited += min(times.masks, TOGETHER)
            now += min(times.masks, TOGETHER)
            if times.masks <= TOGETHER:
                now += times.draw
                apart = False
        for piece in range(1, PIECES + 1):
            device.run(now + times.launch * piece / PIECES, times.device / PIECES)
        now += times.launch
        if apart:
            if order == "launch first":
                waited += max(0.0, token_at - now)
                now = max(now, token_at) + times.read
                masks_at = now + times.masks
            delivers_first = masks_at > now
            now += times.deliver * delivers_first
            waited += max(0.0, masks_at - now)
            now = max(now, masks_at) + times.draw + times.apart
        device.run(now, times.sample)
        last_token_at, token_at = token_at, device.free_at
        if order == "without":  # the last step's tokens, while the device computes
            waited += max(0.0, last_token_at - now)
            now = max(now, last_token_at) + times.read
        now += times.deliver * (not delivers_first)
        ends.append(now)
        waits.append(waited)
    half = STEPS // 2
    waiting = sum(waits[half + 1 :]) / (STEPS - half)
    spent = waiting + times.apart * apart
    return Step((ends[-1] - ends[half]) / (STEPS - half), waiting, spent)


def speed(order: Order, times: Times) -> float:
    """Return the speed of steps with grammars, relative to that of steps without."""
    return step_of("without", times).period / step_of(order, times).period


def main() -> None:
    print("device  masks  without  launch first  read first")
    for device in (1.5, 2.5, 3.5, 6.0):
        for masks in (0.2, 1.2, 3.0):
            times = Times(device, masks)
            plain = step_of("without", times).period
            first, second = speed("launch first", times), speed("read first", times)
            print(f"{device:6} {masks:6} {plain:8.2f} {first:13.2f} {second:11.2f}")


if __name__ == "__main__":
    main()
