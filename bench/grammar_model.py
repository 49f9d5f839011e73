"""A model of steps with grammars: what host and device do when, and how long a step takes.

    python -m bench.grammar_model

One thread launches passes and draws, and waits for tokens and masks. The device computes what was
launched, in order. A pass is launched in `PIECES` parts, and the device can begin each part as soon
as it is launched.
With grammars, the previous tokens are read after the first part, masks are computed during the
launch of the others, and the draw is launched apart (`kvd.worker.core.masks`). Prints the speed
relative to steps without grammars. The times are assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvd.worker.core.masks import FIRST_PART

PIECES = round(1 / FIRST_PART)
"""Parts of a launch. Tokens are read after the first one."""
STEPS = 80


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


class _Device:
    def __init__(self) -> None:
        self.free_at = 0.0
        """Time at which it has computed everything that was launched."""

    def run(self, launched_at: float, takes: float) -> None:
        self.free_at = max(self.free_at, launched_at) + takes


def step_of(times: Times, *, grammars: bool) -> Step:
    """Return the steady step of rows with or without grammars."""
    device = _Device()
    now = token_at = 0.0
    ends, waits = [0.0], [0.0]
    for _ in range(STEPS):
        waited, masks_at, delivers_first = 0.0, 0.0, False
        now += times.prepare
        for piece in range(PIECES):
            now += times.launch / PIECES
            device.run(now, times.device / PIECES)
            if grammars and piece == 0:
                waited += max(0.0, token_at - now)
                now = max(now, token_at) + times.read
                masks_at = now + times.masks
        if grammars:
            delivers_first = masks_at > now
            now += times.deliver * delivers_first
            waited += max(0.0, masks_at - now)
            now = max(now, masks_at) + times.draw + times.apart
        device.run(now, times.sample)
        last_token_at, token_at = token_at, device.free_at
        if not grammars:  # the last step's tokens, while the device computes
            waited += max(0.0, last_token_at - now)
            now = max(now, last_token_at) + times.read
        now += times.deliver * (not delivers_first)
        ends.append(now)
        waits.append(waited)
    half = STEPS // 2
    return Step((ends[-1] - ends[half]) / (STEPS - half), sum(waits[half + 1 :]) / (STEPS - half))


def speed(times: Times) -> float:
    """Return the speed of steps with grammars, relative to that of steps without."""
    return step_of(times, grammars=False).period / step_of(times, grammars=True).period


def main() -> None:
    print("device  masks  without  speed with grammars")
    for device in (1.5, 2.5, 3.5, 6.0):
        for masks in (0.2, 1.2, 3.0):
            times = Times(device, masks)
            plain = step_of(times, grammars=False).period
            print(f"{device:6} {masks:6} {plain:8.2f} {speed(times):20.2f}")


if __name__ == "__main__":
    main()
