"""Which kernels serve a format: native ones where they know it, torch's with a warning otherwise, never silently."""

import itertools
import logging

import pytest

from vllm_ktx.attention_backends.cpu import native
from vllm_ktx.attention_backends.kernels import kernels_for
from vllm_ktx.kv_quant import PRESETS, KVFormat, parse_format
from vllm_ktx.kv_quant.scale_methods import SCALE_BITS, SCALE_METHODS, ScaleMethod

needs_kernels = pytest.mark.skipif(native.load() is None, reason="the native CPU kernels are not built")


@pytest.fixture(autouse=True)
def fresh():
    kernels_for.cache_clear()
    yield
    kernels_for.cache_clear()


@needs_kernels
def test_every_format_is_native(caplog):
    rotate = (False, True)
    matrix = itertools.product((4, 8), (4, 8), SCALE_METHODS, SCALE_METHODS, rotate, (0,), rotate, SCALE_BITS)
    with caplog.at_level(logging.WARNING):
        for fmt in (*PRESETS.values(), *(KVFormat("test", *fields) for fields in matrix)):
            assert kernels_for("auto", fmt).name.startswith("native")
    assert not caplog.records


@needs_kernels
def test_what_native_kernels_lack_is_served_by_torch_and_said(caplog, monkeypatch):
    """A method that somebody added, of a shape that they don't read."""
    monkeypatch.setitem(SCALE_METHODS, "blocks", ScaleMethod("blocks", 16, 16))
    fmt, part = parse_format("k4v4", v_method="blocks"), "scales blocks"
    with caplog.at_level(logging.WARNING):
        assert kernels_for("auto", fmt).name == kernels_for("auto", fmt).name == "torch"
    (record,) = caplog.records
    assert f"no native kernels for {part}" in record.getMessage() and "many times slower" in record.getMessage()
    with pytest.raises(RuntimeError, match=f"these kernels don't have {part}.*set ktx.kernels to 'auto'"):
        kernels_for("native", fmt)
