"""KV settings of the configuration: scheme names and tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.config.kv import KVText, parse_kv
from protocol.kv import KVSpec
from protocol.schemes import BITS, K_GROUPS, V_GROUPS, Scheme


def test_kv_schemes():
    assert parse_kv("k8v4") == KVSpec(8, 4)
    assert parse_kv("K16V2") == KVSpec(16, 2)
    assert parse_kv("k4v4g32") == KVSpec(4, 4, group_size=32)
    assert parse_kv("k4g32v4g128") == KVSpec(4, 4, group_size=32, value_group_size=128)
    assert parse_kv("k16v4g128") == KVSpec(16, 4, value_group_size=128)
    for text in ("k7v8", "8", "k8", "k8v4x", ""):
        with pytest.raises(ValueError, match="is no KV scheme"):
            parse_kv(text)


@given(
    st.sampled_from(BITS),
    st.sampled_from(BITS),
    st.sampled_from(K_GROUPS),
    st.sampled_from(V_GROUPS),
)
def test_a_scheme_reads_back_from_its_name(k_bits: int, v_bits: int, k_group: int, v_group: int):
    scheme = Scheme(k_bits, v_bits, k_group, v_group)
    assert parse_kv(scheme.name).scheme == scheme


def test_group_sizes_are_set_in_the_scheme_name_or_in_separate_fields():
    assert KVText(scheme="k4v4", group_size=32).spec == KVSpec(4, 4, group_size=32)
    assert KVText(scheme="k4v4", value_group_size=128).spec.name == "k4g64v4g128"
    assert KVText(scheme="k16v16", group_size=32).spec.scheme_of("k8v8").name == "k8v8g32"
    for said in ({"group_size": 64}, {"group_size": 32}, {"value_group_size": 32}):
        with pytest.raises(
            ValueError, match="group_size: the scheme k4v4g32 sets it too; set it once"
        ):
            KVText(scheme="k4v4g32", **said)


def test_the_other_fields_are_copied():
    text = KVText(scheme="k8v4", schemes=(), floors={1: "k8v8"}, max_kv_size=512, keep=0)
    assert text.spec == KVSpec(8, 4, schemes=(), floors={1: "k8v8"}, max_kv_size=512, keep=0)
