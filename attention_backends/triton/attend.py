"""Kernels that attend: splits of a page list for single queries, their merge, and blocks of queries over a page list.

Online softmax throughout (FlashAttention, arXiv:2205.14135), splits joined by log-sum-exp (flash-decoding). Rotated
values of sealed pages and plain ones of open pages and fresh tokens are summed apart, and the rotation is undone once,
on the sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pages import (
    LOG2E,
    key_channels,
    natural_channels,
    online_softmax,
    page_at,
    place_of,
    plain_scores,
    plain_values,
    real,
    rotate,
    sealed_scores,
    sealed_values,
    soften,
    to_natural,
    value_channels,
)
from .units import BLOCK, candidates, listed_page, step_jit


@triton.jit
def load_queries(q, token, head, valid, q_stride, L: tl.constexpr):
    """`[M, 4 * quarter]` in key order, of query heads `head` `[M]` of tokens `token`."""
    channel = key_channels(L)
    at = token.to(tl.int64) * q_stride + head * L.dim
    return tl.load(q + at[:, None] + channel[None, :], mask=valid[:, None] & real(channel[None, :], L), other=0.0)


@triton.jit
def add_plain(
    q, keys, values, token_stride, t0, count, hidden_after, channel, scale, softcap, peak, total, sums,
    CAP: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Attends tokens `t0 ..` below `count` in the model's dtype; row m sees those up to `hidden_after[m]`."""
    t = t0 + tl.arange(0, L.tile)
    s = soften(plain_scores(q, keys, token_stride, t0, count, L) * scale, softcap, CAP)
    s = tl.where((t[None, :] < count) & (t[None, :] <= hidden_after[:, None]), s, float("-inf"))
    weights, keep, peak, total = online_softmax(s, peak, total)
    sums = sums * keep[:, None] + plain_values(weights, values, token_stride, t0, count, channel, L)
    return keep, peak, total, sums


@triton.jit
def add_sealed(
    q, page, head, t0, count, scale, softcap, peak, total, sums, FOLD: tl.constexpr, CAP: tl.constexpr, L: tl.constexpr
):  # fmt: skip
    """Attends tokens `t0 ..` below `count` of a sealed page."""
    t = t0 + tl.arange(0, L.tile)
    s = soften(sealed_scores(q, page, head, t0, FOLD, L) * scale, softcap, CAP)
    s = tl.where(t[None, :] < count, s, float("-inf"))
    weights, keep, peak, total = online_softmax(s, peak, total)
    return keep, peak, total, sums * keep[:, None] + sealed_values(weights, q.dtype, page, head, t0, L)


