"""Codes to bytes and back, and single bits where `layout.py` says they are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ktx.kv_quant import packing

SHAPES = st.tuples(st.integers(1, 3), st.sampled_from([32, 64, 96]), st.sampled_from([16, 48, 64, 80, 128]))


def random_codes(shape, bits, seed):
    return torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@given(shape=SHAPES, bits=st.sampled_from([4, 8]), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_keys_round_trip(shape, bits, seed):
    codes = random_codes(shape, bits, seed)
    planes = packing.pack_keys(codes, bits)
    assert sum(plane.shape[-1] for plane in planes.values()) * 8 == bits * shape[1] * shape[2]
    assert torch.equal(packing.unpack_keys(planes, bits, *shape[1:]), codes)


@given(shape=SHAPES, bits=st.sampled_from([4, 8]), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_values_round_trip(shape, bits, seed):
    codes = random_codes(shape, bits, seed)
    packed = packing.pack_values(codes, bits)
    assert packed.shape[-1] * 8 == bits * shape[1] * shape[2]
    assert torch.equal(packing.unpack_values(packed, bits, *shape[1:]), codes)


@given(bits=st.sampled_from([4, 8]), token=st.integers(0, 31), channel=st.integers(0, 63), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_keys_lie_where_the_layout_says(bits, token, channel, seed):
    code = int(random_codes((1,), bits, seed))
    codes = torch.zeros(32, 64, dtype=torch.uint8)
    codes[token, channel] = code
    planes = packing.pack_keys(codes, bits)

    def field(plane, width):
        quarter = 64 * width // 8
        k, d4, i = channel // quarter, channel % quarter // 4, channel % 4
        return int(planes[plane][(d4 * 32 + token) * 4 + i]) >> (width * k)

    high = code >> (bits - 4)
    assert (field("k_plane0", 2), field("k_plane1", 2)) == (high >> 2, high & 3)
    if bits == 8:
        assert field("k_low", 4) == code & 15


@pytest.mark.parametrize("channel", range(32))
def test_values_lie_where_the_layout_says(channel):
    codes = torch.zeros(32, 32, dtype=torch.uint8)
    codes[5, channel] = 9
    packed = packing.pack_values(codes, 4)
    byte = 5 * 16 + channel // 16 * 8 + channel % 8
    assert int(packed[byte]) == (9 << 4 if channel % 16 >= 8 else 9)
    assert int(packing.pack_values(codes, 8)[5 * 32 + channel]) == 9
