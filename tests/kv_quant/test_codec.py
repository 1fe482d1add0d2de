"""The quantizer: error bounds for every method and width, defined results for every input, fp16 rounding."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ktx.kv_quant import codec, hadamard
from vllm_ktx.kv_quant.codec import KVCacheQuantizer
from vllm_ktx.kv_quant.formats import PRESETS, SCALE_METHODS, KVFormat
from vllm_ktx.kv_quant.layout import PageLayout

CASES = list(itertools.product((4, 8), SCALE_METHODS))


def within_half_a_step(x, bits, method):
    codes, scale, minimum = codec.quantize(x, bits, method)
    assert int(codes.max()) < 2**bits
    assert (minimum.float() <= x).all()
    error = (codec.dequantize(codes, scale, minimum) - x).abs()
    # Beside half a step: rounding of the float32 arithmetic, and its smallest numbers.
    slack = 1e-6 * (x.abs() + minimum.float().abs() + scale.float() * 2**bits) + 1e-40
    assert (error <= scale.float() / 2 + slack).all()


@pytest.mark.parametrize(("bits", "method"), CASES)
@given(seed=st.integers(0, 2**31), spread=st.floats(-7, 4), offset=st.floats(-3e4, 3e4))
@settings(max_examples=40, deadline=None)
def test_error_is_at_most_half_a_step(bits, method, seed, spread, offset):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 32, 16, generator=generator) * 10**spread + offset
    within_half_a_step(codec.sanitize(x), bits, method)


@pytest.mark.parametrize(("bits", "method"), CASES)
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_float_has_a_defined_result(bits, method, values):
    x = torch.tensor(values, dtype=torch.float32).repeat(512 // len(values) + 1)[:512].reshape(32, 16)
    clean = codec.sanitize(x)
    assert clean.isfinite().all()
    within_half_a_step(clean, bits, method)


@pytest.mark.parametrize(("bits", "method"), CASES)
@pytest.mark.parametrize("value", [0.0, 1.5, -300.25, 65504.0, -65504.0])
def test_a_constant_fp16_number_reads_back_exactly(bits, method, value):
    x = torch.full((1, 32, 16), value)
    codes, scale, minimum = codec.quantize(x, bits, method)
    assert torch.equal(codec.dequantize(codes, scale, minimum), x)
    assert not scale.any()


def test_sanitize():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e9, -1.5])
    assert codec.sanitize(x).tolist() == [0.0, 65504.0, -65504.0, 65504.0, -1.5]


@given(value=st.floats(-65504, 65504, width=32))
@settings(max_examples=300, deadline=None)
def test_directed_rounding(value):
    x = torch.tensor([value])
    down, up = codec.half_toward(x, up=False), codec.half_toward(x, up=True)
    assert down.float() <= x <= up.float()
    if x.half().float() == x:
        assert down.float() == x == up.float()
    else:  # neighbours: nothing lies between them
        assert torch.nextafter(down, torch.tensor([torch.inf], dtype=torch.float16)).float() == up.float()


@pytest.mark.parametrize("fmt", [*PRESETS.values(), KVFormat("t", 4, 8, "per_token", "per_head", False)])
@pytest.mark.parametrize("shape", [(64, 2, 64), (32, 1, 80), (128, 3, 96)])
def test_seal_and_unseal(fmt, shape):
    page, heads, dim = shape
    layout = PageLayout(fmt, page, heads, dim)
    torch.manual_seed(0)
    k = (torch.randn(3, heads, page, dim) + torch.linspace(-50, 50, dim)).bfloat16()
    v = torch.randn(3, heads, page, dim).bfloat16()
    header, payload = KVCacheQuantizer(layout).seal(k, v)
    assert header.shape == (3, layout.header_bytes)
    assert payload.shape == (3, layout.payload_bytes)
    k_hat, v_hat = KVCacheQuantizer(layout).unseal(payload)
    if not fmt.quantized:
        assert torch.equal(k_hat, k.float()) and torch.equal(v_hat, v.float())
        return
    for x, x_hat, bits, method in ((k, k_hat, fmt.k_bits, fmt.k_method), (v, v_hat, fmt.v_bits, fmt.v_method)):
        y, y_hat = (hadamard.rotate(t) if x is v and fmt.v_rotate else t for t in (x.float(), x_hat))
        _, scale, _ = codec.quantize(y, bits, method)
        assert ((y_hat - y).abs() <= scale.float() / 2 + 1e-4).all()


def test_header_reads_back():
    layout = PageLayout(PRESETS["k4v4"], 64, 2, 64)
    torch.manual_seed(0)
    k = torch.randn(4, 2, 64, 64) * torch.linspace(0.1, 5, 64) + torch.linspace(-20, 20, 64)
    header, _ = KVCacheQuantizer(layout).seal(k, k)
    mean, deviation = KVCacheQuantizer(layout).read_header(header)
    for got, want in ((mean, k.mean(-2)), (deviation, k.std(-2, correction=0))):
        step = want.abs().amax(-1, keepdim=True) / 127
        assert ((got - want).abs() <= step * 0.51).all()


def test_bad_values_keep_a_page_usable():
    layout = PageLayout(PRESETS["k8v8"], 32, 1, 64)
    k, v = torch.randn(1, 1, 32, 64), torch.randn(1, 1, 32, 64)
    k[0, 0, 3, 5], k[0, 0, 4, 6], v[0, 0, 7, 7] = float("nan"), float("inf"), -float("inf")
    _, payload = KVCacheQuantizer(layout).seal(k, v)
    k_hat, v_hat = KVCacheQuantizer(layout).unseal(payload)
    assert k_hat.isfinite().all() and v_hat.isfinite().all()
    fine = torch.ones(64, dtype=torch.bool)
    fine[[5, 6]] = False
    assert ((k_hat - k)[..., fine].abs() < 0.02).all()
    tokens = torch.arange(32) != 7
    assert ((v_hat - v)[:, :, tokens].abs() < 0.1).all()


def test_wrong_shapes_are_named():
    layout = PageLayout(PRESETS["k8v8"], 32, 1, 64)
    with pytest.raises(ValueError, match="both must be"):
        KVCacheQuantizer(layout).seal(torch.zeros(1, 1, 64, 64), torch.zeros(1, 1, 64, 64))