@step_jit
def attend_split(
    q, k, v, stats, sums, cu_q, context, table, open_slot, payload_slot, payload, host, home, open_pages, units, totals,
    chosen, lengths, q_stride, kv_stride, table_stride, payload_stride, host_stride, open_stride, chosen_stride,
    first_unit, window, sink_pages, min_pages, fresh_splits, base_split, num_splits, scale, softcap,
    M: tl.constexpr, SPLIT: tl.constexpr, FRESH: tl.constexpr, CHOSEN: tl.constexpr,
    HAS_FRESH: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_HOST: tl.constexpr, CAP: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """One split of one token unit's list for one kv head: grid (units, heads, splits).

    `CHOSEN`: up to SPLIT of the chosen pages; else the first `fresh_splits` programs take FRESH of the row's own tokens
    each, the others SPLIT of the pages that are read in any case. Writes peak and total to `stats` `[unit, head, split,
    group, 2]` and sums to `sums` `[unit, head, split, group, 1 + rotate, head_dim]`, all float32.
    """
    unit, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    PAGE: tl.constexpr = L.page
    TILE: tl.constexpr = L.tile
    if first_unit + unit >= tl.load(totals):
        return
    row = tl.load(units + 2 * (first_unit + unit))
    query = tl.load(units + 2 * (first_unit + unit) + 1)
    length = tl.load(context + row)
    first, last = candidates(length, query, window, sink_pages, min_pages, L)
    start = tl.load(cu_q + row)
    m = tl.arange(0, M)
    x = load_queries(q, start + query + m * 0, head * L.group + m, m < L.group, q_stride, L)
    peak = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    plain = tl.zeros((M, 2 * L.half), tl.float32)
    turned = tl.zeros((M, 2 * L.half), tl.float32)
    channel = value_channels(L)

    if CHOSEN:
        count = tl.load(lengths + unit * L.heads + head)
        begin = split * SPLIT
    else:
        count = (length + L.page - 1) // L.page - (last - first)
        begin = (split - fresh_splits) * SPLIT
        if HAS_FRESH:
            t_begin, t_end = split * FRESH, tl.minimum((split + 1) * FRESH, query + 1)
            t_end = tl.where(split < fresh_splits, t_end, t_begin)
            at = start.to(tl.int64) * kv_stride + head * L.dim
            for t in tl.range(t_begin, t_end, TILE, disable_licm=True):
                _, peak, total, plain = add_plain(
                    x, k + at, v + at, kv_stride, t, t_end, m * 0 + query, channel, scale, softcap, peak,
                    total, plain, CAP, L,
                )  # fmt: skip
    # All pages' places first, in one go: a chain of dependent loads for each would cost more than its data.
    i = begin + tl.arange(0, SPLIT)
    listed = (i >= 0) & (i < count)
    if CHOSEN:
        pages = tl.load(chosen + (unit * L.heads + head).to(tl.int64) * chosen_stride + i, mask=listed, other=0)
    else:
        pages = tl.where(i >= first, i + last - first, i)
    blocks = tl.load(table + row.to(tl.int64) * table_stride + pages, mask=listed, other=0)
    opened = tl.load(open_slot + blocks, mask=listed, other=-1)
    places = place_of(blocks, listed, payload_slot, home, HAS_SLOTS, HAS_HOST)
    end = tl.minimum(begin + SPLIT, count)
    for j in tl.range(tl.where(begin < 0, end, begin), end, disable_licm=True):
        mine = i == j
        left = length - tl.sum(tl.where(mine, pages, 0)) * L.page
        at_open = tl.sum(tl.where(mine, opened, 0)).to(tl.int64)
        page = page_at(tl.sum(tl.where(mine, places, 0)), payload, payload_stride, host, host_stride, HAS_HOST)
        for t0 in tl.range(0, PAGE, TILE, disable_licm=True):
            if at_open >= 0:
                own = open_pages + at_open * open_stride + head * (L.page * L.dim)
                keep, peak, total, plain = add_plain(
                    x, own, own + L.heads * L.page * L.dim, L.dim, t0, left, m * 0 + L.page, channel, scale, softcap,
                    peak, total, plain, CAP, L,
                )  # fmt: skip
                turned = turned * keep[:, None]
            elif L.k_bits == 16:
                own = page.to(tl.pointer_type(q.dtype.element_ty)) + head * (L.page * L.dim)
                keep, peak, total, plain = add_plain(
                    x, own, own + L.heads * L.page * L.dim, L.dim, t0, left, m * 0 + L.page, channel, scale, softcap,
                    peak, total, plain, CAP, L,
                )  # fmt: skip
            elif L.rotate:
                keep, peak, total, turned = add_sealed(
                    x, page, head, t0, left, scale, softcap, peak, total, turned, True, CAP, L
                )
                plain = plain * keep[:, None]
            else:
                keep, peak, total, plain = add_sealed(
                    x, page, head, t0, left, scale, softcap, peak, total, plain, True, CAP, L
                )

    at = ((unit * L.heads + head).to(tl.int64) * num_splits + base_split + split) * L.group + m
    tl.store(stats + 2 * at, peak, mask=m < L.group)
    tl.store(stats + 2 * at + 1, total, mask=m < L.group)
    to = sums + at[:, None] * (L.dim * (1 + L.rotate)) + channel[None, :]
    keep = (m[:, None] < L.group) & real(channel[None, :], L)
    tl.store(to, plain, mask=keep)
    if L.rotate:
        tl.store(to + L.dim, turned, mask=keep)


@step_jit
def merge_splits(
    out, lse, stats, sums, cu_q, units, totals, out_stride, lse_stride, first_unit, num_splits,
    SPLITS: tl.constexpr, HAS_LSE: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Joins the splits of one query head of a token unit: grid (units, query heads). SPLITS: `num_splits` padded."""
    unit, q_head = tl.program_id(0), tl.program_id(1)
    if first_unit + unit >= tl.load(totals):
        return
    row = tl.load(units + 2 * (first_unit + unit))
    token = tl.load(cu_q + row) + tl.load(units + 2 * (first_unit + unit) + 1)
    base = (unit * L.heads + q_head // L.group).to(tl.int64) * num_splits * L.group + q_head % L.group
    i = tl.arange(0, SPLITS)
    used = i < num_splits
    peaks = tl.load(stats + 2 * (base + i * L.group), mask=used, other=float("-inf"))
    parts = tl.load(stats + 2 * (base + i * L.group) + 1, mask=used, other=0.0)
    peak = tl.max(peaks, 0)
    weights = tl.exp2((peaks - tl.where(peak == float("-inf"), 0.0, peak)) * LOG2E)
    total = tl.sum(weights * parts, 0)
    channel = natural_channels(L)
    plain = tl.zeros((2 * L.half,), tl.float32)
    turned = tl.zeros((2 * L.half,), tl.float32)
    for s in range(num_splits):
        weight = tl.sum(tl.where(i == s, weights, 0.0), 0)[None]
        at = sums + (base + s * L.group) * (L.dim * (1 + L.rotate)) + channel
        read = real(channel, L) & (weight != 0.0)  # of a split that saw nothing, nothing counts
        plain += weight * tl.load(at, mask=read, other=0.0)
        if L.rotate:
            turned += weight * tl.load(at + L.dim, mask=read, other=0.0)
    if L.rotate:
        plain += tl.reshape(rotate(turned[None, :], 1, L), (2 * L.half,))
    result = plain * tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))
    to = out + token.to(tl.int64) * out_stride + q_head * L.dim + channel
    tl.store(to, result.to(out.dtype.element_ty), mask=real(channel, L))
    if HAS_LSE:
        tl.store(lse + token.to(tl.int64) * lse_stride + q_head, peak + tl.log2(total) / LOG2E)


@step_jit
def attend_blocks(
    q, k, v, out, lse, cu_q, context, table, open_slot, payload_slot, payload, host, home, open_pages, units, totals,
    chosen, lengths, q_stride, kv_stride, out_stride, lse_stride, table_stride, payload_stride, host_stride,
    open_stride, chosen_stride, first_unit, window, sink_pages, min_pages, scale, softcap,
    M: tl.constexpr, CHOSEN: tl.constexpr, HAS_FRESH: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_HOST: tl.constexpr,
    HAS_LSE: tl.constexpr, CAP: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """M of a block unit's rows (queries times heads of the group) over its list: grid (units, heads, parts).

    Sealed pages first, then the rotation is undone, then open pages, then the row's own tokens up to each query.
    """
    unit, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    PAGE: tl.constexpr = L.page
    TILE: tl.constexpr = L.tile
    if first_unit + unit >= tl.load(totals + 1):
        return
    row = tl.load(units + 2 * (first_unit + unit))
    begin = tl.load(units + 2 * (first_unit + unit) + 1)
    length = tl.load(context + row)
    start = tl.load(cu_q + row)
    stop = tl.minimum(begin + BLOCK, tl.load(cu_q + row + 1) - start)
    first, last = candidates(length, begin, window, sink_pages, min_pages, L)
    count = 0
    if CHOSEN:
        count = tl.load(lengths + unit * L.heads + head)
    pages = (length + L.page - 1) // L.page - (last - first) + count
    picked = chosen + (unit * L.heads + head).to(tl.int64) * chosen_stride
    m = part * M + tl.arange(0, M)
    query = begin + m // L.group
    valid = (m < BLOCK * L.group) & (query < stop)
    x = load_queries(q, start + query, head * L.group + m % L.group, valid, q_stride, L)
    peak = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    sums = tl.zeros((M, 2 * L.half), tl.float32)
    places = table + row.to(tl.int64) * table_stride

    open_first, open_last = pages, 0  # where the open pages of the list lie
    if L.k_bits == 16:
        open_first, open_last = 0, pages
    else:
        for i in tl.range(0, pages, disable_licm=True):
            p = listed_page(i, first, last, picked, count)
            block = tl.load(places + p)
            if tl.load(open_slot + block) < 0:
                place = place_of(block, block >= 0, payload_slot, home, HAS_SLOTS, HAS_HOST)
                page = page_at(place, payload, payload_stride, host, host_stride, HAS_HOST)
                for t0 in tl.range(0, PAGE, TILE, disable_licm=True):
                    keep, peak, total, sums = add_sealed(
                        x, page, head, t0, length - p * L.page, scale, softcap, peak, total, sums, False, CAP, L
                    )  # fmt: skip
            else:
                open_first, open_last = tl.minimum(open_first, i), i + 1
        sums = to_natural(sums, M, L)
        if L.rotate:
            sums = rotate(sums, M, L)
    channel = natural_channels(L)
    for i in tl.range(open_first, open_last, disable_licm=True):
        p = listed_page(i, first, last, picked, count)
        block = tl.load(places + p)
        slot = tl.load(open_slot + block)
        at = open_pages + slot.to(tl.int64) * open_stride
        if L.k_bits == 16:
            place = place_of(block, block >= 0, payload_slot, home, HAS_SLOTS, HAS_HOST)
            page = page_at(place, payload, payload_stride, host, host_stride, HAS_HOST)
            at = tl.where(slot < 0, page.to(tl.pointer_type(q.dtype.element_ty)), at)
        if L.k_bits == 16 or slot >= 0:
            at += head * (L.page * L.dim)
            for t0 in tl.range(0, PAGE, TILE, disable_licm=True):
                keep, peak, total, sums = add_plain(
                    x, at, at + L.heads * L.page * L.dim, L.dim, t0, length - p * L.page, m * 0 + L.page, channel,
                    scale, softcap, peak, total, sums, CAP, L,
                )  # fmt: skip
    if HAS_FRESH:
        at = start.to(tl.int64) * kv_stride + head * L.dim
        end = tl.minimum(begin + ((part + 1) * M - 1) // L.group + 1, stop)  # behind the last query of this part
        for t0 in tl.range(0, end, TILE, disable_licm=True):
            keep, peak, total, sums = add_plain(
                x, k + at, v + at, kv_stride, t0, end, query, channel, scale, softcap, peak, total, sums, CAP, L
            )  # fmt: skip
    result = sums * tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    token = (start + query).to(tl.int64)
    q_head = head * L.group + m % L.group
    to = out + (token * out_stride + q_head * L.dim)[:, None] + channel[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=valid[:, None] & real(channel[None, :], L))
    if HAS_LSE:
        tl.store(lse + token * lse_stride + q_head, peak + tl.log2(total) / LOG2E, mask=valid)
