"""QuantizedKVCache holds the bytes of the serving path, however it was filled, and says how many."""

import pytest
import torch

from vllm_ktx.kv_quant import PRESETS, KVCacheQuantizer, PageLayout, QuantizedKVCache


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize(
    ("shape", "dtype", "pieces"),
    [((32, 1, 16), torch.float32, [1] * 70), ((64, 3, 80), torch.bfloat16, [5, 200, 0, 64, 1]),
     ((32, 2, 64), torch.float16, [96]), ((64, 2, 64), torch.bfloat16, [63])],
)  # fmt: skip
def test_bytes_are_the_codecs_in_any_pieces(name, shape, dtype, pieces):
    layout, total = PageLayout(PRESETS[name], *shape, dtype_bytes=dtype.itemsize), sum(pieces)
    k, v = torch.randn(2, layout.num_kv_heads, total, layout.head_dim, generator=torch.Generator().manual_seed(1)).to(
        dtype
    )
    cache = QuantizedKVCache(layout, dtype)
    for part_k, part_v in zip(k.split(pieces, 1), v.split(pieces, 1), strict=True):
        cache.append(part_k, part_v)
    size, codec = layout.page_size, KVCacheQuantizer(layout)
    sealed = max(0, total // size - layout.fmt.residual_pages)
    pages = [x[:, : sealed * size].unflatten(1, (sealed, size)).movedim(1, 0) for x in (k, v)]
    headers, payload = codec.seal(*pages) if sealed else (cache.headers[:0], cache.payload[:0])
    assert torch.equal(cache.headers, headers) and torch.equal(cache.payload, payload)
    open_bytes = (-(-total // size) - sealed) * layout.dense_bytes
    assert cache.memory_size == sealed * (layout.header_bytes + layout.payload_bytes) + open_bytes
    for got, exact, read_back in zip(cache.read(), (k, v), codec.unseal(payload, dtype), strict=True):
        assert got.shape == exact.shape and len(cache) == total and got.dtype == torch.float32
        assert torch.equal(got[:, sealed * size :], exact[:, sealed * size :].float()), "open pages are exact"
        assert torch.equal(got[:, : sealed * size], read_back.movedim(0, 1).flatten(1, 2))
    cache.seal()
    assert len(cache.payload) == total // size and len(cache.open_pages) == (total % size > 0)


def test_what_it_saves():
    layout = PageLayout(PRESETS["k4v4"], 64, 8, 128)
    cache = QuantizedKVCache(layout)
    cache.append(*torch.randn(2, 8, 64 * 64, 128))
    cache.seal()
    assert 64 * layout.dense_bytes / cache.memory_size > 3.4


def test_wrong_inputs_are_named():
    layout = PageLayout(PRESETS["k8v8"], 32, 2, 16)
    with pytest.raises(ValueError, match="float32 has 4 bytes, the layout's dtype_bytes is 2"):
        QuantizedKVCache(layout, torch.float32)
    with pytest.raises(ValueError, match=r"keys \(1, 5, 16\).*must be \[2, tokens, 16\]"):
        QuantizedKVCache(layout).append(torch.zeros(1, 5, 16), torch.zeros(1, 5, 16))
