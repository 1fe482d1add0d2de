"""The three kernels in plain torch, for machines without a C++ compiler: correct everywhere, slow.

`TorchKernels` has the methods and the signatures of `cpu.native.CpuKernels`. Expect 5 to 30 times its time per token:
each page is unpacked by a chain of whole-tensor operations. Memory stays bounded at any context: pages are read a group
at a time and merged by an online softmax, and no score matrix is larger than `SCORE_ELEMENTS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vllm_ktx.kv_quant import KVCacheQuantizer, KVFormat, PageLayout

from .kernels import Residency
from .selection import ContextPages, SparseSettings, make_scorer
from .sparse_pages import Sequence

SCORE_ELEMENTS = 1 << 24  # float32 scores held at once (64 MiB)
GROUP_TOKENS = 2048  # context tokens unpacked at a time


class TorchKernels:
    """Seal, append and attention over torch tensors; see `cpu/csrc/ktx.h` for what each argument means."""

    name = "torch"
    pages = False

    def unserved(self, fmt: KVFormat) -> str | None:
        return None

    def seal(
        self,
        layout: PageLayout,
        k: torch.Tensor,
        v: torch.Tensor,
        src_offsets: torch.Tensor,
        blocks: torch.Tensor,
        headers: torch.Tensor,
        payload: torch.Tensor,
        slots: torch.Tensor | None,
        token_stride: int,
        head_stride: int,
        num_threads: int = 0,
    ) -> None:
        """Quantizes page i, whose tokens start at element `src_offsets[i]` of `k` and `v`, into `headers[blocks[i]]`
        and `payload[slots[i]]` (None: `blocks[i]`)."""
        quantizer = KVCacheQuantizer(layout)
        slots = blocks if slots is None else slots
        step = max(1, SCORE_ELEMENTS // (8 * layout.num_kv_heads * layout.page_size * layout.head_dim))
        for begin in range(0, len(blocks), step):
            part = slice(begin, begin + step)
            pages = (_gather_pages(layout, x, src_offsets[part], token_stride, head_stride) for x in (k, v))
            header, packed = quantizer.seal(*pages)
            payload[slots[part].long(), : layout.payload_bytes] = packed
            if layout.header_bytes:
                headers[blocks[part].long(), : layout.header_bytes] = header

    def append(
        self,
        layout: PageLayout,
        k: torch.Tensor,
        v: torch.Tensor,
        token: torch.Tensor,
        slot: torch.Tensor,
        offset: torch.Tensor,
        open_pages: torch.Tensor,
        num_threads: int = 0,
    ) -> None:
        """Copies rows `token` of `k`, `v` `[tokens, num_kv_heads, D]` to `offset` of open pages `slot`."""
        rows, slot, offset = token.long(), slot.long(), offset.long()
        open_pages[slot, 0, :, offset] = k[rows]
        open_pages[slot, 1, :, offset] = v[rows]

    def attention(
        self,
        layout: PageLayout,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        out: torch.Tensor,
        cu_q: torch.Tensor,
        context: torch.Tensor,
        block_table: torch.Tensor,
        open_slot: torch.Tensor,
        payload: torch.Tensor,
        open_pages: torch.Tensor,
        scale: float,
        softcap: float = 0.0,
        payload_slot: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        num_threads: int = 0,
        headers: torch.Tensor | None = None,
        sparse: SparseSettings | None = None,
        dropped: torch.Tensor | None = None,
        pages_read: torch.Tensor | None = None,
        chosen: torch.Tensor | None = None,
        depth: torch.Tensor | None = None,
        residency: Residency | None = None,
    ) -> None:
        """Causal attention of a mixed batch into `out` `[tokens, num_q_heads, D]`.

        `lse`: float32 `[tokens, num_q_heads]`. `num_threads` is accepted for the shared signature; torch's own applies.
        `sparse`: read selected pages only, scored from `headers` uint8 `[num_blocks, header_bytes]`; then `dropped`,
        `depth` (float32) and `pages_read` (int32), `[tokens, num_kv_heads]`, receive what `sparse_pages.SparseResult`
        says.
        """
        bounds = cu_q.tolist()
        for row, length in enumerate(context.tolist()):
            begin, end = bounds[row], bounds[row + 1]
            if begin == end:
                continue
            blocks = block_table[row, : -(-length // layout.page_size)].long()
            memory = (open_slot, headers, payload, open_pages, payload_slot)
            pages = ContextPages(layout, blocks, length, *memory, softcap, torch.float32)
            own_k, own_v = (None if x is None else x[begin:end] for x in (k, v))
            if sparse is None or not _chooses(sparse, pages, end - begin):
                decisions = _dense(pages, q[begin:end], own_k, own_v, scale)
            else:
                decisions = _selected(Sequence(pages, q[begin:end], own_k, own_v, scale, sparse, make_scorer(sparse)))
            for tokens, result, *counted in decisions:
                at = slice(begin + tokens.start, begin + tokens.stop)
                out[at] = result.to(out.dtype)
                for target, value in zip((lse, dropped, pages_read, depth), counted, strict=True):
                    if target is not None:
                        target[at] = value


# Tokens of the row, their output and log-sum-exp; dropped mass, pages read and share probed (for each kv head).
_Attended = tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _dense(
    pages: ContextPages, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, scale: float
) -> Iterator[_Attended]:
    """Attention of a whole row over all its pages."""
    layout = pages.layout
    state = _Softmax.empty(q, layout.num_kv_heads, scale, pages.softcap)
    for part in torch.arange(pages.num_pages).split(max(1, GROUP_TOKENS // layout.page_size)):
        if len(part):
            state.add(*pages.read(part))
    if k is not None and v is not None:
        state.add_causal(k.float(), v.float())
    heads = torch.zeros(layout.num_kv_heads)
    yield slice(0, len(q)), *state.result(), heads, (heads + pages.num_pages).int(), heads


def _selected(sequence: Sequence) -> Iterator[_Attended]:
    """Attention of a row's tokens over the pages that they choose."""
    for tokens, chosen, unread, depth in sequence.decide():
        count = torch.tensor([len(pages) for pages in chosen], dtype=torch.int32)
        yield tokens, *sequence.attend(tokens, chosen), unread, count, depth


