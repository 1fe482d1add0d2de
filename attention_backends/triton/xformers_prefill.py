"""Prefill blocks by xformers: sliding window and listed pages attended apart, in the model's dtype, and joined.

For every block unit (64 queries that share a list of pages) its tokens are gathered from pages into plain buffers:

    local    the `window` + 64 newest tokens up to the block's last query; query i sees `window` of them before itself
             and itself: `memory_efficient_attention_partial` with `LocalAttentionFromBottomRightMask`
    listed   for each kv head sinks and chosen pages, then the *edge*: what lies between the block's first page of the
             window and the sliding window's begin. Query i sees i tokens more of it than query 0: causal, aligned at
             the end, with lengths that only the device knows (`BlockDiagonalCausalWithOffsetPaddedKeysMask`)

and the two are joined by `merge_attentions` (log-sum-exp). Every key that `attend_blocks` reads is counted once.
A block whose first query has fewer than `window` tokens before it is all edge. Selection, single rows and dense steps
stay with the other kernels. Values are gathered in rotated space, and the joined output is rotated back once.

Needs CUDA and 16-bit dtypes (xformers' partial attention is FlashAttention), and no logit soft cap.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from .pages import (
    key_channels,
    key_codes,
    natural_channels,
    page_at,
    place_of,
    real,
    restored,
    rotate,
    rounded,
    value_channels,
    value_codes,
)
from .units import BLOCK, candidates, step_jit

QUERIES = int(BLOCK.value)
BUFFER_BYTES = 128 << 20  # gathered tokens of the units that are attended at once
TILE = 32  # tokens that a program gathers at once

Attended = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Functions:
    """What is taken from xformers, with its layouts; U units, S sequences of 64 queries, G query heads a kv head.

    local: `(q [U, 64, heads, G, D], k, v [U, N, heads, G, D] (G by stride 0), scale, window)`: query i sees the last
        `N - 63 + i` keys, and of those the last `window + 1`. Returns out like q and lse float32 `[U, heads, G, 64]`.
    listed: `(q [1, S * 64, 1, G, D], k, v [1, S * N, 1, G, D], scale, lengths int32 [S])`: query i of a sequence sees
        the first `lengths - 63 + i` of its N keys; lse `[1, 1, G, S * 64]`. Where it sees none, lse may be anything.
    merge: `([out], [lse])` as `local` returns them; both float32.
    """

    local: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, int], Attended]
    listed: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, torch.Tensor], Attended]
    merge: Callable[[list[torch.Tensor], list[torch.Tensor]], Attended]


@functools.cache
def xformers_functions() -> Functions:
    """Raises ImportError without xformers."""
    from xformers.ops import fmha

    bias, partial = fmha.attn_bias, fmha.memory_efficient_attention_partial

    @functools.lru_cache(maxsize=64)
    def padded(sequences: int, room: int, device: torch.device) -> Any:
        mask = bias.BlockDiagonalCausalWithOffsetPaddedKeysMask
        return mask.from_seqlens([QUERIES] * sequences, room, [room] * sequences, device=device)

    def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int) -> Attended:
        return partial(q, k, v, bias.LocalAttentionFromBottomRightMask(window, 0), scale=scale)

    def listed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, lengths: torch.Tensor) -> Attended:
        mask = padded(len(lengths), k.shape[1] // len(lengths), q.device)
        return partial(q, k, v, replace(mask, k_seqinfo=replace(mask.k_seqinfo, seqlen=lengths)), scale=scale)

    def merge(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> Attended:
        return fmha.merge_attentions(outs, lses, output_dtype=torch.float32)

    return Functions(local, listed, merge)


@functools.cache
def unavailable(dtype: torch.dtype, head_dim: int, group: int, softcap: float = 0.0) -> str | None:
    """Why xformers can't attend heads like these on this machine; None: it can. Found once, by running a tiny op."""
    if softcap:
        return f"this model caps its logits (at {softcap:g}), which xformers doesn't"
    if importlib.util.find_spec("xformers") is None:
        return "xformers is not installed (pip install 'vllm-ktx[xformers]')"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device, and xformers' attention runs nowhere else"
    try:
        return None if _attends(xformers_functions(), dtype, head_dim, group) else "a tiny attention came out wrong"
    except Exception as error:  # of xformers' import, its dispatch, the launch: all mean the same here
        return f"a tiny attention failed: {type(error).__name__}: {str(error).strip() or 'no message'}"


