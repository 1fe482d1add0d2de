"""Kernels that decide which pages a unit reads: ranks by share of softmax mass, the best k, the fewest that cover
enough.

No sort and no look from the host: the k-th largest rank, and the rank from which pages cover enough, are found by
building a threshold bit by bit (floats that aren't negative order as their bit patterns do), and lists come out of a
prefix sum in page order. Ties go to the lower page, as in `selection.pages.rank`. One program a unit and kv head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pages import LOG2E
from .score import log_add, log_mass, log_sum
from .units import candidates, step_jit


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def count_from(rank, first, last, bound, N: tl.constexpr):
    """How many of `rank[first .. last]` have a bit pattern of `bound` or more."""
    found = 0
    for start in tl.range(first, last, N, disable_licm=True):
        p = start + tl.arange(0, N)
        bits = tl.where(p < last, bits_of(tl.load(rank + p, mask=p < last, other=0.0)), -1)
        found += tl.sum((bits >= bound).to(tl.int32))
    return found


@triton.jit
def best(rank, first, last, k, to, N: tl.constexpr):
    """Pages of the k best of `rank[first .. last]`, ascending, to `to`. Returns how many, and how to tell them:
    the bit pattern of the k-th, and the first page whose equal of it isn't taken."""
    bound = 0
    for bit in range(31):
        trial = bound | (1 << (30 - bit))
        bound = tl.where(count_from(rank, first, last, trial, N) >= k, trial, bound)
    ties = k - count_from(rank, first, last, bound + 1, N)
    taken = 0
    end = last
    for start in tl.range(first, last, N, disable_licm=True):
        p = start + tl.arange(0, N)
        bits = tl.where(p < last, bits_of(tl.load(rank + p, mask=p < last, other=0.0)), -1)
        equal = (bits == bound).to(tl.int32)
        place = tl.cumsum(equal, 0)
        take = (bits > bound) | ((equal > 0) & (place <= ties))
        end = tl.minimum(end, tl.min(tl.where((equal > 0) & (place > ties), p, last), 0))
        ties -= tl.sum(equal)
        index = taken + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(to + index, p, mask=take)
        taken += tl.sum(take.to(tl.int32))
    return taken, bound, end


@triton.jit
def known_mass(
    known, stats, at, r, valid, num_splits, lead, SAMPLES: tl.constexpr, LEAD: tl.constexpr, L: tl.constexpr
):
    """Log-mass `[R]` of what is read in any case: exact from the splits of a token unit, estimated for a block unit."""
    if SAMPLES > 1:
        return tl.load(known + at * (L.group * SAMPLES) + r, mask=valid, other=0.0)
    else:
        s = tl.arange(0, LEAD)[None, :]
        place = stats + 2 * ((at.to(tl.int64) * num_splits + s) * L.group + r[:, None])
        keep = valid[:, None] & (s < lead)
        peak = tl.load(place, mask=keep, other=float("-inf"))
        total = tl.load(place + 1, mask=keep, other=0.0)
        return tl.where(valid, log_sum(peak + tl.log2(total) / LOG2E, 1), 0.0)


@triton.jit
def share_of(mass, total):
    """Softmax share; 0 where the query isn't finite."""
    share = tl.exp2((mass - total) * LOG2E)
    return tl.where(share == share, share, 0.0)


@triton.jit
def ramp(x, low, high):
    return tl.minimum(tl.maximum((x - low) / (high - low), 0.0), 1.0)


