"""Device functions that read pages: channel orders, key codes from their bit planes, scores, weighted values, rotation.

The arithmetic keeps codes exact: centred codes are small multiples of 1/2, which fp16 and bf16 hold exactly, and what
belongs to the minimum and the middle of a code's range is added in float32. So keys with a large offset (Qwen2.5's
reach 300) lose nothing to the precision of a tensor core's operands.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..cpu.abi import BY_CHANNEL, BY_TOKEN

LOG2E = tl.constexpr(1.4426950408889634)
PER_CHANNEL = tl.constexpr(BY_CHANNEL)
PER_TOKEN = tl.constexpr(BY_TOKEN)


@triton.jit
def within(index, count: tl.constexpr, L: tl.constexpr):
    """`index < count`, known to be true where nothing is padded (loads are then as wide as can be)."""
    if L.padded:
        return index < count
    else:
        return tl.full(index.shape, 1, tl.int1)


@triton.jit
def real(channel, L: tl.constexpr):
    """Which of the places that `*_channels` gave hold a channel."""
    if L.padded:
        return channel >= 0
    else:
        return tl.full(channel.shape, 1, tl.int1)


@triton.jit
def key_channels(L: tl.constexpr):
    """Channel of each place in key order `[4 * quarter]`; -1 for padding."""
    j = tl.arange(0, 4 * L.quarter)
    if L.padded:
        c = j % L.quarter
        j = tl.where(c < L.dim // 4, (j // L.quarter) * (L.dim // 4) + c, -1)
    return j


@triton.jit
def natural_channels(L: tl.constexpr):
    """`0 .. head_dim - 1`, then -1 for padding."""
    j = tl.arange(0, 2 * L.half)
    if L.padded:
        j = tl.where(j < L.dim, j, -1)
    return j


@triton.jit
def value_channels(L: tl.constexpr):
    """Channel of each place in value order `[2 * half]`; -1 for padding."""
    j = tl.arange(0, 2 * L.half)
    if L.v_bits == 4:
        c = j % L.half
        j = (c // 8) * 16 + c % 8 + 8 * (j // L.half)
    if L.padded:
        j = tl.where(j < L.dim, j, -1)
    return j


@triton.jit
def to_natural(x, ROWS: tl.constexpr, L: tl.constexpr):
    """`[ROWS, 2 * half]` from value order to natural order."""
    if L.v_bits == 4:
        x = tl.permute(tl.reshape(x, (ROWS, 2, L.half // 8, 8)), (0, 2, 1, 3))
        x = tl.reshape(x, (ROWS, 2 * L.half))
    return x


@triton.jit
def home_of(block, valid, home):
    """The rows of blocks in host memory. A block without one is nobody's to read: its row is any."""
    if home is not None:
        block = tl.maximum(tl.load(home + block, mask=valid, other=0), 0)
    return block


@triton.jit
def place_of(block, listed, payload_slot, home, HAS_SLOTS: tl.constexpr, HAS_HOST: tl.constexpr):
    """Where the pages of blocks lie: their slot, or, for one that host memory alone holds, -1 - its row there."""
    place = block
    if HAS_SLOTS:
        place = tl.load(payload_slot + block, mask=listed, other=0)
        if HAS_HOST:
            place = tl.where(place < 0, -1 - home_of(block, listed & (place < 0), home), place)
    return place


@triton.jit
def page_at(place, payload, payload_stride, host, host_stride, HAS_HOST: tl.constexpr):
    """The payload of one page, by its place."""
    page = payload + place.to(tl.int64) * payload_stride
    if HAS_HOST:
        page = tl.where(place < 0, host + (-1 - place).to(tl.int64) * host_stride, page)
    return page


