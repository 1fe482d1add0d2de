"""The kernel that turns a batch into work: units that the other kernels' grids are laid over, without a look from
the host.

A *token unit* is one query token that chooses and reads for itself; a *block unit* is up to 64 queries of a row that
share one list of pages. Which query is what follows `sparse_pages.py`:

    sparse   the tokens of each row's last block are token units, the blocks before it are block units
    dense    a row of one token is a token unit, all tokens of longer rows lie in block units

Grids are as large as the batch could need; a unit behind the count does nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(64)  # queries of a block unit, `sparse_pages.BLOCK`

# `triton.jit` for what steps launch. Triton compiles a kernel once more for each number that is 1 or divisible by 16,
# and each pointer that isn't aligned to 16 bytes: not for those that differ from step to step or layer to layer.
step_jit = triton.jit(
    do_not_specialize=[
        "rows", "first_unit", "window", "sink_pages", "min_pages", "max_pages", "least", "lead", "num_splits",
        "base_split", "fresh_splits", "table_stride", "chosen_stride", "lse_stride", "num_slots", "num_units", "room",
        "tick",
    ],
    do_not_specialize_on_alignment=["dropped", "pages_read", "depth", "counts", "chosen", "lengths"],
)  # fmt: skip


@triton.jit
def counts_of(fresh, SPARSE: tl.constexpr):
    """Token units and block units of rows with `fresh` tokens."""
    if SPARSE:
        blocks = tl.where(fresh > 0, (fresh - 1) // BLOCK, 0)
        return fresh - blocks * BLOCK, blocks
    else:
        blocks = tl.where(fresh > 1, (fresh + BLOCK - 1) // BLOCK, 0)
        return tl.where(fresh == 1, 1, 0), blocks


@step_jit
def plan_units(
    cu_q,  # int32 [rows + 1]
    rows,
    tokens,  # int32 [2 * max_tokens]: row and query of each token unit
    blocks,  # int32 [2 * max_blocks]: row and first query of each block unit
    totals,  # int32 [2]: token units, block units
    ROWS: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """One program a row; each adds up the rows before it."""
    row = tl.program_id(0)
    before_tokens = 0
    before_blocks = 0
    for start in range(0, row, ROWS):
        r = start + tl.arange(0, ROWS)
        seen = r < row
        fresh = tl.load(cu_q + r + 1, mask=seen, other=0) - tl.load(cu_q + r, mask=seen, other=0)
        t, b = counts_of(fresh, SPARSE)
        before_tokens += tl.sum(t)
        before_blocks += tl.sum(b)
    own_tokens, own_blocks = counts_of(tl.load(cu_q + row + 1) - tl.load(cu_q + row), SPARSE)
    i = tl.arange(0, BLOCK)
    to = tokens + 2 * (before_tokens + i)
    tl.store(to, row, mask=i < own_tokens)
    tl.store(to + 1, own_blocks * BLOCK + i, mask=i < own_tokens)
    for start in range(0, own_blocks, BLOCK):
        b = start + i
        to = blocks + 2 * (before_blocks + b)
        tl.store(to, row, mask=b < own_blocks)
        tl.store(to + 1, b * BLOCK, mask=b < own_blocks)
    if row == rows - 1:
        tl.store(totals, before_tokens + own_tokens)
        tl.store(totals + 1, before_blocks + own_blocks)


@triton.jit
def candidates(context, query, window, sink_pages, min_pages, L: tl.constexpr):
    """Pages `[first, last)` that a query chooses from, as `SparseSettings.candidates`; empty: it reads all pages."""
    pages = (context + L.page - 1) // L.page
    before = context + query - window
    last = tl.minimum(tl.where(before < 0, 0, before) // L.page, context // L.page)
    first = tl.minimum(sink_pages, pages)
    return first, tl.where(last - sink_pages > min_pages, last, first)


@triton.jit
def listed_page(i, first, last, chosen, count):
    """Page `i` of a unit's list, ascending: those before the candidates, the `count` chosen ones, those behind."""
    inside = (i >= first) & (i < first + count)
    picked = tl.load(chosen + (i - first), mask=inside, other=0)
    return tl.where(i < first, i, tl.where(inside, picked, i - first - count + last))
