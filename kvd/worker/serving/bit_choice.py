"""Which bits the layers of each precision level get, and why.

A level's scheme is its size. Within it, a calibration decides, else the probe's estimates
(`kvd.worker.serving.bit_probe`), else all layers have one scheme. The probe runs once for a model:
at load while that takes less than `LOAD_SHARE` of the load's time, then while the worker is idle.
Its result is kept beside the calibrations, for the next load.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

import kvd
from kvd.demo.recall import make_recall_prompt
from kvd.worker.cache.scheme import Scheme
from kvd.worker.device import on_cpu
from kvd.worker.serving import bit_mix, bit_probe, calibration
from kvd.worker.serving.bit_probe import BitProbe, NoEstimateError, SideCosts
from kvd.worker.serving.calibration import CalibrationResult
from kvd.worker.serving.model_files import Headers, LoadedModel
from kvd.worker.serving.probe import UnknownCacheError
from protocol.kv import BitsMode
from protocol.types import BitsByLayer
from protocol.weights import BrokenFileError

LOAD_SHARE = 0.05
"""Most of a load's time that the probe takes, apart from one unit."""
TEXT_TOKENS = 512
"""Length of the text of which the probe reads the beginning."""
WIDTHS = (3, 4, 5, 6, 8)
"""Bits that the probe gives. With 2 bits, errors are too large for its estimate."""
METAL_WIDTHS = (4, 8)
"""Bits that layers get on Metal, where the kernels' speed with other widths is not measured."""
UNIFORM = {(4, 4): (5, 3)}
"""Bits of keys and values that cost less quality than others of the same size, without any estimate
(`docs/fidelity.md`)."""
PENDING = "to be estimated while the model is idle, for its next load"
KILLED = "not estimated, because the process of an estimate was killed; tried again after a day"
SEVERAL_RANKS = "not estimated for a model over several ranks"
VERSION = f"kvd {kvd.__version__}, mlx-lm {version('mlx-lm')}"
"""Versions that a result depends on. mlx-lm decides which caches a model has."""
RETRY_SECONDS = 24 * 3600.0
"""Time without a probe after one that was killed. The cause may have been another one."""

_log = logging.getLogger("kvd.worker")


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the probe found about a model; kept in a file beside calibrations."""

    key: str
    """The model's fingerprint."""
    version: str
    """`VERSION`; another one probes again."""
    layers: list[SideCosts] = []
    keys_fit: bool = False
    """Whether no layer has more elements of keys than of values."""
    problem: str | None = None
    """Why there is no estimate."""