def _chooses(sparse: SparseSettings, pages: ContextPages, tokens: int) -> bool:
    """Whether any of a row's tokens has pages to choose from: the last has the most."""
    first, last = sparse.candidates(pages.context + tokens - 1, pages.context, pages.layout.page_size)
    return last > first


def _gather_pages(
    layout: PageLayout, x: torch.Tensor, offsets: torch.Tensor, token_stride: int, head_stride: int
) -> torch.Tensor:
    """`[n, num_kv_heads, page_size, D]` copies of the pages that start at element `offsets` of `x`'s memory."""
    shape = (layout.num_kv_heads, layout.page_size, layout.head_dim)
    strides = (head_stride, token_stride, 1)
    start = x.storage_offset()
    pages = [x.as_strided(shape, strides, start + offset) for offset in offsets.tolist()]
    return torch.stack(pages)


@dataclass
class _Softmax:
    """Online softmax of one row: scaled queries and accumulator `[Hkv, G, T, D]`, running maximum and sum without D."""

    query: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor
    acc: torch.Tensor
    softcap: float

    @classmethod
    def empty(cls, q: torch.Tensor, num_kv_heads: int, scale: float, softcap: float) -> _Softmax:
        tokens, heads, dim = q.shape
        query = (q.float() * scale).reshape(tokens, num_kv_heads, heads // num_kv_heads, dim).permute(1, 2, 0, 3)
        peak = torch.full(query.shape[:3], -math.inf)
        return cls(query.contiguous(), peak, torch.zeros(query.shape[:3]), torch.zeros(query.shape), softcap)

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """All queries see all of `keys`, `values` `[n, Hkv, D]`."""
        keys, values = keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous()
        for part in self._query_blocks(keys.shape[1]):
            self._add(part, keys, values, None)

    def add_causal(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Query t sees the first t + 1 of `keys`, `values` `[T, Hkv, D]`."""
        for part in self._query_blocks(len(keys)):
            # Keys that the whole block sees need no mask; hidden ones aren't touched, so their NaN can't leak.
            if part.start:
                seen_keys, seen_values = (x[: part.start].transpose(0, 1).contiguous() for x in (keys, values))
                self._add(part, seen_keys, seen_values, None)
            own_keys, own_values = (x[part].transpose(0, 1).contiguous() for x in (keys, values))
            size = own_keys.shape[1]
            self._add(part, own_keys, own_values, torch.ones(size, size, dtype=torch.bool).triu(1))

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output `[T, Hq, D]` and natural log-sum-exp `[T, Hq]`; zeros and -inf where nothing was seen."""
        # Only an untouched row has a sum of exactly 0; a NaN sum stays NaN.
        out = torch.where(self.total.unsqueeze(-1) == 0, 0.0, self.acc / self.total.unsqueeze(-1))
        log_sum = self.peak + torch.log(self.total)
        tokens, heads = out.shape[2], out.shape[0] * out.shape[1]
        return out.permute(2, 0, 1, 3).reshape(tokens, heads, -1), log_sum.permute(2, 0, 1).reshape(tokens, heads)

    def _query_blocks(self, num_keys: int) -> Iterator[slice]:
        """Query ranges whose scores over `num_keys` keys stay below `SCORE_ELEMENTS`, at most 256 queries each."""
        heads, tokens = self.query.shape[0] * self.query.shape[1], self.query.shape[2]
        step = max(1, min(256, SCORE_ELEMENTS // (heads * max(num_keys, 1))))
        for begin in range(0, tokens, step):
            yield slice(begin, min(begin + step, tokens))

    def _add(self, part: slice, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor | None) -> None:
        scores = torch.einsum("hgtd,hnd->hgtn", self.query[:, :, part], keys)
        if self.softcap > 0:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        peak = torch.maximum(self.peak[:, :, part], scores.amax(-1))
        base = torch.where(torch.isneginf(peak), 0.0, peak)
        weights = torch.exp(scores - base.unsqueeze(-1))
        keep = torch.exp(self.peak[:, :, part] - base)
        self.total[:, :, part] = self.total[:, :, part] * keep + weights.sum(-1)
        self.acc[:, :, part] = self.acc[:, :, part] * keep.unsqueeze(-1) + self._weighted(weights, values, hidden)
        self.peak[:, :, part] = peak

    @staticmethod
    def _weighted(weights: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        """`weights @ values`, row by row where a hidden value isn't finite (0 * NaN is NaN)."""
        if hidden is None or torch.isfinite(values).all():
            return torch.einsum("hgtn,hnd->hgtd", weights, values)
        rows = [
            torch.einsum("hgn,hnd->hgd", weights[:, :, t, : t + 1], values[:, : t + 1]) for t in range(weights.shape[2])
        ]
        return torch.stack(rows, dim=2)
