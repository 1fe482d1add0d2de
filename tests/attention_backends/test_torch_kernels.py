"""`TorchKernels` against the oracle, and its seal and append against the codec."""

import pytest
import torch

from tests.attention_backends.cases import GROUPS, make_batch, make_format
from vllm_ktx.attention_backends import torch_kernels
from vllm_ktx.attention_backends.torch_kernels import TorchKernels
from vllm_ktx.kv_quant import KVCacheQuantizer, PageLayout


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


ROWS = [(1, 300), (70, 129), (1, 0), (5, 64), (0, 10)]


@pytest.mark.parametrize("bits", [(4, 4), (8, 4), (8, 8), (16, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_batch(bits, dtype):
    make_batch(ROWS, make_format(*bits), dtype=dtype).check(TorchKernels())


VARIANTS = [{"softcap": 3.0}, {"q_heads": 2}, {"page_size": 32, "dim": 80}, {"seal_tail": True}]


@pytest.mark.parametrize("change", VARIANTS)
def test_variants(change):
    make_batch(ROWS, dtype=torch.float32, **change).check(TorchKernels())


def test_groups_and_8_bit_scales():
    make_batch(ROWS, GROUPS[0], dtype=torch.float32).check(TorchKernels())


def test_context_only():
    make_batch(ROWS, dtype=torch.float32).check(TorchKernels(), k=None, v=None)


def test_small_blocks_change_nothing(monkeypatch):
    """Many page groups and query blocks instead of one."""
    batch = make_batch([(200, 400)], dtype=torch.float32)
    monkeypatch.setattr(torch_kernels, "GROUP_TOKENS", 64)
    monkeypatch.setattr(torch_kernels, "SCORE_ELEMENTS", 8 * 64 * 17)
    batch.check(TorchKernels())


def test_hidden_nan_stays_hidden():
    batch = make_batch([(40, 100)], dtype=torch.float32)
    v = batch.inputs["v"].clone()
    v[30] = float("nan")
    out, _ = batch.run(TorchKernels(), v=v)
    want, _ = batch.run(TorchKernels())
    torch.testing.assert_close(out[:30], want[:30])
    assert torch.isnan(out[30:]).all()


def test_seal_and_append():
    layout = PageLayout(make_format(), page_size=32, num_kv_heads=2, head_dim=64)
    torch.manual_seed(0)
    k, v = torch.randn(100, 2, 64).bfloat16(), torch.randn(100, 2, 64).bfloat16()
    headers = torch.zeros(5, layout.header_bytes, dtype=torch.uint8)
    payload = torch.zeros(6, layout.payload_bytes, dtype=torch.uint8)
    offsets = torch.tensor([0, 40]) * 128
    blocks, slots = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    TorchKernels().seal(layout, k, v, offsets, blocks, headers, payload, slots, 128, 64)
    pages = [torch.stack((x[:32], x[40:72])).transpose(1, 2) for x in (k, v)]
    want_header, want_payload = KVCacheQuantizer(layout).seal(*pages)
    assert torch.equal(headers[[3, 1]], want_header) and torch.equal(payload[[0, 5]], want_payload)
    assert not headers[[0, 2, 4]].any() and not payload[1:5].any()

    open_pages = torch.zeros(3, 2, 2, 32, 64, dtype=torch.bfloat16)
    token = torch.tensor([5, 6], dtype=torch.int32)
    slot, offset = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([31, 0], dtype=torch.int32)
    TorchKernels().append(layout, k, v, token, slot, offset, open_pages)
    assert torch.equal(open_pages[2, 0, :, 31], k[5]) and torch.equal(open_pages[0, 1, :, 0], v[6])
    assert open_pages.count_nonzero() == 4 * 2 * 64