@step_jit
def rank_headers(
    mass, variance, known, stats, rank, lists, lengths, context, units, totals,
    pages_stride, num_splits, lead, first_unit, window, sink_pages, min_pages,
    share, spread_low, spread_high, explained_low, explained_high,
    R: tl.constexpr, SAMPLES: tl.constexpr, LEAD: tl.constexpr, ALL: tl.constexpr, N: tl.constexpr,
    SEARCH: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """From header scores the log-masses, in place, and the pages whose plane 0 is worth reading: grid (units, heads).

    `ALL`: every candidate (scoring by codes), else as many as `selection.cascade` says. `rank` becomes 1 for pages on
    the list, 0 for other candidates.
    """
    unit, head = tl.program_id(0), tl.program_id(1)
    if first_unit + unit >= tl.load(totals + (1 if SAMPLES > 1 else 0)):
        return
    row = tl.load(units + 2 * (first_unit + unit))
    query = tl.load(units + 2 * (first_unit + unit) + 1)
    first, last = candidates(tl.load(context + row), query, window, sink_pages, min_pages, L)
    at = unit * L.heads + head
    if first == last:
        tl.store(lengths + at, 0)
        return
    r = tl.arange(0, R)
    valid = r < L.group * SAMPLES
    rows = (at * (L.group * SAMPLES) + r).to(tl.int64)[:, None] * pages_stride
    log_page = tl.log2(tl.full((1, 1), L.page, tl.float32)) / LOG2E
    total = known_mass(known, stats, at, r, valid, num_splits, lead, SAMPLES, LEAD, L)
    sum_a = tl.zeros((R,), tl.float32)
    sum_squares = tl.zeros((R,), tl.float32)
    sum_v = tl.zeros((R,), tl.float32)
    for start in tl.range(first, last, N, disable_licm=True):
        p = start + tl.arange(0, N)
        keep = valid[:, None] & (p < last)[None, :]
        a = tl.load(mass + rows + p[None, :], mask=keep, other=0.0)
        v = tl.load(variance + rows + p[None, :], mask=keep, other=0.0)
        sum_a += tl.sum(a, 1)
        sum_squares += tl.sum(a * a, 1)
        sum_v += tl.sum(v, 1)
        own = tl.where((p < last)[None, :], log_mass(a, v, log_page), float("-inf"))
        tl.store(mass + rows + p[None, :], own, mask=keep)
        total = log_add(total, log_sum(own, 1))
    tl.debug_barrier()
    n = (last - first).to(tl.float32)
    wanted = last - first
    if not ALL:
        unexplained = sum_v / n / 0.7  # `selection.pages.VARIANCE_FACTOR`
        between = tl.maximum(sum_squares / n - (sum_a / n) * (sum_a / n), 0.0)
        whole = between + unexplained
        explained = tl.min(tl.where(valid & (whole > 0), between / tl.where(whole > 0, whole, 1.0), 1.0), 0)
        spread = tl.sqrt(tl.sum(tl.where(valid, unexplained, 0.0), 0) / (L.group * SAMPLES))
        blind = ramp(spread, spread_low, spread_high) * ramp(-explained, -explained_high, -explained_low)
        blind = tl.where(blind == blind, blind, 1.0)
        depth = share + (1.0 - share) * blind
        wanted = tl.minimum(tl.ceil(depth * n - 1e-3).to(tl.int32), wanted)
    ranks = rank + at.to(tl.int64) * pages_stride
    for start in tl.range(first, last, N, disable_licm=True):
        p = start + tl.arange(0, N)
        keep = valid[:, None] & (p < last)[None, :]
        own = tl.load(mass + rows + p[None, :], mask=keep, other=float("-inf"))
        tl.store(ranks + p, tl.sum(share_of(own, total[:, None]), 0), mask=p < last)
    tl.debug_barrier()
    count, bound, end = best(ranks, first, last, wanted, lists + at.to(tl.int64) * pages_stride, SEARCH)
    tl.debug_barrier()
    for start in tl.range(first, last, SEARCH, disable_licm=True):
        p = start + tl.arange(0, SEARCH)
        bits = bits_of(tl.load(ranks + p, mask=p < last, other=0.0))
        deep = (bits > bound) | ((bits == bound) & (p < end))
        tl.store(ranks + p, deep.to(tl.float32), mask=p < last)
    tl.store(lengths + at, count)


@triton.jit
def enough(
    pages, n, ranks, shares, pages_stride, base, bound, before, least, most, coverage, N: tl.constexpr, G: tl.constexpr,
    L: tl.constexpr,
):  # fmt: skip
    """Whether those of `pages[0 .. n]` ranked above `bound`, and its equals among the first `before`, are enough.

    Returns that, their number, and the share `[G]` that they and `base` cover.
    """
    covered = base
    count = 0
    g = tl.arange(0, G)
    for start in tl.range(0, n, N, disable_licm=True):
        i = start + tl.arange(0, N)
        p = tl.load(pages + i, mask=i < n, other=0)
        bits = tl.where(i < n, bits_of(tl.load(ranks + p, mask=i < n, other=0.0)), -1)
        take = (bits > bound) | ((bits == bound) & (i < before))
        count += tl.sum(take.to(tl.int32))
        keep = take[None, :] & (g < L.group)[:, None]
        covered += tl.sum(tl.load(shares + g[:, None] * pages_stride + p[None, :], mask=keep, other=0.0), 1)
    worst = tl.min(tl.where(g < L.group, covered, float("inf")), 0)
    return (count >= least) & ((worst >= coverage) | (count >= most)), count, covered


@step_jit
def choose_pages(
    mass, variance, codes, known, stats, rank, shares, lists, chosen, lengths, dropped, pages_read, depth, handed, cu_q,
    context, units, totals, pages_stride, chosen_stride, handed_stride, num_splits, lead, first_unit,
    window, sink_pages, min_pages, max_pages, ratio, coverage, least,
    R: tl.constexpr, SAMPLES: tl.constexpr, LEAD: tl.constexpr, JOIN: tl.constexpr, N: tl.constexpr,
    SEARCH: tl.constexpr, HAND_OUT: tl.constexpr, HAS_DROPPED: tl.constexpr, HAS_READ: tl.constexpr,
    HAS_DEPTH: tl.constexpr, G: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """The pages to read, ascending, to `chosen` and their number to `lengths`: grid (units, heads).

    `JOIN`: `mass` holds log-masses, `codes` those by plane 0 where `rank` is 1 (`selection.cascade.join`); else `mass`
    and `variance` are header scores. `least`: floor of a coverage selection, or -1: take as many as there may be.
    """
    unit, head = tl.program_id(0), tl.program_id(1)
    if first_unit + unit >= tl.load(totals + (1 if SAMPLES > 1 else 0)):
        return
    row = tl.load(units + 2 * (first_unit + unit))
    query = tl.load(units + 2 * (first_unit + unit) + 1)
    length = tl.load(context + row)
    first, last = candidates(length, query, window, sink_pages, min_pages, L)
    at = unit * L.heads + head
    num_pages = (length + L.page - 1) // L.page
    taken = 0
    lost = 0.0
    probed = 0.0
    if JOIN:  # until here `lengths` says how many pages were probed
        probed = tl.load(lengths + at).to(tl.float32) / tl.maximum(last - first, 1)
    if last > first:
        r = tl.arange(0, R)
        valid = r < L.group * SAMPLES
        rows = (at * (L.group * SAMPLES) + r).to(tl.int64)[:, None] * pages_stride
        ranks = rank + at.to(tl.int64) * pages_stride
        own_shares = shares + (at * L.group).to(tl.int64) * pages_stride
        log_page = tl.log2(tl.full((1, 1), L.page, tl.float32)) / LOG2E
        base = known_mass(known, stats, at, r, valid, num_splits, lead, SAMPLES, LEAD, L)
        bias = tl.zeros((R,), tl.float32)
        if JOIN:
            found = tl.full((R,), float("-inf"), tl.float32)
            claimed = tl.full((R,), float("-inf"), tl.float32)
            for start in tl.range(first, last, N, disable_licm=True):
                p = start + tl.arange(0, N)
                deep = tl.load(ranks + p, mask=p < last, other=0.0) > 0
                keep = valid[:, None] & deep[None, :]
                by_codes = tl.load(codes + rows + p[None, :], mask=keep, other=float("-inf"))
                found = log_add(found, log_sum(by_codes, 1))
                by_headers = tl.load(mass + rows + p[None, :], mask=keep, other=float("-inf"))
                claimed = log_add(claimed, log_sum(by_headers, 1))
            more = found - claimed
            bias = tl.where((more > 0) & (more < float("inf")), more, 0.0)
        total = base
        for start in tl.range(first, last, N, disable_licm=True):
            p = start + tl.arange(0, N)
            keep = valid[:, None] & (p < last)[None, :]
            own = tl.load(mass + rows + p[None, :], mask=keep, other=float("-inf"))
            if JOIN:
                deep = (tl.load(ranks + p, mask=p < last, other=0.0) > 0)[None, :]
                by_codes = tl.load(codes + rows + p[None, :], mask=keep & deep, other=float("-inf"))
                own = tl.where(deep, by_codes, own + bias[:, None])
            else:
                own = log_mass(own, tl.load(variance + rows + p[None, :], mask=keep, other=0.0), log_page)
            tl.store(mass + rows + p[None, :], own, mask=keep)
            total = log_add(total, log_sum(own, 1))
        tl.debug_barrier()
        known_share = tl.where(valid, share_of(base, total), 0.0)
        g = tl.arange(0, G)
        for start in tl.range(first, last, N, disable_licm=True):
            p = start + tl.arange(0, N)
            keep = valid[:, None] & (p < last)[None, :]
            own = tl.where(keep, share_of(tl.load(mass + rows + p[None, :], mask=keep, other=0.0), total[:, None]), 0.0)
            tl.store(ranks + p, tl.sum(own, 0), mask=p < last)
            mean = own
            if SAMPLES > 1:
                mean = tl.sum(tl.reshape(own, (G, SAMPLES, N)), 1) / SAMPLES
            to = own_shares + g[:, None] * pages_stride + p[None, :]
            tl.store(to, mean, mask=(g < L.group)[:, None] & (p < last)[None, :])
        if SAMPLES > 1:
            known_share = tl.sum(tl.reshape(known_share, (G, SAMPLES)), 1) / SAMPLES
        tl.debug_barrier()

        most = max_pages
        if ratio > 0:
            most = tl.ceil(ratio * num_pages - 1e-3).to(tl.int32)
        most = tl.minimum(most, last - first)
        floor = tl.where(least < 0, most, tl.minimum(least, most))  # `least` itself may be the constant 1
        pages = lists + at.to(tl.int64) * pages_stride
        n, _, _ = best(ranks, first, last, most, pages, SEARCH)
        tl.debug_barrier()
        covered = known_share
        number = 0
        bound = 0  # the highest rank that is low enough
        for bit in range(31):
            trial = bound | (1 << (30 - bit))
            done, number, covered = enough(
                pages, n, ranks, own_shares, pages_stride, known_share, trial, n, floor, most, coverage, SEARCH, G, L
            )  # fmt: skip
            bound = tl.where(done, trial, bound)
        before = 0  # of its equals, the fewest
        for bit in range(24):
            trial = before | (1 << (23 - bit))
            done, number, covered = enough(
                pages, n, ranks, own_shares, pages_stride, known_share, bound, trial, floor, most, coverage, SEARCH,
                G, L
            )  # fmt: skip
            before = tl.where(done, before, trial)
        before += 1
        done, number, covered = enough(
            pages, n, ranks, own_shares, pages_stride, known_share, bound, before, floor, most, coverage, SEARCH, G, L
        )  # fmt: skip
        for start in tl.range(0, n, SEARCH, disable_licm=True):
            i = start + tl.arange(0, SEARCH)
            p = tl.load(pages + i, mask=i < n, other=0)
            bits = tl.where(i < n, bits_of(tl.load(ranks + p, mask=i < n, other=0.0)), -1)
            take = (bits > bound) | ((bits == bound) & (i < before))
            index = taken + tl.cumsum(take.to(tl.int32), 0) - 1
            tl.store(chosen + at.to(tl.int64) * chosen_stride + index, p, mask=take)
            taken += tl.sum(take.to(tl.int32))
        lost = tl.sum(tl.where(g < L.group, tl.maximum(1.0 - covered, 0.0), 0.0), 0) / L.group
    tl.store(lengths + at, taken)
    start = tl.load(cu_q + row) + query
    t = tl.arange(0, 64 if SAMPLES > 1 else 1)
    at_token = (start + t) * L.heads + head
    if HAS_DROPPED:
        tl.store(dropped + at_token, lost + t * 0.0)
    if HAS_DEPTH:
        tl.store(depth + at_token, probed + t * 0.0)
    if HAS_READ:
        tl.store(pages_read + at_token, num_pages - (last - first) + taken + t * 0)
    if HAND_OUT:
        tl.debug_barrier()
        for j in tl.range(0, handed_stride, SEARCH, disable_licm=True):
            c = j + tl.arange(0, SEARCH)
            p = tl.load(chosen + at.to(tl.int64) * chosen_stride + c, mask=c < taken, other=-1)
            place = (start * L.heads + head).to(tl.int64) * handed_stride + c
            tl.store(handed + place, p, mask=c < handed_stride)
