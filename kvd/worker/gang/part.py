"""Loads one rank's part of a model. All ranks run the same steps in the same order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from kvd.worker.artifacts import modules
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.scheme import schemes_of
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.engine import ReportProgress
from kvd.worker.gang import records
from kvd.worker.gang.agreed_checks import AgreedChecks
from kvd.worker.gang.control import FollowerPeers, Peers, require_equal
from kvd.worker.gang.shard import shard
from kvd.worker.native import activation
from kvd.worker.process import shortage
from kvd.worker.serving import calibration, loading, model_files, probe, seam
from kvd.worker.serving.bit_choice import choose_bits
from kvd.worker.serving.runner import Runner
from protocol.errors import UnsupportedModel
from protocol.worker import LoadModel

AT_ONCE = 32 * 1024 * 1024
"""Bytes of a rank's part that are read together: whole tensors are read, and divided then."""


def load_part(load: records.Load, peers: FollowerPeers, group: Any) -> Runner:
    """Load a follower's part and measure it; return its runner, with an empty cache."""
    seam.install()
    shortage.install_retries()
    modules.activate(_ignore_progress)
    library = _library(peers) if load.native else None
    mx.set_cache_limit(loading.freed_bytes(load.command))
    headers = model_files.inspect(Path(load.path))
    opened = model_files.open_without_tokenizer(headers.path, load.vocab_size)
    loaded = read_part(opened, headers.path, _ignore_progress, library, peers, group)
    verdict = calibration.find(headers)
    schemes = calibration.apply_floor(schemes_of(load.command.kv), verdict)
    layers = len(make_prompt_cache(loaded.model))
    mode = load.command.bits_by_layer
    chosen = choose_bits(schemes, layers, mode=mode, calibrated=verdict, probed=None)
    settings = loading.settings_of(load.command, schemes, chosen.mixes)
    served = serve_part(settings, loaded, library, peers)
    measure(peers, loaded, load.command, served.runner)
    return served.runner


def _library(peers: Peers) -> ModuleType:
    """Return the native library, which the leader has built; raises ``RuntimeError``."""
    found = activation.activate(_ignore_progress, peers.size)
    if found.library is None:
        raise RuntimeError(f"the leader uses the native library, but here {found.reason}")
    return found.library


def read_part(
    opened: model_files.LoadedModel,
    path: Path,
    progress: ReportProgress,
    library: ModuleType | None,
    peers: Peers,
    group: Any,
) -> model_files.LoadedModel:
    """Divide an opened model, and read this rank's part of the weights.

    Needs memory for the part and the tensors that are read together.
    """
    shard(opened.model, str(opened.config.get("model_type")), group)
    checks = AgreedChecks(peers)
    return model_files.read_weights(opened, path, progress, library, checks, at_once=AT_ONCE)


def serve_part(
    settings: CacheSettings,
    loaded: model_files.LoadedModel,
    library: ModuleType | None,
    peers: Peers,
) -> probe.Served:
    """Choose how to serve the model, together with all ranks; raises `UnsupportedModel`."""
    require_equal(peers, "the cache's settings", repr((settings.store_schemes, settings.mixes)))
    checks = AgreedChecks(peers)
    served = loading.serve(loaded, settings, library, _ignore_progress, checks)
    runner = served.runner
    if not isinstance(runner.cache, ModelCache):
        raise UnsupportedModel(
            "a model over several ranks needs pages, and this one is served with mlx-lm's own"
            f" caches ({next(iter(served.reasons.values()), served.path)}): load it with one rank"
        )
    runner.ranks = peers.size
    runner.compile(checks)
    runner.pack(checks)
    runner.split_head(checks)
    by_kernel = [store.is_flushed_by_kernel for store in runner.cache.stores]
    require_equal(peers, "how the model is served", f"{served.name}, {runner.floors}, {by_kernel}")
    return served


@dataclass(frozen=True)
class Measured:
    """Bytes of all ranks together."""

    base: int
    """What the processes are charged besides pages."""
    weights: int
    active: int
    """Arrays of MLX, which are the weights and what the checks left."""


def measure(
    peers: Peers, loaded: model_files.LoadedModel, command: LoadModel, runner: Runner
) -> Measured:
    """Measure all ranks, whose caches must have no pages."""
    base = loading.base_bytes(loaded, loading.with_chunk(command, runner), runner)
    found = peers.exchange("measured bytes", (base, loaded.weights_bytes, mx.get_active_memory()))
    return Measured(*(sum(one) for one in zip(*found, strict=True)))


def _ignore_progress(_stage: str, _fraction: float) -> None:
    """Do nothing: the leader reports the progress of all ranks."""