@triton.jit
def load_halves(base, index, valid):
    """fp16 entries of a page as float32."""
    return tl.load(base.to(tl.pointer_type(tl.float16)) + index, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def params_at(page, head, KEYS: tl.constexpr, L: tl.constexpr):
    """Base (of 8-bit scales only), scales and minima of keys (or values) in the payload at `page`."""
    if KEYS:
        base, scales = page + L.at_k_base + head * 6, page + L.at_k_scale + head * L.head_k_scale
        return base.to(tl.pointer_type(tl.float16)), scales, page + L.at_k_min + head * L.head_k_scale
    else:
        base, scales = page + L.at_v_base + head * 6, page + L.at_v_scale + head * L.head_v_scale
        return base.to(tl.pointer_type(tl.float16)), scales, page + L.at_v_min + head * L.head_v_scale


@triton.jit
def load_params(page, head, entry, valid, KEYS: tl.constexpr, L: tl.constexpr):
    """Scales and minima of keys (or values) in the payload at `page`, float32; 0 where not `valid`."""
    units, scales, minima = params_at(page, head, KEYS, L)
    if L.scale_bits == 16:
        return load_halves(scales, entry, valid), load_halves(minima, entry, valid)
    else:
        scale = tl.load(scales + entry, mask=valid, other=0).to(tl.float32) * tl.load(units).to(tl.float32)
        minimum = tl.load(minima + entry, mask=valid, other=0).to(tl.float32) * tl.load(units + 2).to(tl.float32)
        return scale, tl.where(valid, minimum + tl.load(units + 1).to(tl.float32), 0.0)


@triton.jit
def channel_entries(channel, t0, GROUP: tl.constexpr, L: tl.constexpr):
    """Where parameters by channel lie; tokens `t0 ..` of a tile share them."""
    if GROUP < L.page:
        channel += (t0 // GROUP) * L.dim
    return channel


@triton.jit
def multiply(a, b, L: tl.constexpr):
    if L.exact:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def plane_at(tokens, c, L: tl.constexpr):
    """Byte of `[tokens, c]` in a plane of words `[c / 4][page][4]`."""
    return (c // 4) * (4 * L.page) + tokens * 4 + c % 4


@triton.jit
def key_codes(page, head, t0, L: tl.constexpr):
    """Key codes int32 `[tile, 4 * quarter]` of tokens `t0 ..` of the payload at `page`."""
    t = t0 + tl.arange(0, L.tile)
    c = tl.arange(0, L.quarter)
    at = head * L.head_k_plane + plane_at(t[:, None], c[None, :], L)
    valid = within(c[None, :], L.dim // 4, L)
    high = tl.load(page + L.at_k_plane0 + at, mask=valid, other=0).to(tl.int32)
    low = tl.load(page + L.at_k_plane1 + at, mask=valid, other=0).to(tl.int32)
    shift = 2 * tl.arange(0, 4)[None, :, None]
    codes = (((high[:, None, :] >> shift) & 3) << 2) | ((low[:, None, :] >> shift) & 3)
    if L.k_bits == 8:
        part = tl.arange(0, 2)[None, :, None]
        at = head * L.head_k_low + plane_at(t[:, None, None], part * (L.dim // 4) + c[None, None, :], L)
        rest = tl.load(page + L.at_k_low + at, mask=valid[:, None, :], other=0).to(tl.int32)
        rest = (rest[:, None, :, :] >> (4 * tl.arange(0, 2)[None, :, None, None])) & 15
        codes = (codes << 4) | tl.reshape(rest, (L.tile, 4, L.quarter))
    return tl.reshape(codes, (L.tile, 4 * L.quarter))


@triton.jit
def centered(codes, bits: tl.constexpr, dtype: tl.constexpr):
    """Codes less the middle of their range: exact in fp16 and bf16."""
    return (codes.to(tl.float32) - ((1 << bits) - 1) * 0.5).to(dtype)


@triton.jit
def restored(codes, page, head, t0, KEYS: tl.constexpr, L: tl.constexpr):
    """float32 keys (or values, rotated) `[tile, channels]` that codes of tokens `t0 ..` stand for, in their order."""
    METHOD: tl.constexpr = L.k_method if KEYS else L.v_method
    GROUP: tl.constexpr = L.k_group if KEYS else L.v_group
    channel = key_channels(L) if KEYS else value_channels(L)
    t = t0 + tl.arange(0, L.tile)[:, None]
    if METHOD == PER_CHANNEL:
        entry, valid = channel_entries(channel, t0, GROUP, L)[None, :], real(channel[None, :], L)
    elif METHOD == PER_TOKEN and GROUP < L.dim:
        entry = t * (L.dim // GROUP) + channel[None, :] // GROUP
        valid = real(channel[None, :], L) & (t >= 0)
    else:
        entry = t if METHOD == PER_TOKEN else t * 0
        valid = tl.full(t.shape, 1, tl.int1)
    scale, minimum = load_params(page, head, entry, valid, KEYS, L)
    return codes.to(tl.float32) * scale + minimum


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Restored numbers in `dtype`: those next to fp16's ends, which a seal clamps to, must not become infinite."""
    if dtype == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return x.to(dtype)


@triton.jit
def exact_rows(q, center, L: tl.constexpr):
    """`q . center` `[M]` in about float32 precision: `center` goes in as two operands of the queries' dtype."""
    if L.exact:
        return tl.sum(q * center[None, :], 1)
    else:
        high = center.to(q.dtype)
        low = (center - high.to(tl.float32)).to(q.dtype)
        column = tl.arange(0, 16)[None, :]
        both = tl.where(column == 0, high[:, None], tl.where(column == 1, low[:, None], 0.0)).to(q.dtype)
        return tl.sum(tl.dot(q, both), 1)


@triton.jit
def sealed_scores(q, page, head, t0, FOLD: tl.constexpr, L: tl.constexpr):
    """`q . key` float32 `[M, tile]` for tokens `t0 ..` of a sealed page; `q` `[M, 4 * quarter]` in the model's dtype.

    `FOLD`: scale the queries instead of the keys, which is less work where there are few of them.
    """
    middle: tl.constexpr = ((1 << L.k_bits) - 1) * 0.5
    raw = key_codes(page, head, t0, L)
    codes = centered(raw, L.k_bits, q.dtype if not L.exact else tl.float32)
    if L.k_method == PER_CHANNEL:
        channel = key_channels(L)
        entry = channel_entries(channel, t0, L.k_group, L)
        scale, minimum = load_params(page, head, entry, real(channel, L), True, L)
        center = minimum + middle * scale
        if FOLD:
            wide = q.to(tl.float32)
            s = multiply((wide * scale[None, :]).to(codes.dtype), tl.trans(codes), L)
            s += tl.sum(wide * center[None, :], 1)[:, None]
        else:
            keys = (codes.to(tl.float32) * scale[None, :]).to(codes.dtype)
            s = multiply(q, tl.trans(keys), L) + exact_rows(q, center, L)[:, None]
    elif L.k_method == PER_TOKEN and L.k_group < L.dim:  # a product for each group would cost more
        keys = restored(raw, page, head, t0, True, L)
        high = rounded(keys, codes.dtype)
        s = multiply(q, tl.trans(high), L)
        if not L.exact:
            s += multiply(q, tl.trans((keys - high.to(tl.float32)).to(codes.dtype)), L)
    else:
        t = t0 + tl.arange(0, L.tile)
        at = t if L.k_method == PER_TOKEN else t * 0
        scale, minimum = load_params(page, head, at, tl.full(at.shape, 1, tl.int1), True, L)
        center = minimum + middle * scale
        s = multiply(q, tl.trans(codes), L) * scale[None, :]
        s += exact_rows(q, tl.full((4 * L.quarter,), 1.0, tl.float32), L)[:, None] * center[None, :]
    return s


@triton.jit
def value_codes(page, head, t0, L: tl.constexpr):
    """Value codes int32 `[tile, 2 * half]` of tokens `t0 ..` of the payload at `page`, in value order."""
    t = t0 + tl.arange(0, L.tile)
    c = tl.arange(0, L.half)
    base = page + L.at_v_codes + head * L.head_v_codes
    if L.v_bits == 4:
        valid = within(c[None, :], L.dim // 2, L)
        packed = tl.load(base + t[:, None] * (L.dim // 2) + c[None, :], mask=valid, other=0).to(tl.int32)
        raw = (packed[:, None, :] >> (4 * tl.arange(0, 2)[None, :, None])) & 15
        return tl.reshape(raw, (L.tile, 2 * L.half))
    else:
        d = tl.arange(0, 2 * L.half)
        valid = within(d[None, :], L.dim, L)
        return tl.load(base + t[:, None] * L.dim + d[None, :], mask=valid, other=0).to(tl.int32)


@triton.jit
def sealed_values(weights, dtype: tl.constexpr, page, head, t0, L: tl.constexpr):
    """`weights` float32 `[M, tile]` times the (rotated) values of tokens `t0 ..`: float32 `[M, 2 * half]`."""
    t = t0 + tl.arange(0, L.tile)
    raw = value_codes(page, head, t0, L)
    codes = centered(raw, L.v_bits, dtype)
    middle: tl.constexpr = ((1 << L.v_bits) - 1) * 0.5
    if L.v_method == PER_CHANNEL:
        channel = value_channels(L)
        entry = channel_entries(channel, t0, L.v_group, L)
        scale, minimum = load_params(page, head, entry, real(channel, L), False, L)
        center = minimum + middle * scale
        total = multiply(weights.to(dtype), codes, L) * scale[None, :]
        return total + tl.sum(weights, 1)[:, None] * center[None, :]
    elif L.v_method == PER_TOKEN and L.v_group < L.dim:
        return multiply(weights.to(dtype), rounded(restored(raw, page, head, t0, False, L), dtype), L)
    else:
        at = t if L.v_method == PER_TOKEN else t * 0
        scale, minimum = load_params(page, head, at, tl.full(at.shape, 1, tl.int1), False, L)
        center = minimum + middle * scale
        total = multiply((weights * scale[None, :]).to(dtype), codes, L)
        return total + tl.sum(weights * center[None, :], 1)[:, None]


@triton.jit
def plain_scores(q, keys, token_stride, t0, count, L: tl.constexpr):
    """`q . key` `[M, tile]` for tokens `t0 ..` below `count`, in the model's dtype, `token_stride` elements apart."""
    t = t0 + tl.arange(0, L.tile)
    channel = key_channels(L)
    at = t.to(tl.int64)[:, None] * token_stride + channel[None, :]
    k = tl.load(keys + at, mask=(t[:, None] < count) & real(channel[None, :], L), other=0.0)
    return multiply(q, tl.trans(k), L)


@triton.jit
def plain_values(weights, values, token_stride, t0, count, channel, L: tl.constexpr):
    """As `sealed_values`, for values in the model's dtype, which are not rotated; in the order of `channel`."""
    t = t0 + tl.arange(0, L.tile)
    at = t.to(tl.int64)[:, None] * token_stride + channel[None, :]
    v = tl.load(values + at, mask=(t[:, None] < count) & real(channel[None, :], L), other=0.0)
    return multiply(weights.to(v.dtype), v, L)


@triton.jit
def soften(s, softcap, CAP: tl.constexpr):
    """softcap * tanh(s / softcap), where there is a cap."""
    if CAP:
        s = softcap * (2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0)
    return s


@triton.jit
def online_softmax(s, peak, total):
    """Weights of scores `[M, n]` (-inf: hidden), and what they make of a running peak and total `[M]`.

    Returns weights, factor for earlier sums, new peak, new total.
    """
    fresh = tl.maximum(peak, tl.max(s, 1))
    base = tl.where(fresh == float("-inf"), 0.0, fresh)
    weights = tl.exp2((s - base[:, None]) * LOG2E)
    keep = tl.exp2((peak - base) * LOG2E)
    return weights, keep, fresh, total * keep + tl.sum(weights, 1)


@triton.jit
def rotate(x, ROWS: tl.constexpr, L: tl.constexpr):
    """Hadamard rotation of the rows of `x` `[ROWS, 2 * half]` in natural order, its additions paired as in
    `kv_quant/hadamard.py`."""
    size: tl.constexpr = L.dim & -L.dim
    width: tl.constexpr = 2 * L.half
    for i in tl.static_range(0, 9):  # head_dim is at most 512
        if (1 << i) < size:
            pairs = tl.reshape(x, (ROWS, width // (2 << i), 2, 1 << i))
            low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            x = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2)), (ROWS, width))
    return x * (size**-0.5)
