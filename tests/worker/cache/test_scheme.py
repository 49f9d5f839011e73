"""KV schemes: names, order, floors and bytes of pages. Makes no arrays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.worker.cache.scheme import (
    BITS,
    LayerGeometry,
    Packing,
    Scheme,
    floors_of,
    full_pages,
    schemes_of,
)
from protocol.errors import InvalidRequest
from protocol.kv import KVSpec
from protocol.schemes import K_GROUPS, V_GROUPS

schemes = st.builds(
    Scheme,
    st.sampled_from(BITS),
    st.sampled_from(BITS),
    st.sampled_from(K_GROUPS),
    st.sampled_from(V_GROUPS),
)


@given(schemes, st.sampled_from(K_GROUPS), st.sampled_from(V_GROUPS))
def test_names_are_read_back(scheme: Scheme, k_group: int, v_group: int) -> None:
    assert Scheme.parse(scheme.name) == scheme
    assert Scheme.parse(f" {scheme.name.upper()} ") == scheme
    if "g" in scheme.name:  # an explicit group in a name overrides the default
        assert Scheme.parse(scheme.name, k_group, v_group) == scheme


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        (Scheme(8, 4), "k8v4"),
        (Scheme(4, 4, 32, 32), "k4v4g32"),
        (Scheme(4, 4, 64, 128), "k4g64v4g128"),
        (Scheme(4, 4, 32, 64), "k4g32v4g64"),
        (Scheme(16, 16, 32, 128), "k16v16"),
        (Scheme(16, 4, 32, 128), "k16v4g128"),
        (Scheme(3, 16, 32, 128), "k3v16g32"),
    ],
)
def test_names(scheme: Scheme, name: str) -> None:
    assert scheme.name == name


def test_names_without_a_group_get_the_default_group() -> None:
    assert Scheme.parse("k4v4", 32) == Scheme(4, 4, 32, 32)
    assert Scheme.parse("k4v4", 32, 128) == Scheme(4, 4, 32, 128)
    assert Scheme.parse("k4v4g64", 32, 128) == Scheme(4, 4, 64, 64)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "write it like k8v4"),
        ("8", "write it like k8v4"),
        ("k8", "write it like k8v4"),
        ("v8k8", "write it like k8v4"),
        ("k4g32v4", "write it like k8v4"),
        ("k7v8", "key bits must be one of 2, 3, 4, 5, 6, 8 or 16, not 7"),
        ("k8v9", "value bits must be one of"),
        ("k4v4g16", "the key group must be one of 32 or 64, not 16"),
        ("k4v4g128", "the key group must be one of 32 or 64, not 128"),
        ("k4g32v4g48", "the value group must be one of 32, 64 or 128, not 48"),
    ],
)
def test_parse_refuses(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"is no KV scheme") as caught:
        Scheme.parse(text)
    assert says in str(caught.value)


def test_16_bits_have_no_group() -> None:
    assert Scheme(16, 16, 32, 128) == Scheme(16, 16)
    assert len({Scheme(16, 4, 32), Scheme(16, 4, 64)}) == 1


@given(schemes, schemes)
def test_below_is_an_order(one: Scheme, other: Scheme) -> None:
    assert not one.is_below(one)
    assert not (one.is_below(other) and other.is_below(one))
    geometry = LayerGeometry(2, 128, 128, itemsize=2)
    if one.is_below(other):
        assert geometry.page_bytes(one) < geometry.page_bytes(other)


def test_a_lower_scheme_has_more_bits_on_no_side() -> None:
    assert Scheme(4, 4).is_below(Scheme(8, 4))
    assert Scheme(8, 4).is_below(Scheme(8, 8))
    assert Scheme(4, 4, 64, 128).is_below(Scheme(4, 4))
    assert not Scheme(8, 2).is_below(Scheme(4, 8)), "fewer bytes, but more key bits"
    assert not Scheme(4, 4, 32, 32).is_below(Scheme(4, 4)), "smaller groups have more scales"


@given(schemes, schemes)
def test_a_floor_raises_each_side(scheme: Scheme, floor: Scheme) -> None:
    lifted = scheme.at_least(floor)

    assert lifted.costs == tuple(map(max, scheme.costs, floor.costs))
    assert lifted.at_least(floor) == lifted
    assert not lifted.is_below(floor)


def test_floors() -> None:
    assert Scheme(4, 4).at_least(Scheme(8, 2)) == Scheme(8, 4)
    assert Scheme(8, 4).at_least(Scheme(16, 16)) == Scheme(16, 16)
    assert Scheme(4, 4, 64, 128).at_least(Scheme(4, 2, 32, 32)) == Scheme(4, 4, 32, 128)


def test_full_pages_leaves_64_to_127_tokens_dense() -> None:
    assert [full_pages(n) for n in (0, 1, 63, 64, 127, 128, 191, 192)] == [0, 0, 0, 0, 0, 1, 1, 2]
    for length in range(64, 5000):
        assert 64 <= length - 64 * full_pages(length) <= 127


@pytest.mark.parametrize(
    ("dim", "group", "packing"),
    [
        (64, 64, Packing(4, 64, per_token=True)),
        (128, 128, Packing(4, 128, per_token=True)),
        (96, 32, Packing(4, 32, per_token=True)),
        (96, 64, Packing(4, 64)),
        (64, 128, Packing(4, 64)),
        (80, 32, Packing(4, 32)),
        (576, 128, Packing(4, 64)),
        (8, 32, Packing(4, 32)),
        (0, 64, Packing(16, per_token=True)),
    ],
)
def test_values_are_packed_per_token_if_groups_fit(dim: int, group: int, packing: Packing) -> None:
    assert LayerGeometry(1, 64, dim).values(Scheme(8, 4, 64, group)) == packing


def test_affine_bytes_per_element() -> None:
    """A scale and a bias of 16 bits per group of 64 add 1/16 byte per element."""
    geometry = LayerGeometry(kv_heads=8, k_dim=128, v_dim=128, itemsize=2)
    elements = 8 * 64 * 256

    assert geometry.page_bytes(Scheme(8, 8)) == elements * 1.0625
    assert geometry.page_bytes(Scheme(4, 4)) == elements * 0.5625
    assert geometry.page_bytes(Scheme(4, 4, 32, 32)) == elements * 0.625
    assert geometry.page_bytes(Scheme(4, 4, 64, 128)) == elements * (0.5625 + 0.53125) / 2
    assert geometry.page_bytes(Scheme(16, 16)) == elements * 2


@given(schemes)
def test_costs_are_those_of_half_precision(scheme: Scheme) -> None:
    geometry = LayerGeometry(1, 128, 128, itemsize=2)

    assert sum(scheme.costs) * 64 * 128 / 8 == geometry.page_bytes(scheme)


def test_an_empty_side_costs_nothing() -> None:
    latent = LayerGeometry(kv_heads=1, k_dim=576, v_dim=0)

    for bits in BITS:
        assert latent.page_bytes(Scheme(8, bits)) == latent.page_bytes(Scheme(8, 16))
        assert latent.page_bytes(Scheme(16, bits)) == latent.dense_bytes(64)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (KVSpec(), "k8v8 k8v4 k4v4"),
        (KVSpec(16, 16), "k16v16 k8v8 k8v4 k4v4"),
        (KVSpec(8, 4), "k8v4 k4v4"),
        (KVSpec(4, 8), "k4v8 k4v4"),
        (KVSpec(4, 4), "k4v4"),
        (KVSpec(3, 8), "k3v8"),
        (KVSpec(6, 6), "k6v6 k4v4"),
        (KVSpec(8, 8, schemes=()), "k8v8"),
        (KVSpec(8, 8, schemes=("k8v3", "k3v2")), "k8v8 k8v3 k3v2"),
        (KVSpec(8, 4, schemes=("k8v8", "k8v4", "k4v4")), "k8v4 k4v4"),
        (KVSpec(8, 8, group_size=32), "k8v8g32 k8v4g32 k4v4g32"),
        (KVSpec(8, 8, value_group_size=128), "k8g64v8g128 k8g64v4g128 k4g64v4g128"),
        (
            KVSpec(8, 8, group_size=32, schemes=("k8v8g64", "k4v4", "k4v4g64")),
            "k8v8g32 k8v8 k4v4g32 k4v4",
        ),
    ],
)
def test_schemes_of_a_spec_start_with_its_scheme(spec: KVSpec, names: str) -> None:
    assert [scheme.name for scheme in schemes_of(spec)] == names.split()


@given(
    st.sampled_from(BITS), st.sampled_from(BITS), st.sampled_from([32, 64]), st.sampled_from([2, 4])
)
def test_every_step_down_frees_bytes(k_bits: int, v_bits: int, group: int, itemsize: int) -> None:
    schemes = schemes_of(KVSpec(k_bits, v_bits, group_size=group))  # type: ignore[arg-type]
    geometry = LayerGeometry(2, 64, 64, itemsize)
    sizes = [geometry.page_bytes(scheme) for scheme in schemes]

    assert (schemes[0].k_bits, schemes[0].v_bits) == (k_bits, v_bits)
    assert sizes == sorted(set(sizes), reverse=True)


def test_floors_by_layer() -> None:
    spec = KVSpec(8, 4, group_size=32, floors={0: "k8v8", -1: "k16v16", 2: "k4v4g64"})
    floors = floors_of(spec, 5)

    assert floors == [Scheme(8, 8, 32, 32), None, Scheme(4, 4), None, Scheme(16, 16)]
    assert floors_of(KVSpec(), 3) == [None, None, None]


@pytest.mark.parametrize(
    ("floors", "says"),
    [
        ({3: "k8v8"}, "names layer 3; the model's layers are 0 to 2, or -1 to -3"),
        ({-4: "k8v8"}, "names layer -4"),
        ({2: "k8v8", -1: "k4v4"}, "names layer -1 twice"),
    ],
)
def test_floors_for_missing_or_repeated_layers_are_refused(
    floors: dict[int, str], says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        floors_of(KVSpec(floors=floors), 3)
    assert caught.value.detail == {"field": "kv.floors"}