def _attends(functions: Functions, dtype: torch.dtype, dim: int, group: int, device: str = "cuda") -> bool:
    """Whether attention of zeros over ones is ones, and knows how many there were."""
    zeros = torch.zeros(1, QUERIES, 1, group, dim, dtype=dtype, device=device)
    ones = torch.ones(1, 2 * QUERIES, 1, 1, dim, dtype=dtype, device=device).expand(-1, -1, -1, group, -1)
    lengths = torch.full((1,), QUERIES, dtype=torch.int32, device=device)
    parts = [functions.local(zeros, ones, ones, 1.0, 15), functions.listed(zeros, ones, ones, 1.0, lengths)]
    out, lse = functions.merge([out for out, _ in parts], [lse for _, lse in parts])
    want = (17.0 + torch.arange(QUERIES, device=device)).log().expand_as(lse)
    return torch.allclose(out, torch.ones_like(out)) and torch.allclose(lse, want, atol=1e-3)


class XformersPrefill:
    """Attends the block units of sparse steps for `launch._Step`, which chose their pages."""

    def __init__(self, functions: Functions | None = None) -> None:
        """`functions`: None takes xformers'. Raises ImportError if it isn't there."""
        self.functions = functions or xformers_functions()

    def fits(self, step: Any) -> bool:
        """Whether the step has blocks that choose, and contexts that can be longer than the window (else every block
        would be all edge)."""
        longer = step.settings.window < step.pages * step.layout.page_size
        return longer and not step.dense and step.k is not None and step.softcap == 0

    def attend(self, step: Any, first: int, units: int, chosen: torch.Tensor, lengths: torch.Tensor) -> None:
        """Blocks `first .. first + units` over `chosen` int32 `[units, heads, cap]`, of which `lengths` count."""
        shape, window = step.L, step.settings.window
        near, room = window + QUERIES, self._room(step)
        token = 2 * shape.heads * shape.dim * step.q.element_size()
        wave = max(1, BUFFER_BYTES // (token * (near + room)))
        for begin in range(0, units, wave):
            part = slice(begin, min(begin + wave, units))
            self._attend(step, first + begin, part.stop - begin, chosen[part], lengths[part], near, room)

    @staticmethod
    def _room(step: Any) -> int:
        """Most tokens of a list: sinks, chosen pages and edge, or all that a block reads."""
        size, settings = step.layout.page_size, step.settings
        pages = settings.sink_pages(size) + max(step.cap, settings.min_pages) + 1
        longest = max(0, step.max_query - settings.window)  # of a chunk beyond its window
        return max(pages * size + longest, settings.window) + QUERIES

    def _attend(
        self, step: Any, first: int, units: int, chosen: torch.Tensor, lengths: torch.Tensor, near: int, room: int
    ) -> None:
        shape, dtype, functions = step.L, step.q.dtype, self.functions
        heads, group, dim, size = shape.heads, shape.group, shape.dim, step.layout.page_size
        local = [step._new(units, near, heads, 1, dim, dtype=dtype) for _ in range(2)]
        listed = [step._new(units, heads, room, 1, dim, dtype=dtype) for _ in range(2)]
        counts = step._new(2, units, heads, dtype=torch.int32)
        q = step._new(units, QUERIES, heads, group, dim, dtype=dtype)
        tile = replace(shape, tile=min(shape.tile, TILE))
        for CHOSEN, (keys, values), tokens in ((False, local, near), (True, listed, room)):
            to_head = keys.stride(2) if not CHOSEN else keys.stride(1)
            to_token = keys.stride(1) if not CHOSEN else keys.stride(2)
            step.launch(gather_tokens, (units, heads, tokens // size + 2),
                step.k, step.v, keys, values, counts, step.cu_q, step.context, step.table, step.open_slot,
                step.payload_slot, step.payload, step.host, step.home, step.open_pages, step.blocks, step.totals,
                chosen, lengths, step._kv_stride(), step.table.stride(0), step.payload.stride(0), step.host_stride,
                step.open_pages.stride(0), chosen.stride(1), first, *step.limits, tokens, units, keys.stride(0),
                to_head, to_token, CHOSEN=CHOSEN, HAS_SLOTS=step.payload_slot is not None,
                HAS_HOST=step.host is not None, L=tile, num_warps=8, maxnreg=shape.registers(8),
            )  # fmt: skip
        blocks = (step.cu_q, step.blocks, step.totals)
        step.launch(gather_queries, (units, heads * group), step.q, q, *blocks, step.q.stride(0), first, L=shape)
        k, v = (x.expand(-1, -1, -1, group, -1) for x in local)
        near_out, near_lse = functions.local(q, k, v, step.scale, near - QUERIES)
        # One sequence a unit and kv head.
        asked = q.transpose(1, 2).reshape(1, -1, 1, group, dim)
        k, v = (x.view(1, -1, 1, 1, dim).expand(-1, -1, -1, group, -1) for x in listed)
        far_out, far_lse = functions.listed(asked, k, v, step.scale, counts[0].view(-1))
        far_out = far_out.view(units, heads, QUERIES, group, dim).transpose(1, 2)
        far_lse = far_lse[..., : units * heads * QUERIES].view(group, units, heads, QUERIES).permute(1, 2, 0, 3)
        seen = counts[0, :, :, None, None] + torch.arange(1 - QUERIES, 1, device=q.device)
        far_lse = far_lse.masked_fill(seen <= 0, float("-inf"))
        near_lse = near_lse[..., :QUERIES].masked_fill(counts[1, :, :, None, None] < 0, float("-inf"))
        out, lse = functions.merge([near_out, far_out], [near_lse, far_lse])
        step.launch(scatter_blocks, (units, heads * group),
            out, lse, step.out, step.lse, *blocks, step.out.stride(0), 0 if step.lse is None else step.lse.stride(0),
            first, HAS_LSE=step.lse is not None, L=shape, num_warps=8,
        )  # fmt: skip


@triton.jit
def store_values(x, values, at, channel, keep, L: tl.constexpr):
    to = values + at[:, None] + channel[None, :]
    tl.store(to, x.to(values.dtype.element_ty), mask=keep[:, None] & real(channel[None, :], L))


@triton.jit
def move_plain(source_k, source_v, from_, keys, values, at, keep, L: tl.constexpr):
    """Tokens in the model's dtype at elements `from_` `[tile]` to `at`; values are rotated on the way."""
    channel = natural_channels(L)
    mask = keep[:, None] & real(channel[None, :], L)
    x = tl.load(source_k + from_[:, None] + channel[None, :], mask=mask, other=0.0)
    store_values(x, keys, at, channel, keep, L)
    y = tl.load(source_v + from_[:, None] + channel[None, :], mask=mask, other=0.0)
    if L.rotate:
        y = rotate(y.to(tl.float32), L.tile, L)
    store_values(y, values, at, channel, keep, L)


@triton.jit
def move_sealed(page, head, t0, keys, values, at, keep, L: tl.constexpr):
    """Tokens `t0 ..` of a sealed page, restored; values stay rotated."""
    x = restored(key_codes(page, head, t0, L), page, head, t0, True, L)
    store_values(rounded(x, keys.dtype.element_ty), keys, at, key_channels(L), keep, L)
    y = restored(value_codes(page, head, t0, L), page, head, t0, False, L)
    store_values(rounded(y, values.dtype.element_ty), values, at, value_channels(L), keep, L)


@step_jit
def gather_tokens(
    k, v, keys, values, counts, cu_q, context, table, open_slot, payload_slot, payload, host, home, open_pages, units,
    totals, chosen, lengths, kv_stride, table_stride, payload_stride, host_stride, open_stride, chosen_stride,
    first_unit, window, sink_pages, min_pages, room, num_units, unit_stride, head_stride, token_stride,
    CHOSEN: tl.constexpr, HAS_SLOTS: tl.constexpr, HAS_HOST: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """One page's worth of a block unit's tokens for one kv head: grid (units, heads, pages of the buffer).

    `CHOSEN`: of its list, with its length to `counts[0]` and the sliding window's first position (below 0: all is
    listed) to `counts[1]`; else the newest `room` tokens, zeros before the first. `room`: tokens of a unit's buffer.
    """
    unit, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    PAGE: tl.constexpr = L.page
    TILE: tl.constexpr = L.tile
    mine = unit * L.heads + head
    real_unit = first_unit + unit < tl.load(totals + 1)
    index = tl.where(real_unit, first_unit + unit, 0)
    row = tl.where(real_unit, tl.load(units + 2 * index), 0)
    begin = tl.where(real_unit, tl.load(units + 2 * index + 1), 0)
    length = tl.load(context + row)
    start = tl.load(cu_q + row)
    first, last = candidates(length, begin, window, sink_pages, min_pages, L)
    edge = length + begin - window
    if CHOSEN:
        chooses = last > first
        prefix = tl.where(chooses, first + tl.load(lengths + mine), 0)
        behind = tl.where(chooses, last, 0)
        count = tl.where(edge < 0, length + begin + BLOCK, (prefix - behind) * PAGE + edge + BLOCK - 1)
        count = tl.where(real_unit, count, 0)
        if piece == 0:
            tl.store(counts + mine, count)
            tl.store(counts + num_units * L.heads + mine, edge)
        listed = (piece >= first) & (piece < prefix)
        page_number = tl.load(chosen + mine.to(tl.int64) * chosen_stride + piece - first, mask=listed, other=0)
        page_number = tl.where(piece < tl.minimum(first, prefix), piece, page_number)
        page_number = tl.where(piece < prefix, page_number, piece - prefix + behind)
        to = piece * PAGE
    else:
        count = tl.where(real_unit, room, 0)
        page_number = (length + begin) // PAGE - window // PAGE + piece
        to = page_number * PAGE - edge
    if to >= count:
        return
    base = unit.to(tl.int64) * unit_stride + head * head_stride
    block = tl.load(table + row.to(tl.int64) * table_stride + page_number,
                    mask=(page_number >= 0) & (page_number * PAGE < length), other=0)  # fmt: skip
    slot = tl.load(open_slot + block)
    place = place_of(block, block >= 0, payload_slot, home, HAS_SLOTS, HAS_HOST)
    page = page_at(place, payload, payload_stride, host, host_stride, HAS_HOST)
    for t0 in tl.range(0, PAGE, TILE, disable_licm=True):
        t = t0 + tl.arange(0, TILE)
        position = page_number * PAGE + t
        here = (to + t >= 0) & (to + t < count)
        at = base + (to + t).to(tl.int64) * token_stride
        keep = here & (position >= 0) & (position < length)
        if (page_number >= 0) & (page_number * PAGE < length):
            if slot >= 0:
                own = open_pages + slot.to(tl.int64) * open_stride + head * (PAGE * L.dim)
                move_plain(own, own + L.heads * PAGE * L.dim, t.to(tl.int64) * L.dim, keys, values, at, keep, L)
            else:
                move_sealed(page, head, t0, keys, values, at, keep, L)
        if page_number * PAGE + PAGE > length:
            own = head * L.dim + start.to(tl.int64) * kv_stride
            from_ = (position - length).to(tl.int64) * kv_stride
            move_plain(k + own, v + own, from_, keys, values, at, here & (position >= length), L)
        if page_number < 0:
            channel = natural_channels(L)
            zeros = tl.zeros((TILE, 2 * L.half), tl.float32)
            store_values(zeros, keys, at, channel, here & (position < 0), L)
            store_values(zeros, values, at, channel, here & (position < 0), L)


@triton.jit
def block_tokens(cu_q, units, index):
    """Tokens `[64]` of a block unit."""
    token = tl.load(cu_q + tl.load(units + 2 * index)) + tl.load(units + 2 * index + 1) + tl.arange(0, BLOCK)
    return token.to(tl.int64)


@step_jit
def gather_queries(q, queries, cu_q, units, totals, q_stride, first_unit, L: tl.constexpr):
    """A block unit's queries of one head to `queries` `[units, 64, query heads, D]`: grid (units, query heads)."""
    unit, q_head = tl.program_id(0), tl.program_id(1)
    if first_unit + unit >= tl.load(totals + 1):
        return
    token = block_tokens(cu_q, units, first_unit + unit)
    channel = natural_channels(L)
    mask = (token[:, None] >= 0) & real(channel[None, :], L)
    x = tl.load(q + (token * q_stride + q_head * L.dim)[:, None] + channel[None, :], mask=mask, other=0.0)
    to = ((unit * BLOCK + tl.arange(0, BLOCK)) * L.heads * L.group + q_head).to(tl.int64) * L.dim
    tl.store(queries + to[:, None] + channel[None, :], x, mask=mask)


@step_jit
def scatter_blocks(
    merged, merged_lse, out, lse, cu_q, units, totals, out_stride, lse_stride, first_unit,
    HAS_LSE: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """A block unit's output of one query head to its tokens, rotated back: grid (units, query heads).

    `merged` float32 `[units, 64, query heads, D]`, `merged_lse` float32 `[units, query heads, 64]`.
    """
    unit, q_head = tl.program_id(0), tl.program_id(1)
    if first_unit + unit >= tl.load(totals + 1):
        return
    token = block_tokens(cu_q, units, first_unit + unit)
    channel = natural_channels(L)
    mask = (token[:, None] >= 0) & real(channel[None, :], L)
    from_ = ((unit * BLOCK + tl.arange(0, BLOCK)) * L.heads * L.group + q_head).to(tl.int64) * L.dim
    x = tl.load(merged + from_[:, None] + channel[None, :], mask=mask, other=0.0)
    if L.rotate:
        x = rotate(x, BLOCK, L)
    tl.store(out + (token * out_stride + q_head * L.dim)[:, None] + channel[None, :], x.to(out.dtype.element_ty),
             mask=mask)  # fmt: skip
    if HAS_LSE:
        x = tl.load(merged_lse + (unit * L.heads * L.group + q_head) * BLOCK + tl.arange(0, BLOCK))
        tl.store(lse + token * lse_stride + q_head, x)
