"""Which kernels serve a format: native ones where they know it, torch's with a warning otherwise, never silently."""

import logging

import pytest

from vllm_ktx.attention_backends.cpu import native
from vllm_ktx.attention_backends.kernels import kernels_for
from vllm_ktx.kv_quant import PRESETS, parse_format

needs_kernels = pytest.mark.skipif(native.load() is None, reason="the native CPU kernels are not built")


@pytest.fixture(autouse=True)
def fresh():
    kernels_for.cache_clear()
    yield
    kernels_for.cache_clear()


@needs_kernels
def test_presets_and_rotated_keys_are_native(caplog):
    with caplog.at_level(logging.WARNING):
        for fmt in (*PRESETS.values(), parse_format("k4v4", k_rotate=True, k_method="per_head")):
            assert kernels_for("auto", fmt).name.startswith("native")
    assert not caplog.records


@needs_kernels
@pytest.mark.parametrize(
    ("settings", "part"),
    [({"scale_bits": 8}, "8-bit scales"), ({"v_method": "per_token_32"}, "scales per_token_32")],
)
def test_what_native_kernels_lack_is_served_by_torch_and_said(caplog, settings, part):
    fmt = parse_format("k4v4", **settings)
    with caplog.at_level(logging.WARNING):
        assert kernels_for("auto", fmt).name == kernels_for("auto", fmt).name == "torch"
    (record,) = caplog.records
    assert f"no native kernels for {part}" in record.getMessage() and "many times slower" in record.getMessage()
    with pytest.raises(RuntimeError, match=f"these kernels don't have {part}.*set ktx.kernels to 'auto'"):
        kernels_for("native", fmt)
