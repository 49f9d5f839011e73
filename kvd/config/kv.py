"""KV settings as users write them: the protocol's, but with the first scheme given by its name."""

from __future__ import annotations

from typing import Literal

from protocol.kv import KVRules, KVSpec
from protocol.schemes import DEFAULT_GROUP, Scheme, groups_in


class KVText(KVRules, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`KVSpec` with a scheme such as ``k8v4`` or ``k4v4g32`` instead of bits."""

    scheme: str = "k8v8"
    """KV scheme of new rows; ``k16v16`` is not quantized."""
    group_size: Literal[32, 64] | None = None
    """Elements per quantization group of keys. Default: from the scheme's name, or 64."""
    value_group_size: Literal[32, 64, 128] | None = None
    """Elements per quantization group of values. Default: as for keys."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.spec

    @property
    def spec(self) -> KVSpec:
        """The settings of the protocol; raises ``ValueError`` with ``field: reason``."""
        try:
            named = Scheme.parse(self.scheme)
        except ValueError as error:
            raise ValueError(f"scheme: {error}") from None
        groups = groups_in(self.scheme)
        if groups and (self.group_size or self.value_group_size):
            raise ValueError(f"group_size: the scheme {self.scheme} sets it too; set it once")
        k_group, v_group = groups or (self.group_size or DEFAULT_GROUP, self.value_group_size)
        k_group = min(k_group, DEFAULT_GROUP)  # 128 is a group of values; the keys are dense then
        return KVSpec(
            named.k_bits,  # type: ignore[arg-type]  # `Scheme` has checked them
            named.v_bits,  # type: ignore[arg-type]
            group_size=k_group,  # type: ignore[arg-type]
            value_group_size=None if v_group == k_group else v_group,  # type: ignore[arg-type]
            **{name: getattr(self, name) for name in KVRules.__struct_fields__},
        )


def parse_kv(text: str) -> KVSpec:
    """Return the KV settings of a scheme such as ``k8v4``; raises `ValueError` if unknown."""
    Scheme.parse(text)
    return KVText(scheme=text).spec
