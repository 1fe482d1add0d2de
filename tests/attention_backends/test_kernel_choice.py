"""Which kernels serve a format: native ones where they know it, torch's with a warning otherwise, never silently."""

import itertools
import logging

import pytest

from vllm_ktx.attention_backends.cpu import native
from vllm_ktx.attention_backends.cpu.abi import METHODS, kind_of
from vllm_ktx.attention_backends.kernels import kernels_for
from vllm_ktx.attention_backends.triton.geometry import unserved
from vllm_ktx.kv_quant import PRESETS, KVFormat, parse_format
from vllm_ktx.kv_quant.scale_methods import SCALE_BITS, SCALE_METHODS, ScaleMethod

needs_kernels = pytest.mark.skipif(native.load() is None, reason="the native CPU kernels are not built")


@pytest.fixture(autouse=True)
def fresh():
    kernels_for.cache_clear()
    yield
    kernels_for.cache_clear()


SIDES = ((4, 8), (4, 8), SCALE_METHODS, SCALE_METHODS, (False, True), (0,), (False, True), SCALE_BITS)
FORMATS = (*PRESETS.values(), *(KVFormat("test", *fields) for fields in itertools.product(*SIDES)))


@needs_kernels
def test_every_format_is_native(caplog):
    with caplog.at_level(logging.WARNING):
        for fmt in FORMATS:
            assert kernels_for("auto", fmt).name.startswith("native")
    assert not caplog.records


def test_every_format_has_cuda_kernels_but_shapes_that_nobody_wrote():
    assert not [fmt for fmt in FORMATS if unserved(fmt)]


@pytest.mark.parametrize("shape", [(16, 16), (96, 1), (1, 96)])
def test_what_cuda_kernels_lack_is_named(shape, monkeypatch):
    monkeypatch.setitem(SCALE_METHODS, "blocks", ScaleMethod("blocks", *shape))
    if kind_of(SCALE_METHODS["blocks"]) is not None:
        monkeypatch.setitem(METHODS, "blocks", kind_of(SCALE_METHODS["blocks"]))
    assert unserved(parse_format("k4v4", v_method="blocks")) == "scales blocks"


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
