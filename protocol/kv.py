"""Settings of a model's KV cache, and the schemes that follow from them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.errors import InvalidRequest
from protocol.fields import MAX_BYTES, MAX_INT
from protocol.pages import TAIL_TOKENS
from protocol.schemes import Bits, KeyGroup, Scheme, ValueGroup

BitsMode = Literal["auto", "off"]
"""Whether layers of one precision level may have different bits; ``auto``: as estimated."""
SCHEMES = ("k8v8", "k8v4", "k4v4")
MIN_KV_SIZE = 256
"""Minimum of ``max_kv_size``. A smaller limit would save nothing: the newest 64 to 127 tokens of a
row are dense, its first tokens keep a page, and the tokens that leave the window next keep another
one."""
MAX_LAYERS = 4096


class KVRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's KV cache is kept, apart from the bits and groups of new rows.

    Raises ``ValueError`` with ``field: message`` if fields contradict each other.
    """

    schemes: Annotated[tuple[str, ...], Meta(max_length=8)] = SCHEMES
    """Schemes to step down to, each below the previous one.

    Schemes that are not below the initial scheme are skipped. Names without a group size use the
    initial scheme's.
    """
    floors: dict[Annotated[int, Meta(ge=-MAX_LAYERS, lt=MAX_LAYERS)], str] = {}
    """Lowest scheme of a layer, by layer number; negative numbers count from the end.

    A layer with ``k16v16`` is never quantized.
    """
    quantized_kv_start: Annotated[int, Meta(ge=0, le=MAX_INT)] = 0
    """Length in tokens from which a row is quantized; shorter rows stay dense."""
    max_kv_size: Annotated[int, Meta(ge=MIN_KV_SIZE, le=MAX_INT)] | None = None
    """Maximum tokens that a row attends to: the first ``keep`` and the newest; absent: all."""
    keep: Annotated[int, Meta(ge=0, le=MAX_INT)] = 4
    """First tokens of a row that ``max_kv_size`` includes; must leave 128 for the newest tokens."""
    prefix_cache: Annotated[int, Meta(ge=0, le=MAX_BYTES)] | None = None
    """Bytes of the budget for the prefix cache; 0 disables it; absent: a quarter of the budget."""
    prefix_every: Annotated[int, Meta(ge=0, le=MAX_INT)] = 1024
    """Tokens between checkpoints of a prompt in the prefix cache; 0: only at its end."""

    def __post_init__(self) -> None:
        if self.max_kv_size is not None and self.keep > self.max_kv_size - TAIL_TOKENS:
            raise ValueError(
                f"keep: must be at most {self.max_kv_size - TAIL_TOKENS}, because {TAIL_TOKENS} of "
                "max_kv_size are for the newest tokens"
            )


class KVSpec(KVRules, frozen=True):
    """How a model's KV cache is stored: bits of keys and values, and further rules.

    16 bits mean "not quantized".
    """

    k_bits: Bits = 8
    """Bits per key element; 16: not quantized."""
    v_bits: Bits = 8
    """Bits per value element; 16: not quantized."""
    group_size: KeyGroup = 64
    """Elements that share a scale, of keys and, without ``value_group_size``, of values."""
    value_group_size: ValueGroup | None = None
    """Elements of values that share a scale; absent: ``group_size``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        above = None
        for name in self.schemes:
            scheme = self._checked("schemes", name)
            if above is not None and not scheme.is_below(above):
                raise ValueError(
                    "schemes: must go down: each scheme takes less than the one before it for keys "
                    f"or for values, and more for neither; {name} cannot follow {above.name}"
                )
            above = scheme
        for name in self.floors.values():
            self._checked("floors", name)

    def _checked(self, field: str, name: str) -> Scheme:
        try:
            return self.scheme_of(name)
        except ValueError as error:
            raise ValueError(f"{field}: must hold KV schemes, but {error}") from None

    def scheme_of(self, name: str) -> Scheme:
        """Return the scheme of this name, with the spec's groups if the name has none."""
        return Scheme.parse(name, self.group_size, self.value_group_size)

    @property
    def scheme(self) -> Scheme:
        """Scheme of new rows."""
        value_group = self.value_group_size or self.group_size
        return Scheme(self.k_bits, self.v_bits, self.group_size, value_group)

    @property
    def steps(self) -> list[Scheme]:
        """Schemes that rows may step down to, each below the previous one."""
        initial = self.scheme
        schemes = [self.scheme_of(name) for name in self.schemes]
        return [scheme for scheme in schemes if scheme.is_below(initial)]

    @property
    def name(self) -> str:
        return self.scheme.name


def schemes_of(spec: KVSpec) -> list[Scheme]:
    """Return a model's schemes by precision level, each below the previous one."""
    return [spec.scheme, *spec.steps]


def floors_of(spec: KVSpec, layers: int) -> list[Scheme | None]:
    """Return each layer's lowest scheme, None for layers without one.

    Raises `InvalidRequest` for a layer that the model does not have or that is named twice.
    """
    floors: list[Scheme | None] = [None] * layers
    for layer, name in spec.floors.items():
        if not -layers <= layer < layers:
            raise InvalidRequest(
                f"kv.floors names layer {layer}; the model's layers are 0 to {layers - 1}, or -1 "
                f"to -{layers} from the end",
                field="kv.floors",
            )
        if floors[layer] is not None:
            raise InvalidRequest(f"kv.floors names layer {layer} twice", field="kv.floors")
        floors[layer] = spec.scheme_of(name)
    return floors
