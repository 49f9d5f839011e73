"""Loads the embedded model as a worker does, with all checks of the probe."""

from __future__ import annotations

from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.native import activation
from kvd.worker.selftest.outcome import Outcome, outcome_of
from kvd.worker.serving import loading, model_files, seam
from kvd.worker.serving.kernel_check import describe_verdict


def load_demo() -> Outcome:
    chosen = activation.activate(_silently)
    seam.install()
    loaded = model_files.load(model_files.inspect(model_files.resolve("demo")).path)
    settings = CacheSettings(schemes=(Scheme(8, 8), Scheme(8, 4), Scheme(4, 4)))
    served = loading.serve(loaded, settings, chosen.library, _silently)
    text = f"served by {served.path}, logits off by {served.error:.1g}"
    numbers: dict[str, float | str] = {"path": served.path, "error": served.error}
    if chosen.status is not None:
        text += f"; native operations: {chosen.status}"
        numbers["native"] = chosen.status
    name = "the demo model"
    if (fused := served.fused) is None:
        return outcome_of(name, text, right=not served.reasons, **numbers)
    text += f"; {describe_verdict(fused)}"
    numbers |= {
        "fused": str(fused.used),
        "call_ms": fused.call_ms or 0.0,
        "reference_ms": fused.reference_ms or 0.0,
        "compile_s": fused.compile_s,
    }
    if not fused.used and fused.reason == "slower than plain operations":
        advice = "attach the report to an issue, with what else the machine was doing"
        return Outcome(name, "warn", text, advice, dict(numbers))
    return outcome_of(name, text, right=fused.used and not served.reasons, **numbers)


def _silently(_stage: str, _fraction: float) -> None:
    pass
