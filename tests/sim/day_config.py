"""The configuration of a simulated day: a real `config.toml`, read at each start and by reloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvd.config import config
from kvd.config.options import Options
from kvd.config.reload import Reloader, by_name, known_model
from kvd.config.settings import LiveSettings
from kvd.host.home import Home

if TYPE_CHECKING:
    import random

    from actors.status import KnownModel
    from kvd.config.reload import RunningSystem

MIB = 2**20
BUDGET = 100 * MIB
PAGE = 4 * MIB


class DayConfig:
    """The file, with a table for each model."""

    def __init__(self, draw: random.Random, folder: Path) -> None:
        self._options = Options(Home(folder))
        self._drawn = draw_models(draw)
        self.reset()

    def reset(self) -> None:
        """Write the file with all models as they were drawn."""
        self._entries = {name: dict(entry) for name, entry in self._drawn.items()}
        self._write()

    def remove(self, name: str) -> None:
        self._entries.pop(name, None)
        self._write()

    def change(self, name: str, **fields: Any) -> None:
        """Write a model with other fields than those it was drawn with; None omits a field."""
        self._entries[name] = self._drawn[name] | fields
        self._write()

    def _write(self) -> None:
        lines = ['blas = "off"']
        for entry in self._entries.values():
            lines.append("[[models]]")
            values = {key: value for key, value in entry.items() if value is not None}
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        self._options.home.config.write_text("\n".join(lines))

    def _read(self) -> config.Config:
        return config.load(self._options.home.config)

    def known(self) -> dict[str, KnownModel]:
        """Return the models of the file, as a daemon knows them at its start."""
        root = self._options.home.root
        return {name: known_model(entry, root) for name, entry in by_name(self._read()).items()}

    def connect(self, running: RunningSystem) -> LiveSettings:
        """Return what a daemon's clients read and change."""
        reloader = Reloader(
            self._options,
            self._read(),
            running,
            default_budget=lambda: BUDGET,
            load=lambda entry: None,
        )
        return LiveSettings(self._options, reloader)


def draw_models(draw: random.Random) -> dict[str, dict[str, Any]]:
    """Draw three models, of which two or three fit into the budget."""
    models = {}
    for name in ("a", "b", "c"):
        fields: dict[str, float | str] = {
            "load": draw.choice([0.1, 1.0, 4.0]),
            "tps": draw.choice([20, 100]),
            "weights": draw.choice([16, 24, 40]) * MIB,
            "page_bytes": PAGE,
            "pages": draw.randint(1, 3),
            "ahead": draw.choice([64, 128, 512]),
        }
        if draw.random() < 0.05:
            fields["load_error"] = "invalid_model"
        models[name] = {
            "source": "fake:" + ",".join(f"{key}={value}" for key, value in fields.items()),
            "alias": name,
            "kv.scheme": "k8v8",
            "kv.prefix_every": 64,
            "load": "demand",
            "ranks": draw.choice([1, 1, 1, 2, 3]),
            "idle_ttl_s": draw.choice([None, None, 20.0]),
        }
    return models