class ProbeFile:
    """The kept result of a model. ``folder``: where calibrations are; ``key``: its fingerprint."""

    def __init__(self, folder: Path, key: str) -> None:
        self.key = key
        self.path = folder / f"{key}.probe"
        self._mark = folder / f"{key}.probing"
        """Exists while a unit runs, and after the process was killed meanwhile."""

    @classmethod
    def of(cls, headers: Headers) -> ProbeFile | None:
        """Return the file in the environment's folder; None if there is no folder."""
        named = os.environ.get(calibration.FOLDER_VARIABLE)
        if not named:
            return None
        try:
            return cls(Path(named), calibration.content_key(headers))
        except (OSError, BrokenFileError) as error:
            _log.info("the bits of layers are not probed: %s", error)
            return None

    def read(self) -> ProbeResult | None:
        """Return the result; None if there is none, or it is damaged or of other versions."""
        try:
            found = msgspec.json.decode(self.path.read_bytes(), type=ProbeResult)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            _log.warning("ignoring the estimates in %s: %s", self.path, error)
            return None
        return found if (found.key, found.version) == (self.key, VERSION) else None

    def write(self, found: ProbeResult) -> None:
        """Keep a result. A failure is logged: the next load probes again."""
        try:
            calibration.replace_file(self.path, msgspec.json.encode(found) + b"\n")
        except OSError as error:
            _log.warning("the estimates in %s are not kept: %s", self.path, error)

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Keep a mark while the block runs, which stays if the process is killed.

        SIGTERM removes the mark. If the block hangs, Python does not handle SIGTERM, and the mark
        stays when the daemon sends SIGKILL.
        """
        lock = self._write_mark()
        if lock is None:
            yield
            return
        try:
            with _before_sigterm(self._remove_mark):
                yield
        finally:
            self._remove_mark()
            os.close(lock)

    def _remove_mark(self) -> None:
        with suppress(OSError):
            self._mark.unlink()

    def _write_mark(self) -> int | None:
        """Write the mark; return its descriptor, whose lock shows that this process lives.

        None if there is no mark, or if another process that lives has it.
        """
        try:
            self._mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            _log.warning("the mark %s is not kept: %s", self._mark, error)
            return None
        try:
            if _is_free(lock):
                os.ftruncate(lock, 0)
                os.write(lock, VERSION.encode())
                os.fsync(lock)
                return lock
        except OSError as error:
            _log.warning("the mark %s is not kept: %s", self._mark, error)
        os.close(lock)
        return None

    def was_killed(self) -> bool:
        """Return whether a probe of these versions was killed less than `RETRY_SECONDS` ago."""
        try:
            with self._mark.open("rb") as file:
                recent = abs(time.time() - os.fstat(file.fileno()).st_mtime) < RETRY_SECONDS
                return recent and file.read() == VERSION.encode() and _is_free(file.fileno())
        except OSError:
            return False


@contextmanager
def _before_sigterm(call: Callable[[], None]) -> Iterator[None]:
    """Call ``call`` before SIGTERM is handled as usual. Other threads than main get no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: object) -> None:
        call()
        signal.signal(number, before)
        signal.raise_signal(number)

    before = signal.getsignal(signal.SIGTERM)  # known before `end` can be called
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_free(file: int) -> bool:
    """Lock an open file; return whether no other process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


@dataclass(frozen=True)
class BitChoice:
    """The schemes by layer of each precision level, as in `CacheSettings.mixes`."""

    mixes: tuple[tuple[Scheme, ...] | None, ...]
    info: BitsByLayer


def choose_bits(
    schemes: Sequence[Scheme],
    layers: int,
    *,
    mode: BitsMode,
    calibrated: CalibrationResult | None,
    probed: ProbeResult | None,
) -> BitChoice:
    """Choose the bits of a model's ``layers`` caches for each level.

    ``probed``: what is known so far; its ``problem`` says why there is no estimate.
    """
    if mode == "off":
        return _choice([None] * len(schemes), "uniform", "switched off")
    if calibrated is not None:
        mixes = calibration.mixes_of(schemes, calibrated, layers)
        return _choice(mixes, "calibration", f"measured on {calibrated.date[:10]}")
    if probed is None:
        return _choice(
            [None] * len(schemes), "uniform", "nothing to estimate, or no folder to keep it in"
        )
    if probed.problem is not None:
        fits = probed.keys_fit
        return _choice(_even(schemes, layers, fits=fits), "uniform", probed.problem)
    sides = [one.sides() for one in probed.layers]
    mixes = tuple(bit_mix.mix_bits(sides, layers, schemes, fast_widths()))
    return _choice(mixes, "probe", "estimated from the model's gradients")


def _choice(mixes: Sequence[tuple[Scheme, ...] | None], source: Any, reason: str) -> BitChoice:
    return BitChoice(tuple(mixes), BitsByLayer(source=source, reason=reason))


def _even(schemes: Sequence[Scheme], layers: int, *, fits: bool) -> list[tuple[Scheme, ...] | None]:
    """Return the better scheme of the same size for the levels that have one in `UNIFORM`."""
    found: list[tuple[Scheme, ...] | None] = []
    above = Scheme(16, 16)
    for scheme in schemes:
        bits = UNIFORM.get((scheme.k_bits, scheme.v_bits))
        own = scheme
        if fits and bits is not None and {*bits} <= {*fast_widths()}:
            better = Scheme(*bits, scheme.k_group, scheme.v_group)
            own = better if better.at_most(above) == better else scheme
        found.append(None if own == scheme else (own,) * layers)
        above = own
    return found


def fast_widths(*, calibrated: bool = False) -> tuple[int, ...]:
    """Return the bits that attention on this device is known to read at about full speed.

    ``calibrated``: for bits whose loss is measured afterwards. These may be 2, of which the probe
    knows too little.
    """
    if mx.metal.is_available() and not on_cpu():
        return METAL_WIDTHS
    return bit_mix.WIDTHS if calibrated else WIDTHS


class Probing:
    """The probe of a loaded model. Its result is kept for the next load.

    ``memory``: bytes that the probe may hold.
    """

    def __init__(self, loaded: LoadedModel, file: ProbeFile, memory: int) -> None:
        self._file = file
        self.found = ProbeResult(key=file.key, version=VERSION, problem=PENDING)
        """The newest result, which may be incomplete; `problem` gives the reason."""
        self._probe: BitProbe | None = None
        unit = bit_probe.CPU_UNIT if on_cpu() else bit_probe.UNITS[0]
        try:
            self._probe = BitProbe(loaded.model, text_ids(loaded), unit=unit, memory=memory)
        except UnknownCacheError as unknown:
            self._end(problem=str(unknown))

    @property
    def has_work(self) -> bool:
        return self._probe is not None

    @property
    def held_bytes(self) -> int:
        """Bytes that the rest of the probe holds between units, while requests run."""
        return 0 if self._probe is None else self._probe.held_bytes

    def run(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Run units for at most so many seconds, but at least one.

        Stops early if the units that are left would take longer.
        """
        start = clock()
        self.advance()
        took = clock() - start
        while self._probe and clock() + took * self._probe.units <= start + seconds:
            before = clock()
            self.advance()
            took = clock() - before

    def advance(self) -> None:
        """Run a unit; after the last one, keep the result."""
        if self._probe is None:
            return
        try:
            with self._file.marked():
                self._probe.advance()
            if self._probe.units:
                if not self.found.keys_fit and self._probe.keys_fit:
                    self.found = msgspec.structs.replace(self.found, keys_fit=True)
            else:
                self._end(self._probe.costs())
        except NoEstimateError as failed:
            self._end(problem=str(failed), keep=failed.lasting)
        except MemoryError:
            self._end(problem="the memory did not suffice for an estimate", keep=False)

    def _end(
        self, layers: Sequence[SideCosts] = (), *, problem: str | None = None, keep: bool = True
    ) -> None:
        self.found = msgspec.structs.replace(self.found, layers=list(layers), problem=problem)
        self._probe = None
        mx.clear_cache()
        if problem is not None:
            _log.info("the bits of layers are not estimated: %s", problem)
        if keep:
            self._file.write(self.found)


