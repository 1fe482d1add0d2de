"""The quantizer: error bounds for every method and width, defined results for every input, fp16 rounding."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ktx.kv_quant import codec, hadamard
from vllm_ktx.kv_quant.codec import KVCacheQuantizer
from vllm_ktx.kv_quant.formats import PRESETS, KVFormat
from vllm_ktx.kv_quant.layout import PageLayout
from vllm_ktx.kv_quant.scale_methods import SCALE_BITS, SCALE_METHODS, half_toward, read_params, step_bound

CASES = list(itertools.product((4, 8), SCALE_METHODS, SCALE_BITS))
matrix = pytest.mark.parametrize(("bits", "method", "scale_bits"), CASES)


def within_half_a_step(x, bits, method, scale_bits):
    """The error is at most half the stored step, and the step at most what the method states."""
    groups = SCALE_METHODS[method]
    codes, params = codec.quantize(x, bits, method, scale_bits)
    assert int(codes.max()) < 2**bits
    scale, minimum = (groups.spread(p, *x.shape[-2:]) for p in (params.scale, params.minimum))
    # Beside half a step: rounding of the float32 arithmetic, and its smallest numbers.
    slack = 1e-6 * (x.abs() + minimum.abs() + scale * 2**bits) + 1e-40
    assert (minimum <= x + slack).all()
    error = (codec.dequantize(codes, params.scale, params.minimum, method) - x).abs()
    assert (error <= scale / 2 + slack).all()
    low, high = groups.ranges(x)
    bound = step_bound(low, high, 2**bits - 1, scale_bits)
    assert (params.scale <= bound + 1e-6 * (low.abs() + high.abs())).all()


@matrix
@given(seed=st.integers(0, 2**31), spread=st.floats(-7, 4), offset=st.floats(-3e4, 3e4))
@settings(max_examples=40, deadline=None)
def test_error_is_at_most_half_a_step(bits, method, scale_bits, seed, spread, offset):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 64, 32, generator=generator) * 10**spread + offset
    within_half_a_step(codec.sanitize(x), bits, method, scale_bits)


@matrix
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_float_has_a_defined_result(bits, method, scale_bits, values):
    x = torch.tensor(values, dtype=torch.float32).repeat(1024 // len(values) + 1)[:1024].reshape(32, 32)
    clean = codec.sanitize(x)
    assert clean.isfinite().all()
    within_half_a_step(clean, bits, method, scale_bits)


@matrix
@pytest.mark.parametrize("value", [0.0, 1.5, -300.25, 65504.0, -65504.0])
def test_a_constant_fp16_number_reads_back_exactly(bits, method, scale_bits, value):
    x = torch.full((1, 32, 32), value)
    codes, params = codec.quantize(x, bits, method, scale_bits)
    assert torch.equal(codec.dequantize(codes, params.scale, params.minimum, method), x)
    assert not params.scale.any()


def test_sanitize():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e9, -1.5])
    assert codec.sanitize(x).tolist() == [0.0, 65504.0, -65504.0, 65504.0, -1.5]


@given(value=st.floats(-65504, 65504, width=32))
@settings(max_examples=300, deadline=None)
def test_directed_rounding(value):
    x = torch.tensor([value])
    down, up = half_toward(x, up=False), half_toward(x, up=True)
    assert down.float() <= x <= up.float()
    if x.half().float() == x:
        assert down.float() == x == up.float()
    else:  # neighbours: nothing lies between them
        assert torch.nextafter(down, torch.tensor([torch.inf], dtype=torch.float16)).float() == up.float()


FORMATS = [
    KVFormat("t", *bits, *methods, rotate, scale_bits=scale_bits)
    for bits, methods, rotate, scale_bits in itertools.product(
        ((4, 4), (8, 8), (8, 4)), itertools.product(SCALE_METHODS, SCALE_METHODS), (False, True), SCALE_BITS
    )
]


@pytest.mark.parametrize("shape", [(64, 2, 64), (32, 1, 96)])
def test_seal_and_unseal_in_every_format(shape):
    page, heads, dim = shape
    torch.manual_seed(0)
    k = (torch.randn(2, heads, page, dim) + torch.linspace(-50, 50, dim)).bfloat16()
    v = torch.randn(2, heads, page, dim).bfloat16()
    for fmt in FORMATS:
        layout = PageLayout(fmt, page, heads, dim)
        header, payload = KVCacheQuantizer(layout).seal(k, v)
        assert header.shape == (2, layout.header_bytes) and payload.shape == (2, layout.payload_bytes)
        k_hat, v_hat = KVCacheQuantizer(layout).unseal(payload)
        for x, x_hat, bits, method in ((k, k_hat, fmt.k_bits, fmt.k_method), (v, v_hat, fmt.v_bits, fmt.v_method)):
            y, y_hat = (hadamard.rotate(t) if x is v and fmt.v_rotate else t for t in (x.float(), x_hat))
            _, params = codec.quantize(y, bits, method, fmt.scale_bits)
            scale = SCALE_METHODS[method].spread(params.scale, page, dim)
            assert ((y_hat - y).abs() <= scale / 2 + 1e-4).all(), fmt


@pytest.mark.parametrize("shape", [(64, 2, 64), (32, 1, 80), (128, 3, 96)])
def test_an_unquantized_page_is_its_input(shape):
    page, heads, dim = shape
    layout = PageLayout(PRESETS["none"], page, heads, dim)
    k, v = torch.randn(3, heads, page, dim).bfloat16(), torch.randn(3, heads, page, dim).bfloat16()
    k_hat, v_hat = KVCacheQuantizer(layout).unseal(KVCacheQuantizer(layout).seal(k, v)[1])
    assert torch.equal(k_hat, k.float()) and torch.equal(v_hat, v.float())


@matrix
def test_parameters_read_back_as_they_were_used(bits, method, scale_bits):
    _, params = codec.quantize(torch.randn(2, 3, 64, 64) + 7, bits, method, scale_bits)
    scale, minimum = read_params(params.stored)
    assert torch.equal(scale, params.scale) and torch.equal(minimum, params.minimum)


def test_a_methods_groups():
    x = torch.arange(64.0 * 32).reshape(64, 32)
    low, high = SCALE_METHODS["per_channel_32"].ranges(x)
    assert low.tolist() == [*x[0].tolist(), *x[32].tolist()] and high.tolist() == [*x[31].tolist(), *x[63].tolist()]
    low, high = SCALE_METHODS["per_token_32"].ranges(torch.cat((x, -x), 1))
    assert low.reshape(64, 2)[:, 0].tolist() == x[:, 0].tolist() and high.reshape(64, 2)[1, 1] == -32


def test_outliers_in_a_few_channels_touch_only_scales_that_span_channels():
    """What `k4v4` stands on, and what makes per-token INT4 keys a trap. 8-bit minima share a grid: they suffer too."""
    torch.manual_seed(0)
    x = torch.randn(8, 64, 64)
    out = x.clone()
    out[..., [3, 35]] *= 64
    rest = [c for c in range(64) if c not in (3, 35)]

    def error(y, method, scale_bits=16):
        codes, params = codec.quantize(y, 4, method, scale_bits)
        return float((codec.dequantize(codes, params.scale, params.minimum, method) - y)[..., rest].square().mean())

    for method in ("per_channel", "per_channel_32"):
        assert error(out, method) == error(x, method)
        assert error(out, method, 8) > 1.3 * error(x, method, 8)
    for method in ("per_token", "per_token_32", "per_head"):
        assert error(out, method) > 8 * error(x, method)


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
