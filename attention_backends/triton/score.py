"""Kernels that estimate how much softmax mass each page holds for a unit's queries, from few bytes a page.

First from headers (mean and deviation of the keys, a saturating variance term), then from plane 0 of the key codes, two
bits a key, for the pages worth it. The formulas and their sources stand in `selection/pages.py` and
`selection/codes.py`.

A unit asks with R = group * samples queries: a token unit with its own (samples 1), a block unit with every fourth of
its 64 (samples 16). Results are float32 `[unit, kv head, R, pages]`, by page of the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attend import load_queries
from .pages import (
    LOG2E,
    channel_entries,
    key_channels,
    load_params,
    multiply,
    natural_channels,
    plane_at,
    real,
    soften,
    within,
)
from .units import BLOCK, candidates, step_jit

VARIANCE_FACTOR = tl.constexpr(0.7)  # `selection.pages.VARIANCE_FACTOR`


@triton.jit
def asking(r, first_query, start, head, SAMPLES: tl.constexpr, L: tl.constexpr):
    """Token and query head of asking query `r`."""
    if SAMPLES == 1:
        return start + first_query + r * 0, head * L.group + r
    else:
        step: tl.constexpr = BLOCK // SAMPLES
        return start + first_query + (r % SAMPLES + 1) * step - 1, head * L.group + r // SAMPLES


@triton.jit
def log_mass(a, v, log_tokens):
    """Log-mass of a page from the mean `a` and variance `v` of its logits, see `selection.pages.estimate_mass`."""
    edge = tl.sqrt(2.0 * log_tokens)
    sd = tl.sqrt(v)
    return a + log_tokens + tl.where(sd < edge, v * 0.5, sd * edge - log_tokens)


@triton.jit
def log_add(x, y):
    """ln(e^x + e^y), -inf where both are."""
    top = tl.maximum(x, y)
    base = tl.where(top == float("-inf"), 0.0, top)
    return base + tl.log2(tl.exp2((x - base) * LOG2E) + tl.exp2((y - base) * LOG2E)) / LOG2E


@triton.jit
def log_sum(x, AXIS: tl.constexpr):
    """ln(sum(e^x)) along an axis of a 2-dimensional `x`, -inf where all are."""
    top = tl.max(x, AXIS)
    base = tl.where(top == float("-inf"), 0.0, top)
    wide = base[:, None] if AXIS == 1 else base[None, :]
    return base + tl.log2(tl.sum(tl.exp2((x - wide) * LOG2E), AXIS)) / LOG2E


@step_jit
def score_headers(
    q, headers, mass, variance, cu_q, context, table, units, totals,
    q_stride, header_stride, table_stride, pages_stride, first_unit, window, sink_pages, min_pages, scale, softcap,
    M: tl.constexpr, SAMPLES: tl.constexpr, PAGES: tl.constexpr, CAP: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Mean logit and variance of the logits in PAGES pages: grid (units, heads times M-th parts of the asking queries,
    table width / PAGES).

    A token unit needs its candidates, a block unit all whole pages: what it reads in any case is estimated too.
    """
    unit, head, part = tl.program_id(0), tl.program_id(1) % L.heads, tl.program_id(2)
    if first_unit + unit >= tl.load(totals + (1 if SAMPLES > 1 else 0)):
        return
    row = tl.load(units + 2 * (first_unit + unit))
    query = tl.load(units + 2 * (first_unit + unit) + 1)
    length = tl.load(context + row)
    first, last = candidates(length, query, window, sink_pages, min_pages, L)
    if first == last:
        return
    if SAMPLES > 1:
        first, last = 0, length // L.page
    if ((part + 1) * PAGES <= first) | (part * PAGES >= last):
        return
    p = part * PAGES + tl.arange(0, PAGES)
    wanted = (p >= first) & (p < last)
    block = tl.load(table + row.to(tl.int64) * table_stride + p, mask=wanted, other=0).to(tl.int64)
    channel = natural_channels(L)
    at = headers + block * header_stride + head * L.header_head
    keep = wanted[:, None] & real(channel[None, :], L)
    codes = (at[:, None] + channel[None, :]).to(tl.pointer_type(tl.int8))
    mean = tl.load(codes, mask=keep, other=0).to(tl.float32)
    deviation = tl.load(codes + L.dim, mask=keep, other=0).to(tl.float32)
    scales = (at + 2 * L.dim).to(tl.pointer_type(tl.float16))
    by_mean = tl.load(scales, mask=wanted, other=0.0).to(tl.float32)
    by_deviation = tl.load(scales + 1, mask=wanted, other=0.0).to(tl.float32)
    r = tl.program_id(1) // L.heads * M + tl.arange(0, M)
    valid = r < L.group * SAMPLES
    token, q_head = asking(r, query, tl.load(cu_q + row), head, SAMPLES, L)
    x = tl.load(
        q + (token.to(tl.int64) * q_stride + q_head * L.dim)[:, None] + channel[None, :],
        mask=valid[:, None] & real(channel[None, :], L), other=0.0,
    ).to(tl.float32)  # fmt: skip
    # Unscaled, since 16-bit queries and int8 means are exact in TF32: offsets of keys lose nothing.
    a = multiply(x, tl.trans(mean), L) * (by_mean * scale)[None, :]
    by_deviation *= scale
    v = tl.dot(x * x, tl.trans(deviation * deviation)) * (by_deviation * by_deviation * VARIANCE_FACTOR)[None, :]
    to = ((unit * L.heads + head) * (L.group * SAMPLES) + r).to(tl.int64)[:, None] * pages_stride + p[None, :]
    tl.store(mass + to, soften(a, softcap, CAP), mask=valid[:, None] & wanted[None, :])
    tl.store(variance + to, v, mask=valid[:, None] & wanted[None, :])