def text_ids(loaded: LoadedModel) -> list[int]:
    """Return `bit_probe.TOKENS` token ids: of a text, or arbitrary ones if none fits the model."""
    try:
        text = make_recall_prompt(0, TEXT_TOKENS, loaded.tokenizer).prompt
        ids = list(loaded.tokenizer.encode(text))[: bit_probe.TOKENS]
    except Exception as failed:  # noqa: BLE001 - tokenizers raise any type
        _log.info("the bits of layers are estimated without a text: %s", failed)
        ids = []
    if len(ids) == bit_probe.TOKENS and all(0 <= one < loaded.vocab_size for one in ids):
        return ids
    return [(at * at + 7 * at) % loaded.vocab_size for at in range(bit_probe.TOKENS)]


class LayerBits:
    """The bits of a load: `choice` from what is known before the weights are read, or `probe`'s.

    ``layers``: number of the model's caches.
    """

    def __init__(
        self,
        schemes: Sequence[Scheme],
        layers: int,
        headers: Headers,
        *,
        mode: BitsMode,
        calibrated: CalibrationResult | None,
        ranks: int,
    ) -> None:
        self._choose = partial(choose_bits, schemes, layers, mode=mode, calibrated=calibrated)
        lower = any(min(scheme.k_bits, scheme.v_bits) < max(WIDTHS) for scheme in schemes)
        # Each rank has other heads, and the ranks must agree on the bits.
        wanted = lower and mode == "auto" and calibrated is None
        file = ProbeFile.of(headers) if wanted and ranks == 1 else None
        probed = None if file is None else file.read()
        if file is not None and probed is None and file.was_killed():
            _log.warning("the bits of layers of %s are %s", headers.path, KILLED)
            probed = ProbeResult(key=file.key, version=VERSION, problem=KILLED)
        if wanted and ranks > 1:
            probed = ProbeResult(key="", version=VERSION, problem=SEVERAL_RANKS)
        self._file = file if probed is None else None
        self.choice = self._choose(probed=probed)
        self.rest: Probing | None = None
        """What the load leaves of the probe, for an idle worker."""

    @property
    def unknown(self) -> bool:
        """Whether the model was never probed."""
        return self._file is not None

    def probe(self, loaded: LoadedModel, memory: int, seconds: float) -> None:
        """Probe the model, and choose again.

        ``memory``: bytes that the probe may hold. ``seconds``: time that it may take now.
        """
        if self._file is None:
            return
        probing = Probing(loaded, self._file, memory)
        probing.run(seconds)
        self._file = None
        self.rest = probing if probing.has_work else None
        self.choice = self._choose(probed=probing.found)
