"""The models folder that the configuration names, and its models as the registry knows them."""

from __future__ import annotations

from pathlib import Path

import structlog

from kvd.config.config import Config
from kvd.config.sources import absolute
from kvd.host.models_dir import ModelsDir


def models_dir(settings: Config, root: Path) -> ModelsDir:
    """Return the models folder; ``root``: the daemon's home."""
    if not settings.models_dir:
        return ModelsDir(None)
    return ModelsDir(Path(absolute(settings.models_dir, root)))


def sources_in(folder: ModelsDir) -> dict[str, str]:
    """Return the sources of all models that may be loaded, by name; log the others."""
    found = {}
    for model in folder.scan():
        if model.problem:
            log = structlog.get_logger("kvd.config.models_dir")
            log.warning("model folder not usable", folder=str(model.path), reason=model.problem)
        else:
            found[model.name] = str(model.path)
    return found
