"""`ktx_seal` and `ktx_append` against the torch oracle in kv_quant, byte for byte, for every instruction set."""

import itertools

import pytest
import torch

from vllm_ktx.attention_backends.cpu import native
from vllm_ktx.kv_quant.codec import KVCacheQuantizer
from vllm_ktx.kv_quant.formats import KVFormat, parse_format
from vllm_ktx.kv_quant.layout import PageLayout
from vllm_ktx.kv_quant.scale_methods import SCALE_BITS, SCALE_METHODS

torch.set_num_threads(1)  # the oracle's tensors are too small for more
kernels = native.load()
if kernels is None:
    pytest.skip("the native CPU kernels are not built", allow_module_level=True)


@pytest.fixture(params=kernels.available_isas())
def cpu(request):
    before = kernels.isa
    kernels.set_isa(request.param)
    yield kernels
    kernels.set_isa(before)


def seal(cpu, layout, k, v, extra=3):
    """Seals `k`, `v` [n, heads, page, dim] into the last blocks of a larger, strided cache."""
    n = len(k)
    blocks = torch.arange(extra, n + extra, dtype=torch.int32).flip(0).contiguous()
    headers = torch.zeros(n + extra, layout.header_bytes + 32, dtype=torch.uint8)
    payload = torch.zeros(n + extra, layout.payload_bytes + 64, dtype=torch.uint8)
    offsets = torch.arange(n) * k.stride(0)
    cpu.seal(layout, k, v, offsets, blocks, headers[:, : layout.header_bytes], payload[:, : layout.payload_bytes], None,
             k.stride(2), k.stride(1))  # fmt: skip
    assert not headers[:extra].any() and not payload[:extra].any()
    order = blocks.long()
    return headers[order, : layout.header_bytes], payload[order, : layout.payload_bytes]


def same_header(layout, got, want):
    """Equal up to a step of the int8 code, and to rounding noise: a mean depends on the order of its sum."""
    quantizer = KVCacheQuantizer(layout)
    for ours, theirs in zip(quantizer.read_header(got), quantizer.read_header(want), strict=True):
        size = theirs.abs().amax(-1, keepdim=True)
        assert ((ours - theirs).abs() <= size / 100 + 1e-6 * (1 + size)).all()


@pytest.mark.parametrize("scale_bits", SCALE_BITS)
@pytest.mark.parametrize("bits", [(4, 8), (8, 4)])
@pytest.mark.parametrize("shape", [(64, 2, 80), (32, 3, 128), (96, 1, 96)])
def test_bytes_equal_the_oracle(shape, bits, scale_bits):
    """Keys and values meet each method; each value method with the rotation and without."""
    page, heads, dim = shape
    torch.manual_seed(0)
    k = torch.randn(2, heads, page, dim) * torch.linspace(0.1, 30, dim) + torch.linspace(-300, 300, dim)
    v = torch.randn(2, heads, page, dim)
    k, v = k.bfloat16(), v.bfloat16()
    before, methods = kernels.isa, [name for name, m in SCALE_METHODS.items() if not m.problem(page, dim)]
    for i, rotate in itertools.product(range(len(methods)), (False, True)):
        pair = (methods[i], methods[(i + 1 + rotate) % len(methods)])
        layout = PageLayout(KVFormat("test", *bits, *pair, rotate, scale_bits=scale_bits), page, heads, dim)
        want_header, want_payload = KVCacheQuantizer(layout).seal(k, v)
        for isa in kernels.available_isas():
            kernels.set_isa(isa)
            header, payload = seal(kernels, layout, k, v)
            assert torch.equal(payload, want_payload), (isa, layout.fmt)
            same_header(layout, header, want_header)
    kernels.set_isa(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["k4v4", "k8v8", "none"])
def test_dtypes_and_strides(cpu, dtype, name):
    """Sources are rows of a fused [tokens, heads, dim] activation as well as whole pages."""
    layout = PageLayout(parse_format(name), 64, 2, 64, dtype_bytes=dtype.itemsize)
    torch.manual_seed(1)
    fused = torch.randn(3 * 64, 8, 64).to(dtype)
    pages = fused.reshape(3, 64, 8, 64).transpose(1, 2)
    k, v = pages[:, 2:4], pages[:, 4:6]
    header, payload = seal(cpu, layout, k, v)
    want_header, want_payload = KVCacheQuantizer(layout).seal(k, v)
    assert torch.equal(payload, want_payload)
    if name != "none":
        same_header(layout, header, want_header)


@pytest.mark.parametrize("kind", ["zero", "constant", "nan", "inf", "huge", "tiny"])
def test_special_inputs(cpu, kind):
    torch.manual_seed(2)
    k = torch.randn(2, 2, 32, 64)
    if kind in ("zero", "constant"):
        k = torch.full_like(k, 0.0 if kind == "zero" else -3.3)
    elif kind in ("nan", "inf"):
        k[0, 0, 3, 5] = k[1, 1, :, 7] = float("nan") if kind == "nan" else float("inf")
        k[0, 1, 2] = float("-inf") if kind == "inf" else float("nan")
    else:
        k = k * (3e38 if kind == "huge" else 1e-9)
    v = k.flip(0).contiguous()
    for method, scale_bits in itertools.product(SCALE_METHODS, SCALE_BITS):
        layout = PageLayout(KVFormat("test", 4, 8, method, method, scale_bits=scale_bits), 32, 2, 64, dtype_bytes=4)
        header, payload = seal(cpu, layout, k, v)
        want_header, want_payload = KVCacheQuantizer(layout).seal(k, v)
        assert torch.equal(payload, want_payload), layout.fmt
        same_header(layout, header, want_header)


def test_slots_differ_from_blocks(cpu):
    layout = PageLayout(parse_format("k4v4"), 32, 1, 64)
    k, v = torch.randn(2, 1, 32, 64), torch.randn(2, 1, 32, 64)
    headers = torch.zeros(5, layout.header_bytes, dtype=torch.uint8)
    payload = torch.zeros(3, layout.payload_bytes, dtype=torch.uint8)
    cpu.seal(layout, k, v, torch.tensor([0, 32 * 64]), torch.tensor([4, 1], dtype=torch.int32), headers, payload,
             torch.tensor([0, 2], dtype=torch.int32), 64, 32 * 64)  # fmt: skip
    _, want = KVCacheQuantizer(layout).seal(k, v)
    assert torch.equal(payload[[0, 2]], want)
    assert not payload[1].any()
    assert [bool(h.any()) for h in headers] == [False, True, False, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 700])
def test_append(cpu, dtype, rows):
    layout = PageLayout(parse_format("k4v4"), 64, 4, 96)
    torch.manual_seed(3)
    fused = torch.randn(rows + 5, 3, 4, 96).to(dtype)
    k, v = fused[:, 1], fused[:, 2]
    open_pages = torch.zeros(20, 2, 4, 64, 96, dtype=dtype)
    token = (torch.randperm(rows) + 5).int()
    place = torch.randperm(20 * 64)[:rows]
    slot, offset = (place // 64).int(), (place % 64).int()
    cpu.append(layout, k, v, token, slot, offset, open_pages)
    want = torch.zeros_like(open_pages)
    want[slot.long(), 0, :, offset.long()] = k[token.long()]
    want[slot.long(), 1, :, offset.long()] = v[token.long()]
    assert torch.equal(open_pages, want)