@triton.jit
def token_moments(keys, token_stride, first, count, RUN: tl.constexpr, L: tl.constexpr):
    """Mean and mean squared deviation `[2 * half]` of keys `first .. first + count`, at most RUN, natural order."""
    t = tl.arange(0, RUN)
    channel = natural_channels(L)
    keep = (t[:, None] < count) & real(channel[None, :], L)
    x = tl.load(keys + (first + t).to(tl.int64)[:, None] * token_stride + channel[None, :], mask=keep, other=0.0)
    x = x.to(tl.float32)
    mean = tl.sum(x, 0) / count
    away = tl.where(keep, x - mean[None, :], 0.0)
    return channel, mean, tl.sum(away * away, 0) / count


@step_jit
def fresh_moments(
    k, moments, cu_q, units, totals, kv_stride,
    L: tl.constexpr,
):  # fmt: skip
    """Mean and variance of each block unit's keys -> `moments` float32 `[unit, head, 2, dim]`: grid (units, heads)."""
    unit, head = tl.program_id(0), tl.program_id(1)
    if unit >= tl.load(totals + 1):
        return
    first = tl.load(cu_q + tl.load(units + 2 * unit)) + tl.load(units + 2 * unit + 1)
    channel, mean, variance = token_moments(k + head * L.dim, kv_stride, first, BLOCK, BLOCK, L)
    to = moments + (unit * L.heads + head) * 2 * L.dim + channel
    tl.store(to, mean, mask=real(channel, L))
    tl.store(to + L.dim, variance, mask=real(channel, L))


