"""KV settings: their defaults, how they combine, and the errors for invalid ones."""

from __future__ import annotations

import msgspec
import pytest

from protocol.kv import KVSpec
from protocol.messages import Load
from protocol.schemes import Scheme
from protocol.validation import describe_error


def test_the_defaults():
    assert KVSpec().name == "k8v8"
    assert KVSpec(8, 4).scheme == Scheme(8, 4, 64, 64)


def test_values_use_the_group_of_keys_by_default():
    assert KVSpec(4, 4, group_size=32).scheme == Scheme(4, 4, 32, 32)
    assert KVSpec(4, 4, group_size=32, value_group_size=128).scheme == Scheme(4, 4, 32, 128)
    assert KVSpec(4, 4, value_group_size=128).name == "k4g64v4g128"


def test_scheme_names_without_a_group_use_the_settings():
    spec = KVSpec(8, 8, group_size=32, value_group_size=128)

    assert spec.scheme_of("k4v4") == Scheme(4, 4, 32, 128)
    assert spec.scheme_of("k4v4g64") == Scheme(4, 4, 64, 64)


@pytest.mark.parametrize(
    ("kv", "field", "says"),
    [
        ({"group_size": 128}, "group_size", "must be one of 32, 64, not 128"),
        ({"value_group_size": 16}, "value_group_size", "must be one of 32, 64, 128, not 16"),
        ({"schemes": ["k4v5", "k8v4"]}, "schemes", "must go down: each scheme takes less than"),
        ({"schemes": ["k4v4", "k4v4"]}, "schemes", "k4v4 cannot follow k4v4"),
        ({"schemes": ["k4v4", "k4v4g32"]}, "schemes", "k4v4g32 cannot follow k4v4"),
        (
            {"schemes": ["k8"]},
            "schemes",
            "must hold KV schemes, but 'k8' is no KV scheme; write it",
        ),
        ({"schemes": ["k7v4"]}, "schemes", "'k7v4' is no KV scheme: key bits must be one of 2, 3"),
        ({"schemes": ["k4v4"] * 9}, "schemes", "must have at most 8 items"),
        ({"schemes": "k4v4"}, "schemes", "must be a list, not a text"),
        ({"floors": {"0": "k4g64v4"}}, "floors", "'k4g64v4' is no KV scheme"),
        ({"floors": {"0": 8}}, "floors[...]", "must be a text, not a number"),
        ({"quantized_kv_start": -1}, "quantized_kv_start", "must be at least 0"),
        ({"max_kv_size": 255}, "max_kv_size", "must be at least 256"),
        ({"max_kv_size": 2**31}, "max_kv_size", "must be at most 2147483647"),
        ({"max_kv_size": 300, "keep": 173}, "keep", "must be at most 172, because 128 of"),
    ],
)
def test_errors_name_the_field(kv: dict[str, object], field: str, says: str):
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert({"id": "1", "model": "m", "kv": kv}, Load, str_keys=True)
    place, text = describe_error(str(caught.value), Load)

    assert place == f"kv.{field}"
    assert text.startswith(f"kv.{field} ")
    assert says in text


def test_keep_is_bounded_only_with_max_kv_size():
    assert KVSpec(keep=10_000).keep == 10_000
    assert KVSpec(max_kv_size=256, keep=128).keep == 128


def test_constructors_raise_the_same_errors():
    with pytest.raises(ValueError, match="keep: must be at most 128"):
        KVSpec(max_kv_size=256, keep=200)
