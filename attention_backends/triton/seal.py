"""Kernels that write pages: quantize whole pages into header and payload, append fresh rows to open pages.

The arithmetic is that of `kv_quant/codec.py`, step by step in float32, so that the bytes agree. Launch with
`enable_fp_fusion=False`: a fused multiply-add would round once where the codec rounds twice. Entries with a negative
block or slot are skipped, so a list may be padded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pages import PER_CHANNEL, PER_TOKEN, key_channels, natural_channels, params_at, plane_at, real, rotate, within

FP16_MAX = tl.constexpr(65504.0)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and taking it away rounds to the nearest integer, ties to even


@triton.jit
def half_toward(x, UP: tl.constexpr):
    """float32 in the fp16 range -> fp16 rounded up or down: the nearest, moved by one bit pattern if it went wrong."""
    near = x.to(tl.float16)
    bits = near.to(tl.int16, bitcast=True).to(tl.int32)
    if UP:
        wrong = near.to(tl.float32) < x
        moved = tl.where((bits & 0x7FFF) == 0, 1, bits + tl.where(bits >= 0, 1, -1))
    else:
        wrong = near.to(tl.float32) > x
        moved = tl.where((bits & 0x7FFF) == 0, -0x7FFF, bits + tl.where(bits >= 0, -1, 1))
    return tl.where(wrong, moved, bits).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def round_even(x):
    return (x + ROUND) - ROUND


@triton.jit
def inverse_or_zero(step):
    return tl.where(step > 0, tl.div_rn(tl.full(step.shape, 1.0, tl.float32), tl.where(step > 0, step, 1.0)), 0.0)


@triton.jit
def group_of_run(channel, GROUP: tl.constexpr, L: tl.constexpr):
    """Whether a run of 8 places, all of one group of channels, lies in a group: `[runs, groups]`, both padded."""
    runs: tl.constexpr = channel.shape[0] // 8
    first = tl.max(tl.reshape(channel, (runs, 8)), 1)[:, None]  # padding (-1) comes by runs, too
    return (first >= 0) & (first // GROUP == tl.arange(0, 2 * L.half // GROUP)[None, :])


@triton.jit
def extremes(x, valid, channel, METHOD: tl.constexpr, GROUP: tl.constexpr, L: tl.constexpr):
    """Minimum and maximum of each group of `x` `[tokens, channels]`, in two dimensions of which one may be 1."""
    low, high = tl.where(valid, x, FP16_MAX), tl.where(valid, x, -FP16_MAX)
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    if METHOD == PER_CHANNEL and GROUP < rows:
        low = tl.reshape(low, (rows // GROUP, GROUP, columns))
        return tl.min(low, 1), tl.max(tl.reshape(high, (rows // GROUP, GROUP, columns)), 1)
    elif METHOD == PER_CHANNEL:
        return tl.min(low, 0)[None, :], tl.max(high, 0)[None, :]
    elif METHOD == PER_TOKEN and GROUP < L.dim:
        mine = group_of_run(channel, GROUP, L)[None, :, :]
        low = tl.min(tl.reshape(low, (rows, columns // 8, 8)), 2)[:, :, None]
        high = tl.max(tl.reshape(high, (rows, columns // 8, 8)), 2)[:, :, None]
        return tl.min(tl.where(mine, low, FP16_MAX), 1), tl.max(tl.where(mine, high, -FP16_MAX), 1)
    elif METHOD == PER_TOKEN:
        return tl.min(low, 1)[:, None], tl.max(high, 1)[:, None]
    else:
        return tl.min(tl.min(low, 1), 0)[None, None], tl.max(tl.max(high, 1), 0)[None, None]


@triton.jit
def entries(t, channel, METHOD: tl.constexpr, GROUP: tl.constexpr, L: tl.constexpr):
    """Where the parameters of `extremes`' groups are stored, and whether they are."""
    if METHOD == PER_CHANNEL and GROUP < t.shape[0]:
        row = tl.arange(0, t.shape[0] // GROUP)[:, None]
        return row * L.dim + channel[None, :], (row < L.page // GROUP) & real(channel[None, :], L)
    elif METHOD == PER_CHANNEL:
        return channel[None, :], real(channel[None, :], L)
    elif METHOD == PER_TOKEN and GROUP < L.dim:
        column = tl.arange(0, 2 * L.half // GROUP)[None, :]
        at = t[:, None] * (L.dim // GROUP) + column
        return at, (t[:, None] < L.page) & within(column, L.dim // GROUP, L)
    elif METHOD == PER_TOKEN:
        return t[:, None], t[:, None] < L.page
    else:
        return tl.zeros((1, 1), tl.int32), tl.full((1, 1), 1, tl.int1)


@triton.jit
def spread(params, t, channel, METHOD: tl.constexpr, GROUP: tl.constexpr, L: tl.constexpr):
    """Parameters of groups as something that broadcasts to `[tokens, channels]`."""
    rows: tl.constexpr = t.shape[0]
    columns: tl.constexpr = channel.shape[0]
    if METHOD == PER_CHANNEL and GROUP < rows:
        wide = tl.broadcast_to(params[:, None, :], (rows // GROUP, GROUP, columns))
        return tl.reshape(wide, (rows, columns))
    elif METHOD == PER_TOKEN and GROUP < L.dim:
        mine = group_of_run(channel, GROUP, L)[None, :, :]
        runs = tl.sum(tl.where(mine, params[:, None, :], 0.0), 2)
        return tl.reshape(tl.broadcast_to(runs[:, :, None], (rows, columns // 8, 8)), (rows, columns))
    else:
        return params


@triton.jit
def whole(x, KEEP_MAX: tl.constexpr):
    """Minimum or maximum of all of `x`, `[1, 1]`."""
    if KEEP_MAX:
        return tl.max(tl.max(x, 1), 0)[None, None]
    else:
        return tl.min(tl.min(x, 1), 0)[None, None]


@triton.jit
def divide(x, by: tl.constexpr):
    return tl.div_rn(x, tl.full(x.shape, by, tl.float32))


@triton.jit
def make_params(low, high, at, keep, page, head, LEVELS: tl.constexpr, KEYS: tl.constexpr, L: tl.constexpr):
    """float32 scales and minima of groups as they read back; stores them as `kv_quant/scale_methods.py` says."""
    base, scales, minima = params_at(page, head, KEYS, L)
    if L.scale_bits == 16:
        minimum = half_toward(low, False)
        scale = half_toward(divide(high - minimum.to(tl.float32), LEVELS), True)
        tl.store(scales.to(tl.pointer_type(tl.float16)) + at, scale, mask=keep)
        tl.store(minima.to(tl.pointer_type(tl.float16)) + at, minimum, mask=keep)
        return scale.to(tl.float32), minimum.to(tl.float32)
    else:
        least = half_toward(whole(tl.where(keep, low, FP16_MAX), False), False)
        offset = least.to(tl.float32)
        unit = half_toward(divide(whole(tl.where(keep, low, -FP16_MAX), True) - offset, 255), True)
        width = unit.to(tl.float32)
        steps = tl.minimum(tl.maximum(tl.floor((low - offset) * inverse_or_zero(width)), 0.0), 255.0)
        steps = tl.maximum(steps - tl.where(offset + width * steps > low, 1.0, 0.0), 0.0)
        minimum = offset + width * steps
        need = tl.where(keep, tl.maximum(divide(high - minimum, LEVELS), 0.0), 0.0)
        scale_unit = half_toward(divide(whole(need, True), 255), True)
        codes = tl.ceil(need * inverse_or_zero(scale_unit.to(tl.float32)))
        codes = tl.minimum(tl.maximum(codes, 0.0), 255.0)
        tl.store(scales + at, codes.to(tl.uint8), mask=keep)
        tl.store(minima + at, steps.to(tl.uint8), mask=keep)
        units = base + tl.zeros((1, 1), tl.int32)
        tl.store(units, scale_unit)
        tl.store(units + 1, least)
        tl.store(units + 2, unit)
        return scale_unit.to(tl.float32) * codes, minimum


@triton.jit
def quantize(x, valid, t, channel, page, head, KEYS: tl.constexpr, L: tl.constexpr):
    """Codes int32 of keys (or values) `x`; stores scales and minima."""
    METHOD: tl.constexpr = L.k_method if KEYS else L.v_method
    GROUP: tl.constexpr = L.k_group if KEYS else L.v_group
    levels: tl.constexpr = (1 << (L.k_bits if KEYS else L.v_bits)) - 1
    low, high = extremes(x, valid, channel, METHOD, GROUP, L)
    at, keep = entries(t, channel, METHOD, GROUP, L)
    scale, minimum = make_params(low, high, at, keep, page, head, levels, KEYS, L)
    inverse = spread(inverse_or_zero(scale), t, channel, METHOD, GROUP, L)
    codes = round_even((x - spread(minimum, t, channel, METHOD, GROUP, L)) * inverse)
    codes = tl.minimum(tl.maximum(codes, 0.0), levels)
    return tl.where(valid, codes, 0.0).to(tl.int32)


@triton.jit
def sanitize(x):
    x = x.to(tl.float32)
    x = tl.where(x == x, x, 0.0)
    return tl.minimum(tl.maximum(x, -FP16_MAX), FP16_MAX)


@triton.jit
def store_header(x, valid, channel, header, L: tl.constexpr):
    """int8 mean and population standard deviation of each channel, and their fp16 scales."""
    count = tl.full((1,), L.page, tl.float32)
    mean = tl.div_rn(tl.sum(tl.where(valid, x, 0.0), 0), tl.broadcast_to(count, channel.shape))
    away = tl.where(valid, x - mean[None, :], 0.0)
    deviation = tl.sqrt_rn(tl.div_rn(tl.sum(away * away, 0), tl.broadcast_to(count, channel.shape)))
    for part in tl.static_range(2):
        stat = mean if part == 0 else deviation
        stat = tl.where(real(channel, L), stat, 0.0)
        largest = tl.max(tl.abs(stat), 0)[None]
        scale = half_toward(tl.div_rn(largest, tl.full((1,), 127.0, tl.float32)), True)
        code = round_even(stat * inverse_or_zero(scale.to(tl.float32)))
        code = tl.minimum(tl.maximum(code, -127.0), 127.0).to(tl.int8)
        place = header.to(tl.pointer_type(tl.int8)) + part * L.dim + channel
        tl.store(place, code, mask=real(channel, L))
        both = (header + 2 * L.dim + 2 * part).to(tl.pointer_type(tl.float16)) + tl.arange(0, 1)
        tl.store(both, scale)


@triton.jit
def store_keys(codes, t, page, head, L: tl.constexpr, TOKENS: tl.constexpr):
    """Key codes `[TOKENS, 4 * quarter]` in key order -> the bit planes."""
    c = tl.arange(0, L.quarter)
    keep = (t[:, None] < L.page) & within(c[None, :], L.dim // 4, L)
    parts = tl.reshape(codes, (TOKENS, 4, L.quarter))
    shift = 2 * tl.arange(0, 4)[None, :, None]
    at = head * L.head_k_plane + plane_at(t[:, None], c[None, :], L)
    for plane in tl.static_range(2):
        two = (parts >> (L.k_bits - 2 - 2 * plane)) & 3
        packed = tl.sum(two << shift, 1).to(tl.uint8)
        tl.store(page + (L.at_k_plane0 if plane == 0 else L.at_k_plane1) + at, packed, mask=keep)
    if L.k_bits == 8:
        part = tl.arange(0, 2)[None, :, None]
        nibbles = tl.reshape(codes & 15, (TOKENS, 2, 2, L.quarter)) << (4 * tl.arange(0, 2)[None, :, None, None])
        place = head * L.head_k_low + plane_at(t[:, None, None], part * (L.dim // 4) + c[None, None, :], L)
        low = tl.sum(nibbles, 1).to(tl.uint8)
        tl.store(page + L.at_k_low + place, low, mask=keep[:, None, :])


@triton.jit
def store_values(codes, t, page, head, L: tl.constexpr, TOKENS: tl.constexpr):
    """Value codes `[TOKENS, 2 * half]` in natural order -> bytes."""
    base = page + L.at_v_codes + head * L.head_v_codes
    if L.v_bits == 8:
        d = tl.arange(0, 2 * L.half)
        keep = (t[:, None] < L.page) & within(d[None, :], L.dim, L)
        tl.store(base + t[:, None] * L.dim + d[None, :], codes.to(tl.uint8), mask=keep)
    else:
        nibbles = tl.reshape(codes, (TOKENS, L.half // 8, 2, 8)) << (4 * tl.arange(0, 2)[None, None, :, None])
        packed = tl.reshape(tl.sum(nibbles, 2), (TOKENS, L.half)).to(tl.uint8)
        b = tl.arange(0, L.half)
        keep = (t[:, None] < L.page) & within(b[None, :], L.dim // 2, L)
        tl.store(base + t[:, None] * (L.dim // 2) + b[None, :], packed, mask=keep)


@triton.jit
def load_rows(x, t, channel, token_stride, L: tl.constexpr):
    valid = (t[:, None] < L.page) & real(channel[None, :], L)
    return tl.load(x + t.to(tl.int64)[:, None] * token_stride + channel[None, :], mask=valid, other=0.0), valid


@triton.jit
def seal_pages(
    k,
    v,
    src,  # int64 [n]: element of k and v at which page i starts
    blocks,  # int32 [n]
    slots,  # int32 [n]
    headers,
    payload,
    token_stride,
    head_stride,
    header_stride,
    payload_stride,
    TOKENS: tl.constexpr,  # the page size, padded to a power of two
    L: tl.constexpr,
):
    """One page of one kv head a program: grid (n, heads)."""
    i, head = tl.program_id(0), tl.program_id(1)
    block = tl.load(blocks + i)
    if block < 0:
        return
    page = payload + tl.load(slots + i).to(tl.int64) * payload_stride
    first = tl.load(src + i) + head.to(tl.int64) * head_stride
    t = tl.arange(0, TOKENS)
    if L.k_bits == 16:
        d = natural_channels(L)
        x, valid = load_rows(k + first, t, d, token_stride, L)
        y, _ = load_rows(v + first, t, d, token_stride, L)
        rows = page.to(tl.pointer_type(k.dtype.element_ty)) + t[:, None] * L.dim + d[None, :]
        tl.store(rows + head * L.page * L.dim, x, mask=valid)
        tl.store(rows + (L.heads + head) * L.page * L.dim, y, mask=valid)
    else:
        channel = key_channels(L)
        x, valid = load_rows(k + first, t, channel, token_stride, L)
        x = sanitize(x)
        store_header(x, valid, channel, headers + block.to(tl.int64) * header_stride + head * L.header_head, L)
        codes = quantize(x, valid, t, channel, page, head, True, L)
        store_keys(codes, t, page, head, L, TOKENS)
        d = natural_channels(L)
        y, valid = load_rows(v + first, t, d, token_stride, L)
        y = sanitize(y)
        if L.rotate:
            y = tl.minimum(tl.maximum(rotate(y, TOKENS, L), -FP16_MAX), FP16_MAX)
        codes = quantize(y, valid, t, d, page, head, False, L)
        store_values(codes, t, page, head, L, TOKENS)


@triton.jit
def append_rows(
    k,
    v,
    token,  # int32 [n], as the next two
    slot,
    offset,
    open_pages,
    token_stride,
    head_stride,
    open_stride,
    HEADS: tl.constexpr,  # padded to a power of two
    L: tl.constexpr,
):
    """Row `token[i]` of k and v -> offset `offset[i]` of open page `slot[i]`: grid (n,)."""
    i = tl.program_id(0)
    to = tl.load(slot + i)
    if to < 0:
        return
    head, d = tl.arange(0, HEADS)[:, None], tl.arange(0, 2 * L.half)[None, :]
    keep = (head < L.heads) & within(d, L.dim, L)
    row = tl.load(token + i).to(tl.int64) * token_stride + head * head_stride + d
    page = open_pages + to.to(tl.int64) * open_stride + tl.load(offset + i) * L.dim + d
    tl.store(page + head * (L.page * L.dim), tl.load(k + row, mask=keep), mask=keep)
    tl.store(page + (L.heads + head) * (L.page * L.dim), tl.load(v + row, mask=keep), mask=keep)