@step_jit
def known_blocks(
    q, mass, variance, moments, known, cu_q, context, table, open_slot, open_pages, units, totals,
    q_stride, table_stride, open_stride, pages_stride, first_unit, window, sink_pages, min_pages, scale, softcap,
    CAP: tl.constexpr, HAS_FRESH: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Estimated log-mass of what a block unit reads anyway -> `known` `[unit, head, R]`: grid (units, heads, group).

    Always-read whole pages by their headers, a partial open page and the fresh tokens before the block by their
    moments.
    """
    SAMPLES: tl.constexpr = 16
    unit, head = tl.program_id(0), tl.program_id(1)
    if first_unit + unit >= tl.load(totals + 1):
        return
    row = tl.load(units + 2 * (first_unit + unit))
    query = tl.load(units + 2 * (first_unit + unit) + 1)
    length = tl.load(context + row)
    first, last = candidates(length, query, window, sink_pages, min_pages, L)
    if first == last:
        return
    r = tl.program_id(2) * SAMPLES + tl.arange(0, SAMPLES)
    log_page = tl.log2(tl.full((1, 1), L.page, tl.float32)) / LOG2E
    log_block = tl.log2(tl.full((1, 1), BLOCK, tl.float32)) / LOG2E
    sums = tl.full((SAMPLES,), float("-inf"), tl.float32)
    rows = ((unit * L.heads + head) * (L.group * SAMPLES) + r).to(tl.int64)[:, None] * pages_stride
    always = first + length // L.page - last
    for i in tl.range(0, always, 32, disable_licm=True):
        n = i + tl.arange(0, 32)
        p = tl.where(n < first, n, n - first + last)
        keep = (r >= 0)[:, None] & (n < always)[None, :]
        a = tl.load(mass + rows + p[None, :], mask=keep, other=float("-inf"))
        v = tl.load(variance + rows + p[None, :], mask=keep, other=0.0)
        sums = log_add(sums, log_sum(log_mass(a, v, log_page), 1))
    channel = natural_channels(L)
    token, q_head = asking(r, query, tl.load(cu_q + row), head, SAMPLES, L)
    x = tl.load(
        q + (token.to(tl.int64) * q_stride + q_head * L.dim)[:, None] + channel[None, :],
        mask=real(channel[None, :], L), other=0.0,
    ).to(tl.float32) * scale  # fmt: skip
    squares = x * x * VARIANCE_FACTOR
    rest = length % L.page
    if rest > 0:
        slot = tl.load(open_slot + tl.load(table + row.to(tl.int64) * table_stride + length // L.page))
        if slot >= 0:  # always, but for dummy rows
            page = open_pages + slot.to(tl.int64) * open_stride + head * (L.page * L.dim)
            # In runs of 16 tokens, joined as the moments of all of them.
            mean = tl.zeros((2 * L.half,), tl.float32)
            spread = tl.zeros((2 * L.half,), tl.float32)
            for t in tl.range(0, rest, 16, disable_licm=True):
                n = tl.minimum(rest - t, 16)
                _, own, var = token_moments(page, L.dim, t, n, 16, L)
                away = own - mean
                spread += var * n + away * away * (t * n / (t + n))
                mean += away * (n / (t + n))
            a = soften(tl.sum(x * mean[None, :], 1), softcap, CAP)
            v = tl.sum(squares * (spread / rest)[None, :], 1)
            sums = log_add(sums, log_mass(a, v, tl.log2(rest.to(tl.float32)) / LOG2E))
    if HAS_FRESH:
        # Nearly float32, where shared memory holds it.
        PRECISION: tl.constexpr = "tf32x3" if L.half <= 64 else "tf32"
        before = query // BLOCK
        for i in tl.range(0, before, 16, disable_licm=True):
            n = i + tl.arange(0, 16)
            at = (first_unit + unit - before + n) * L.heads + head
            keep = (n < before)[:, None] & real(channel[None, :], L)
            mean = tl.load(moments + at[:, None] * (2 * L.dim) + channel[None, :], mask=keep, other=0.0)
            var = tl.load(moments + at[:, None] * (2 * L.dim) + L.dim + channel[None, :], mask=keep, other=0.0)
            a = soften(tl.dot(x, tl.trans(mean), input_precision=PRECISION), softcap, CAP)
            estimate = log_mass(a, tl.dot(squares, tl.trans(var)), log_block)
            sums = log_add(sums, log_sum(tl.where((n < before)[None, :], estimate, float("-inf")), 1))
    tl.store(known + (unit * L.heads + head) * (L.group * SAMPLES) + r, sums)


@triton.jit
def fold_codes(x, page, head, t0, dtype: tl.constexpr, L: tl.constexpr):
    """Queries `x` `[M, 4 * quarter]`, in `dtype`, for the two bits of plane 0 less 1.5 of tokens `t0 ..`; what is to be
    added `[M]`: to the products, for minima, and to the log-mass, for the bits that aren't read."""
    per_step: tl.constexpr = 1 << (L.k_bits - 2)  # codes that one step of the top two bits covers
    channel = key_channels(L)
    entry = channel_entries(channel, t0, L.k_group, L)
    factor, minimum = load_params(page, head, entry, real(channel, L), True, L)
    step = factor * per_step
    bias = tl.sum(x * (minimum + factor * ((per_step - 1) * 0.5) + step * 1.5)[None, :], 1)
    folded = x * step[None, :]
    # Half the variance of a uniform error of one step.
    return folded.to(dtype), bias, tl.sum(folded * folded, 1) / 24


@step_jit
def probe_pages(
    q, payload, codes, lists, lengths, cu_q, table, payload_slot, units, totals,
    q_stride, table_stride, payload_stride, pages_stride, first_unit, scale, softcap,
    M: tl.constexpr, SAMPLES: tl.constexpr, PAGES: tl.constexpr, HAS_SLOTS: tl.constexpr, CAP: tl.constexpr,
    L: tl.constexpr,
):  # fmt: skip
    """Log-masses from plane 0 of up to PAGES listed pages -> `codes`: grid as of `score_headers`."""
    unit, head, part = tl.program_id(0), tl.program_id(1) % L.heads, tl.program_id(2)
    if first_unit + unit >= tl.load(totals + (1 if SAMPLES > 1 else 0)):
        return
    PAGE: tl.constexpr = L.page
    TILE: tl.constexpr = L.tile
    count = tl.load(lengths + unit * L.heads + head)
    if part * PAGES >= count:
        return
    row = tl.load(units + 2 * (first_unit + unit))
    query = tl.load(units + 2 * (first_unit + unit) + 1)
    i = part * PAGES + tl.arange(0, PAGES)
    listed = i < count
    pages = tl.load(lists + (unit * L.heads + head).to(tl.int64) * pages_stride + i, mask=listed, other=0)
    slots = tl.load(table + row.to(tl.int64) * table_stride + pages, mask=listed, other=0)
    if HAS_SLOTS:
        slots = tl.load(payload_slot + slots, mask=listed, other=0)
    r = tl.program_id(1) // L.heads * M + tl.arange(0, M)
    valid = r < L.group * SAMPLES
    token, q_head = asking(r, query, tl.load(cu_q + row), head, SAMPLES, L)
    raw = load_queries(q, token, q_head, valid, q_stride, L)
    x = raw.to(tl.float32) * scale
    c = tl.arange(0, L.quarter)
    to = codes + ((unit * L.heads + head) * (L.group * SAMPLES) + r).to(tl.int64) * pages_stride
    for j in tl.range(part * PAGES, tl.minimum((part + 1) * PAGES, count), disable_licm=True):
        page = payload + tl.sum(tl.where(i == j, slots, 0)).to(tl.int64) * payload_stride
        operand, bias, noise = fold_codes(x, page, head, 0, raw.dtype, L)
        found = tl.full((M,), float("-inf"), tl.float32)
        for t0 in tl.static_range(0, PAGE, TILE):
            if t0 > 0 and t0 % L.k_group == 0:
                operand, bias, noise = fold_codes(x, page, head, t0, raw.dtype, L)
            t = t0 + tl.arange(0, L.tile)
            at = head * L.head_k_plane + plane_at(t[:, None], c[None, :], L)
            keep = within(c[None, :], L.dim // 4, L)
            packed = tl.load(page + L.at_k_plane0 + at, mask=keep, other=0).to(tl.int32)
            two = (packed[:, None, :] >> (2 * tl.arange(0, 4)[None, :, None])) & 3
            keys = (tl.reshape(two, (L.tile, 4 * L.quarter)).to(tl.float32) - 1.5).to(raw.dtype)
            s = soften(multiply(operand, tl.trans(keys), L) + bias[:, None], softcap, CAP)
            found = log_add(found, log_sum(s, 1) + noise)
        tl.store(to + tl.sum(tl.where(i == j, pages, 0)), found, mask=valid)
