"""ctypes mirrors of the structs in csrc/ktx.h, field by field, and the native form of a `PageLayout`.

Never loads a library: that is `native.py`. `SIZES` lists what `ktx_abi_size` is compared with.
"""

from __future__ import annotations

from ctypes import CFUNCTYPE, POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import lru_cache

import torch

from vllm_ktx.kv_quant.layout import PageLayout
from vllm_ktx.kv_quant.scale_methods import SCALE_METHODS, ScaleMethod

VERSION = 4
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
BY_CHANNEL, BY_TOKEN, BY_HEAD = range(3)


def kind_of(method: ScaleMethod) -> int | None:
    """Which of the kernels' three kinds a scale method is; None: another shape than they read."""
    if method.channels == 1 and (method.tokens or 0) % 32 == 0:
        return BY_CHANNEL
    if method.tokens == 1 and (method.channels or 0) % 32 == 0:
        return BY_TOKEN
    return BY_HEAD if method.tokens is method.channels is None else None


METHODS = {name: kind for name, method in SCALE_METHODS.items() if (kind := kind_of(method)) is not None}


class Section(Structure):
    _fields_ = [("offset", c_int64), ("head_bytes", c_int64)]


class Layout(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("page_size", "num_kv_heads", "head_dim", "k_bits", "v_bits")),
        *((name, c_int32) for name in ("k_method", "v_method", "v_rotate", "k_group", "v_group")),
        *((name, c_int32) for name in ("scale_bits", "reserved")),
        *((name, c_int64) for name in ("header_head_bytes", "header_bytes", "payload_bytes")),
        *((name, Section) for name in ("k_base", "k_scale", "k_min", "k_plane0", "k_plane1", "k_low")),
        *((name, Section) for name in ("v_base", "v_scale", "v_min", "v_codes")),
    ]


class SealArgs(Structure):
    _fields_ = [
        ("layout", POINTER(Layout)),
        *((name, c_void_p) for name in ("k", "v")),
        *((name, c_int32) for name in ("dtype", "num_pages")),
        *((name, c_int64) for name in ("token_stride", "head_stride")),
        *((name, c_void_p) for name in ("src", "block", "slot", "header", "payload")),
        *((name, c_int64) for name in ("header_stride", "payload_stride")),
        *((name, c_int32) for name in ("num_threads", "reserved")),
    ]


class AppendArgs(Structure):
    _fields_ = [
        ("layout", POINTER(Layout)),
        *((name, c_void_p) for name in ("k", "v")),
        *((name, c_int32) for name in ("dtype", "num_rows")),
        *((name, c_int64) for name in ("token_stride", "head_stride")),
        *((name, c_void_p) for name in ("token", "slot", "offset", "open_pages")),
        ("open_stride", c_int64),
        *((name, c_int32) for name in ("num_threads", "reserved")),
    ]


class SparseArgs(Structure):
    _fields_ = [
        ("headers", c_void_p),
        ("header_stride", c_int64),
        *((name, c_int32) for name in ("window", "sink_pages", "scoring", "select", "min_pages", "max_pages")),
        *((name, c_float) for name in ("coverage", "ratio", "share")),
        *((name, c_float) for name in ("spread_low", "spread_high", "explained_low", "explained_high")),
        ("reserved", c_int32),
        *((name, c_void_p) for name in ("dropped", "pages_read", "chosen")),
        ("chosen_stride", c_int64),
        ("depth", c_void_p),
    ]


FETCH = CFUNCTYPE(c_int32, c_void_p, POINTER(c_int32), c_int32, c_int32)


class Residency(Structure):
    _fields_ = [
        ("fetch", FETCH),
        ("context", c_void_p),
        *((name, c_int32) for name in ("limit", "num_blocks")),
        ("scoring", c_void_p),
        ("scoring_stride", c_int64),
        *((name, c_void_p) for name in ("slot_state", "slot_parts", "touched")),
        *((name, c_int32) for name in ("resident", "whole")),
    ]


class AttentionArgs(Structure):
    _fields_ = [
        ("layout", POINTER(Layout)),
        *((name, c_void_p) for name in ("q", "k", "v", "out", "lse")),
        *((name, c_int32) for name in ("dtype", "num_q_heads", "num_rows", "table_stride")),
        *((name, c_int64) for name in ("q_token_stride", "kv_token_stride", "out_token_stride")),
        *((name, c_void_p) for name in ("cu_q", "context", "block_table", "open_slot", "payload_slot")),
        *((name, c_void_p) for name in ("payload", "open_pages")),
        *((name, c_int64) for name in ("payload_stride", "open_stride")),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int32) for name in ("num_threads", "reserved")),
        ("sparse", POINTER(SparseArgs)),
        ("residency", POINTER(Residency)),
    ]


SIZES = (Layout, SealArgs, AppendArgs, AttentionArgs, SparseArgs, Residency)


@lru_cache(maxsize=64)
def layout_struct(layout: PageLayout) -> Layout:
    """The numbers of `layout` as the kernels read them. Made once; never change the result."""
    fmt = layout.fmt
    native = Layout(
        page_size=layout.page_size,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        k_bits=fmt.k_bits,
        v_bits=fmt.v_bits,
        k_method=METHODS[fmt.k_method],
        v_method=METHODS[fmt.v_method],
        v_rotate=int(fmt.v_rotate and fmt.quantized),
        k_group=group_of(layout, fmt.k_method),
        v_group=group_of(layout, fmt.v_method),
        scale_bits=fmt.scale_bits,
        header_head_bytes=layout.header_head_bytes,
        header_bytes=layout.header_bytes,
        payload_bytes=layout.payload_bytes,
    )
    for name, section in layout.sections.items():
        setattr(native, name, Section(section.offset, section.head_bytes))
    return native


def group_of(layout: PageLayout, name: str) -> int:
    """By channel, the tokens that share a scale; else the channels."""
    method = SCALE_METHODS[name]
    if METHODS[name] == BY_CHANNEL:
        return method.tokens or layout.page_size
    return method.channels or layout.head_dim
