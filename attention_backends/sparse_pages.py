"""Sparse attention over KTX pages in plain torch: the oracle of the sparse kernels, and the fallback without them.

One decision picks the pages of one kv head for some queries. A *row decision* serves one token (a decode row; each
token of a short row; each token of a chunk's last block), a *block decision* the 64 tokens of a query block:

- Always read: sink pages, the pages that reach into the window, a page that isn't full, and the fresh tokens.
- Candidates: all other pages (`SparseSettings.candidates`). No more than `min_pages` of them: everything is read.
- A scorer estimates each candidate's softmax mass; shares are relative to it all plus what is always read, whose mass a
  row decision knows exactly and a block decision estimates from page moments.
- Candidates are ranked by share, summed over the group of query heads, and a selector says how many are read. The share
  that stays unread, averaged over the group, is the row's dropped mass.

A block decision asks with every fourth row of each query head; a head's coverage is the mean over them. (Means of rows
would be fewer, but lose the one page that a row copies from: +2.8 % perplexity on SmolLM2 at 8K.) Its window ends at
the block's first token. Fresh tokens before the block count as pages of 64 with exact moments.

Imports torch and `kv_quant`, never vLLM.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_ktx.kv_quant import PageLayout

from . import reference
from .selection import SELECTORS, ContextPages, Scorer, SparseSettings, make_scorer
from .selection.pages import estimate_mass, moments, rank, shares

BLOCK = 64  # query rows that share one list
SAMPLE_STEP = 4  # every fourth row of a block is a scoring query


class SparseResult(NamedTuple):
    """`out` `[tokens, q_heads, D]`, `lse` `[tokens, q_heads]`, `dropped` (estimated share of unread softmax mass),
    `pages_read` (int32, context pages) and `depth` (share of the candidates whose two-bit codes were read; 0 without
    candidates) `[tokens, kv_heads]`; `lists[token][kv_head]`: the pages read, int64, ascending.
    """

    out: torch.Tensor
    lse: torch.Tensor
    dropped: torch.Tensor
    pages_read: torch.Tensor
    depth: torch.Tensor
    lists: list[list[torch.Tensor]]


def sparse_attention_reference(
    layout: PageLayout,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cu_q: torch.Tensor,
    context: torch.Tensor,
    block_table: torch.Tensor,
    open_slot: torch.Tensor,
    headers: torch.Tensor | None,
    payload: torch.Tensor,
    open_pages: torch.Tensor,
    scale: float,
    settings: SparseSettings,
    softcap: float = 0.0,
    payload_slot: torch.Tensor | None = None,
    scorer: Scorer | None = None,
    lists: list[list[torch.Tensor]] | None = None,
    dtype: torch.dtype = torch.float64,
) -> SparseResult:
    """Sparse causal attention of a mixed batch; arguments as in `reference.attention`, `headers` as in the cache.

    `scorer`: instead of the one that `settings` names. `lists`: attend these pages, as another implementation chose
    them, instead of selecting; `dropped` is then zero.
    """
    settings.check_page_size(layout.page_size)
    result = SparseResult(
        torch.zeros(q.shape, dtype=dtype),
        torch.full(q.shape[:2], float("-inf"), dtype=dtype),
        torch.zeros(len(q), layout.num_kv_heads, dtype=dtype),
        torch.zeros(len(q), layout.num_kv_heads, dtype=torch.int32),
        torch.zeros(len(q), layout.num_kv_heads, dtype=dtype),
        [[] for _ in range(len(q))],
    )
    scorer = scorer or make_scorer(settings)
    for row, length in enumerate(context.tolist()):
        begin, end = int(cu_q[row]), int(cu_q[row + 1])
        blocks = block_table[row, : -(-length // layout.page_size)].long()
        pages = ContextPages(
            layout, blocks, length, open_slot, headers, payload, open_pages, payload_slot, softcap, dtype
        )
        own = [None if x is None else x[begin:end] for x in (k, v)]
        sequence = Sequence(pages, q[begin:end], own[0], own[1], scale, settings, scorer)
        given = None if lists is None else lists[begin:end]
        for tokens, chosen, dropped, depth in sequence.decide() if given is None else sequence.as_given(given):
            at = slice(begin + tokens.start, begin + tokens.stop)
            result.out[at], result.lse[at] = sequence.attend(tokens, chosen)
            result.dropped[at], result.depth[at] = dropped, depth
            result.pages_read[at] = torch.tensor([len(each) for each in chosen], dtype=torch.int32)
            for token in range(at.start, at.stop):
                result.lists[token] = chosen
    return result


# Tokens, pages for each kv head, dropped and depth [kv_heads].
Decision = tuple[slice, list[torch.Tensor], torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Sequence:
    """One row of the batch: `q` `[T, q_heads, D]`, its own `k`, `v` `[T, kv_heads, D]` (None: context only)."""

    pages: ContextPages
    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    scale: float
    settings: SparseSettings
    scorer: Scorer

    def decide(self) -> Iterator[Decision]:
        """All decisions of the row, in order."""
        tokens = len(self.q)
        last_block = max(0, (tokens - 1) // BLOCK) * BLOCK
        for begin in range(0, last_block, BLOCK):
            yield self._decide_block(begin)
        for begin in range(last_block, tokens):
            yield self._decide_row(begin)

    def as_given(self, lists: list[list[torch.Tensor]]) -> Iterator[Decision]:
        """A decision for each run of tokens that have one list, the same object, in common."""
        zeros, begin = torch.zeros(self.pages.layout.num_kv_heads, dtype=self.pages.dtype), 0
        for _, run in itertools.groupby(lists, id):
            chosen = list(run)
            yield slice(begin, begin + len(chosen)), chosen[0], zeros, zeros
            begin += len(chosen)

    def attend(self, tokens: slice, chosen: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of `tokens` over the `chosen` pages of each kv head and the fresh tokens they see."""
        q = self.q[tokens]
        group = q.shape[1] // len(chosen)
        out, lse = torch.empty(q.shape, dtype=self.pages.dtype), torch.empty(q.shape[:2], dtype=self.pages.dtype)
        shared = all(torch.equal(each, chosen[0]) for each in chosen)
        parts = [slice(0, len(chosen))] if shared else [slice(h, h + 1) for h in range(len(chosen))]
        for heads in parts:
            keys, values, visible = self._visible(tokens, chosen[heads.start], heads)
            rows = slice(heads.start * group, heads.stop * group)
            found = reference.attend(
                q[:, rows], keys, values, visible, self.scale, self.pages.softcap, self.pages.dtype
            )
            out[:, rows], lse[:, rows] = found
        return out, lse

    def _visible(
        self, tokens: slice, chosen: torch.Tensor, heads: slice
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values `[n, heads, D]` of the pages and the fresh tokens, and how many of them each token sees."""
        keys, values = self.pages.read(chosen)
        keys, values = keys[:, heads], values[:, heads]
        visible = torch.full((tokens.stop - tokens.start,), len(keys))
        if self.k is not None and self.v is not None:
            visible = visible + torch.arange(tokens.start, tokens.stop) + 1
            keys = torch.cat((keys, self.k[: tokens.stop, heads].float()))
            values = torch.cat((values, self.v[: tokens.stop, heads].float()))
        return keys, values, visible

    def _always(self, first: int, last: int) -> torch.Tensor:
        """Pages that are read whatever the selection is: all but the candidates `first .. last - 1`."""
        return torch.cat((torch.arange(first), torch.arange(last, self.pages.num_pages)))

    def _queries(self, tokens: slice) -> torch.Tensor:
        """Scaled queries `[T, H, G, D]`."""
        heads = self.pages.layout.num_kv_heads
        q = self.q[tokens].to(self.pages.dtype) * self.scale
        return q.reshape(len(q), heads, q.shape[1] // heads, q.shape[2])

    def _range(self, token: int) -> tuple[int, int]:
        context = self.pages.context
        return self.settings.candidates(context + token, context, self.pages.layout.page_size)

    def _decide_row(self, token: int) -> Decision:
        tokens, (first, last) = slice(token, token + 1), self._range(token)
        if first == last:
            return self._dense(tokens)
        always = self._always(first, last)
        heads = [always] * self.pages.layout.num_kv_heads
        q = self._queries(tokens).unsqueeze(3)  # [1, H, G, 1, D]
        base = self.attend(tokens, heads)[1].reshape(q.shape[:-1])
        return tokens, *self._select(q, first, last, base)

    def _decide_block(self, begin: int) -> Decision:
        tokens, (first, last) = slice(begin, begin + BLOCK), self._range(begin)
        if first == last:
            return self._dense(tokens)
        q = self._queries(tokens)[SAMPLE_STEP - 1 :: SAMPLE_STEP].permute(1, 2, 0, 3).unsqueeze(0)  # [1, H, G, S, D]
        return tokens, *self._select(q, first, last, self._estimate_always(q, begin, first, last))

    def _dense(self, tokens: slice) -> Decision:
        zeros = torch.zeros(self.pages.layout.num_kv_heads, dtype=self.pages.dtype)
        return tokens, [torch.arange(self.pages.num_pages)] * len(zeros), zeros, zeros

    def _estimate_always(self, q: torch.Tensor, begin: int, first: int, last: int) -> torch.Tensor:
        """Estimated log-mass `[1, H, G, S]` of what the block at `begin` reads in any case, its own tokens left out."""
        size, softcap, dtype = self.pages.layout.page_size, self.pages.softcap, self.pages.dtype
        always = self._always(first, last)
        whole = always[always < self.pages.context // size]
        parts = [estimate_mass(q, *self.pages.moments(whole), size, softcap)[0]]
        if self.pages.context % size:
            keys = self.pages.read(always[-1:])[0].to(dtype)
            parts.append(estimate_mass(q, *moments(keys.transpose(0, 1).unsqueeze(0)), len(keys), softcap)[0])
        if begin and self.k is not None:
            fresh = self.k[:begin].to(dtype).reshape(-1, BLOCK, *self.k.shape[1:]).transpose(1, 2)
            parts.append(estimate_mass(q, *moments(fresh), BLOCK, softcap)[0])
        return torch.logsumexp(torch.cat(parts, -1), -1)

    def _select(
        self, q: torch.Tensor, first: int, last: int, base: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """The pages of each kv head (always read and selected), estimated dropped mass and depth `[kv_heads]`."""
        candidates = torch.arange(first, last)
        log_mass = self.scorer(q, self.pages, candidates, base)
        share, always_share = shares(log_mass, base)
        order, count, covered = choose(share, always_share, self.settings, self.pages.num_pages)
        always = self._always(first, last)
        chosen = [torch.cat((always, first + order[0, h, : count[0, h]])).sort().values for h in range(len(count[0]))]
        dropped = 1 - covered.mean(2).gather(-1, count.unsqueeze(-1))[0, :, 0]
        probes = getattr(self.scorer, "probes", None)
        depth = torch.zeros_like(dropped) if probes is None else probes(q, self.pages, candidates)[0] / len(candidates)
        return chosen, dropped.clamp(0, 1), depth


def choose(
    share: torch.Tensor, always_share: torch.Tensor, settings: SparseSettings, context_pages: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ranks and counts from candidates' shares `[R, H, G, S, n]` and that of what is always read `[R, H, G, S]`.

    Returns the order `[R, H, n]`, the number of pages to read `[R, H]`, and the share `[R, H, G, n + 1]` of each head's
    mass that the first 0 .. n of them cover together with what is always read.
    """
    order = rank(share)
    ranked = share.gather(-1, order[:, :, None, None].expand_as(share))
    covered = torch.cat((always_share.unsqueeze(-1), ranked), -1).cumsum(-1).mean(3)
    count = SELECTORS[settings.select]()(covered, settings, context_pages)
    return order, count.clamp(max=share.shape[-1]), covered
