"""Schemes and the bytes they cost."""

from __future__ import annotations

import pytest

from kvd.worker.cache.scheme import LayerGeometry, Scheme, full_pages


@pytest.mark.parametrize("name", ["k8v8", "k8v4", "k16v16", "k3v6"])
def test_parse_and_name(name: str) -> None:
    assert Scheme.parse(name).name == name


@pytest.mark.parametrize("text", ["", "8", "k8", "k7v8", "k8v9", "v8k8", "k0v0"])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no KV scheme"):
        Scheme.parse(text)


def test_full_pages_keeps_64_to_127_dense() -> None:
    assert [full_pages(n) for n in (0, 1, 63, 64, 127, 128, 191, 192)] == [0, 0, 0, 0, 0, 1, 1, 2]
    for length in range(64, 5000):
        assert 64 <= length - 64 * full_pages(length) <= 127


def test_affine_bytes_per_element() -> None:
    """Two scales of 16 bits for 64 elements: 1/16 byte each on top of the bits."""
    geometry = LayerGeometry(kv_heads=8, k_dim=128, v_dim=128, itemsize=2)
    elements = 8 * 64 * 256

    assert geometry.page_bytes(Scheme(8, 8)) == elements * 1.0625
    assert geometry.page_bytes(Scheme(4, 4)) == elements * 0.5625
    assert geometry.page_bytes(Scheme(16, 16)) == elements * 2
