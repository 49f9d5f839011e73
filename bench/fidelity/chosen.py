"""Names of recipes with the bits by layer that kvd chooses for a model.

``k4v4:probe`` has the bits of the level ``k4v4`` from the probe that a load runs, with all widths,
``k4v4:probe48`` the same with 4 and 8 bits only, and ``k4v4:calibrated`` those of a calibration in
the daemon's home. Each becomes a name with ``by-...``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvd.worker.cache.scheme import Scheme
from kvd.worker.device import on_cpu
from kvd.worker.serving import bit_choice, bit_mix, bit_probe, calibration
from kvd.worker.serving.bit_probe import BitProbe
from kvd.worker.serving.model_files import Headers, LoadedModel

LEVELS = (Scheme(8, 8), Scheme(8, 4), Scheme(4, 4))
WIDTHS = {"probe": bit_choice.WIDTHS, "probe48": (4, 8)}
PROBE_BYTES = 64 * 1024**3
"""Memory that the probe may take."""


class ChosenBits:
    """Replaces the names of one model's recipes. ``folder``: where calibrations are stored."""

    def __init__(self, loaded: LoadedModel, headers: Headers, folder: Path) -> None:
        self._loaded = loaded
        self._headers = headers
        self._folder = folder
        self._sides: list[bit_mix.LayerSides] | None = None
        self.sources: dict[str, str] = {}
        """Names as they were given, by those that replaced them."""

    def name(self, given: str) -> str:
        """Return the recipe's name with bits by layer; other names are returned as they are.

        Raises ``ValueError`` for a level that `LEVELS` lacks, and if there is no calibration.
        """
        scheme, *options = given.split(":")
        asked = [one for one in options if one in {*WIDTHS, "calibrated"}]
        if not asked:
            return given
        names = [one.name for one in LEVELS]
        if scheme not in names:
            raise ValueError(f"{given}: bits by layer are chosen for {', '.join(names)}")
        level = names.index(scheme)
        mix = (self._calibrated() if asked[0] == "calibrated" else self._probed(asked[0]))[level]
        rest = [one for one in options if one not in asked]
        if mix is not None:
            rest.append("by-" + "-".join(one.name for one in mix))
        name = ":".join([scheme, *rest])
        self.sources[name] = given
        return name

    def _layers(self) -> int:
        return len(self._loaded.model.layers)

    def _calibrated(self) -> Sequence[tuple[Scheme, ...] | None]:
        result = calibration.find(self._headers, self._folder)
        if result is None:
            raise ValueError(f"no calibration of this model in {self._folder}: run kvctl calibrate")
        return calibration.mixes_of(LEVELS, result, self._layers())

    def _probed(self, widths: str) -> Sequence[tuple[Scheme, ...] | None]:
        if self._sides is None:
            unit = bit_probe.CPU_UNIT if on_cpu() else bit_probe.UNITS[0]
            ids = bit_choice.text_ids(self._loaded)
            probe = BitProbe(self._loaded.model, ids, unit=unit, memory=PROBE_BYTES)
            while probe.units:
                probe.advance()
            self._sides = [one.sides() for one in probe.costs()]
        return bit_mix.mix_bits(self._sides, self._layers(), LEVELS, WIDTHS[widths])
