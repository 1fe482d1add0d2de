"""The ctypes mirrors against the built library, and what `load` does with a missing or a foreign one."""

import ctypes
import itertools
import logging
import threading
from types import SimpleNamespace

import pytest
import torch

from vllm_ktx.attention_backends.cpu import abi, native
from vllm_ktx.kv_quant.formats import PRESETS, KVFormat, parse_format
from vllm_ktx.kv_quant.layout import PageLayout
from vllm_ktx.kv_quant.scale_methods import SCALE_METHODS, ScaleMethod

kernels = native.load()
needs_kernels = pytest.mark.skipif(kernels is None, reason="the native CPU kernels are not built")


def test_layout_struct_carries_every_number():
    for fmt in (*PRESETS.values(), parse_format("k8v4", scale_bits=8)):
        layout = PageLayout(fmt, 64, 3, 80)
        struct = abi.layout_struct(layout)
        assert (struct.page_size, struct.num_kv_heads, struct.head_dim) == (64, 3, 80)
        assert (struct.k_bits, struct.v_bits, struct.payload_bytes) == (fmt.k_bits, fmt.v_bits, layout.payload_bytes)
        for name, section in layout.sections.items():
            native_section = getattr(struct, name)
            assert (native_section.offset, native_section.head_bytes) == (section.offset, section.head_bytes)


def test_methods_have_distinct_numbers():
    structs = [abi.layout_struct(PageLayout(KVFormat("t", 4, 4, k, v), 64, 1, 128))
               for k, v in itertools.product(SCALE_METHODS, SCALE_METHODS)]  # fmt: skip
    assert len({(s.k_method, s.k_group, s.v_method, s.v_group) for s in structs}) == len(SCALE_METHODS) ** 2
    for shape in ((16, 1), (1, 16), (32, 32), (None, 32), (32, None)):
        assert abi.kind_of(ScaleMethod("other", *shape)) is None


@needs_kernels
def test_sizes_and_isa():
    assert [kernels._library.ktx_abi_size(i) for i in range(7)] == [*map(ctypes.sizeof, abi.SIZES), -1]
    assert "portable" in kernels.available_isas()
    assert kernels.isa in kernels.available_isas()
    with pytest.raises(ValueError, match="VLLM_KTX_CPU_ISA='sse9'"):
        kernels.set_isa("sse9")


@needs_kernels
def test_another_abi_is_refused():
    class Library:
        ktx_isa = ktx_set_isa = SimpleNamespace()

        def __init__(self):
            self.ktx_abi_size = lambda which: 8
            self.ktx_abi_version = lambda: abi.VERSION + 1

    with pytest.raises(ImportError, match="reinstall"):
        native.CpuKernels(Library())


def test_missing_library_warns_once(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    native.load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert native.load() is None
            assert native.load() is None
        assert len(caplog.records) == 1
        assert "not built" in caplog.text
        (tmp_path / "_native.so").write_bytes(b"not a library")
        native.load.cache_clear()
        with caplog.at_level(logging.WARNING):
            assert native.load() is None
        assert "can't be used" in caplog.text
    finally:
        native.load.cache_clear()


@needs_kernels
def test_isa_variable(monkeypatch):
    before = kernels.isa
    monkeypatch.setenv(native.ISA_VARIABLE, "portable")
    native.load.cache_clear()
    try:
        assert native.load().isa == "portable"
    finally:
        native.load.cache_clear()
        kernels.set_isa(before)


@needs_kernels
def test_calls_from_several_threads():
    """Workspaces are per thread: concurrent calls give what they give alone."""
    layout = PageLayout(PRESETS["k4v4"], 64, 2, 64)
    torch.manual_seed(0)
    k, v = (torch.randn(40, 2, 64, 64).bfloat16() for _ in range(2))

    def attend():
        headers = torch.zeros(40, layout.header_bytes, dtype=torch.uint8)
        payload = torch.zeros(40, layout.payload_bytes, dtype=torch.uint8)
        ids = torch.arange(40, dtype=torch.int32)
        kernels.seal(layout, k, v, ids.long() * k.stride(0), ids, headers, payload, None, 64, 64 * 64)
        q = k[0, :1, :8].transpose(0, 1).contiguous().expand(8, 4, 64).contiguous()
        out = torch.empty_like(q)
        rows, context = torch.arange(9, dtype=torch.int32), torch.full((8,), 2500, dtype=torch.int32)
        sealed, no_pages = torch.full((40,), -1, dtype=torch.int32), torch.zeros(0, 2, 2, 64, 64, dtype=torch.bfloat16)
        table = ids.expand(8, 40).contiguous()
        kernels.attention(layout, q, None, None, out, rows, context, table, sealed, payload, no_pages, 0.125)
        return out

    want, got = attend(), []
    threads = [threading.Thread(target=lambda: got.append(attend())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 4
    assert all(torch.equal(want, out) for out in got)
