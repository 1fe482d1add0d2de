"""Sparse local + global attention in plain torch, token by token: what the page kernels approximate.

Each class is one concept on plain tensors, importable on its own, for one sequence:

    q     `[T, num_q_heads, D]`       the newest T queries
    keys  `[n, num_kv_heads, D]`      all n tokens so far, those of the queries last; values alike

Query t sits at position n - T + t and sees tokens up to its own. Query head h reads kv head h // group. Results are
float64 unless a dtype is given: the output `[T, num_q_heads, D]` and the natural log-sum-exp `[T, num_q_heads]`.

The page-level oracle of the kernels is `sparse_pages.sparse_attention_reference`, exported here too. Imports torch and
`kv_quant` only. Never fast: whole score matrices are held.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .reference import merge_lse
from .sparse_pages import SparseResult, sparse_attention_reference

__all__ = [
    "AttentionFusion",
    "GlobalAttention",
    "GlobalTokenSelector",
    "LocalSlidingWindowAttention",
    "OverlappedBlockAttention",
    "SparseAttention",
    "SparseResult",
    "masked_attention",
    "sparse_attention_reference",
]

Partial = tuple[torch.Tensor, torch.Tensor]  # output and log-sum-exp over some of the keys


def scores(q: torch.Tensor, keys: torch.Tensor, scale: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Logits `[num_kv_heads, group, T, n]`."""
    heads = keys.shape[1]
    grouped = q.to(dtype).reshape(len(q), heads, q.shape[1] // heads, q.shape[2])
    return torch.einsum("thgd,nhd->hgtn", grouped, keys.to(dtype)) * scale


def positions(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Position of each query, `[T]`."""
    return torch.arange(len(keys) - len(q), len(keys))


def causal(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Which tokens each query may see, bool `[T, n]`."""
    return torch.arange(len(keys)) <= positions(q, keys).unsqueeze(1)


def masked_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> Partial:
    """Softmax attention over the tokens that `mask` (bool, broadcast to `[num_kv_heads, group, T, n]`) lets each see.

    A query that sees nothing gets zeros and -inf; the values of tokens that no query sees may be anything.
    """
    logits = scores(q, keys, scale, dtype)
    mask = mask.expand(logits.shape)
    logits = logits.masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - torch.nan_to_num(lse, neginf=0.0).unsqueeze(-1)).masked_fill(~mask, 0.0)
    seen = mask.any(2).any(1).T.unsqueeze(-1)  # [n, num_kv_heads, 1]
    out = torch.einsum("hgtn,nhd->thgd", weights, torch.where(seen, values.to(dtype), 0.0))
    return out.reshape(q.shape), lse.permute(2, 0, 1).reshape(q.shape[:2])


@dataclass(frozen=True)
class LocalSlidingWindowAttention:
    """Attention to the newest `window` tokens, a query's own among them (Longformer, arXiv:2004.05150)."""

    window: int

    def mask(self, q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """bool `[T, n]`."""
        oldest = positions(q, keys).unsqueeze(1) - self.window
        return causal(q, keys) & (torch.arange(len(keys)) > oldest)

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> Partial:
        return masked_attention(q, keys, values, self.mask(q, keys), scale)


@dataclass(frozen=True)
class GlobalTokenSelector:
    """Chooses the tokens that a query reads wherever they are, by attention score and by position.

    Position: the `first` and `last` tokens of the context count as important whatever they hold (attention sinks and
    recency; StreamingLLM, arXiv:2309.17453). Score: the softmax weight of each token, summed over the query heads of a
    group (as H2O, arXiv:2306.14048, sums it over steps). The best `budget` by score are taken on top of those.
    """

    budget: int
    first: int = 64
    last: int = 0

    def importance(self, q: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
        """Softmax weight of each token summed over the group, and infinity for those kept by position.

        `[num_kv_heads, T, n]` float64; tokens that a query can't see count -1.
        """
        visible = causal(q, keys)
        logits = scores(q, keys, scale).masked_fill(~visible, float("-inf"))
        weight = torch.softmax(logits, -1).sum(1)
        return weight.masked_fill(self._kept(q, keys), float("inf")).masked_fill(~visible, -1.0)

    def mask(self, q: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
        """Tokens chosen for each kv head and query, bool `[num_kv_heads, 1, T, n]`. Ties: the older token first."""
        importance = self.importance(q, keys, scale)
        order = torch.sort(importance, dim=-1, descending=True, stable=True).indices
        place = torch.argsort(order, -1)
        count = torch.isposinf(importance).sum(-1, keepdim=True) + self.budget
        return ((place < count) & causal(q, keys)).unsqueeze(1)

    def _kept(self, q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        token = torch.arange(len(keys))
        return (token < self.first) | (token > positions(q, keys).unsqueeze(1) - self.last)


@dataclass(frozen=True)
class GlobalAttention:
    """Attention to the tokens that a selector chose, less those that another part attends already."""

    selector: GlobalTokenSelector

    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        exclude: torch.Tensor | None = None,
    ) -> Partial:
        """`exclude`: bool `[T, n]`, tokens to leave out."""
        mask = self.selector.mask(q, keys, scale)
        return masked_attention(q, keys, values, mask if exclude is None else mask & ~exclude, scale)


@dataclass(frozen=True)
class AttentionFusion:
    """Joins attention over disjoint sets of tokens into attention over all of them, exactly.

    Each part's output counts by its share of the softmax mass, exp(lse - total) (the rescaling of online softmax;
    FlashAttention, arXiv:2205.14135; flash-decoding joins its splits so).
    """

    def __call__(self, *parts: Partial) -> Partial:
        return merge_lse([part[0] for part in parts], [part[1] for part in parts])


@dataclass(frozen=True)
class SparseAttention:
    """A local window and chosen tokens beyond it, joined exactly: O(T (window + budget)) values read."""

    local: LocalSlidingWindowAttention
    globally: GlobalAttention
    fusion: AttentionFusion = AttentionFusion()

    @classmethod
    def of(cls, window: int, budget: int, sinks: int = 64) -> SparseAttention:
        selector = GlobalTokenSelector(budget, first=sinks, last=window)
        return cls(LocalSlidingWindowAttention(window), GlobalAttention(selector))

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> Partial:
        near = self.local(q, keys, values, scale)
        far = self.globally(q, keys, values, scale, exclude=self.local.mask(q, keys))
        return self.fusion(near, far)


@dataclass(frozen=True)
class OverlappedBlockAttention:
    """Attention within blocks of `block` tokens that start `overlap` of a block before the last one ended.

    Blocks start every round(block * (1 - overlap)) tokens. A token in two of them belongs to the earlier one, so that
    each beyond the first block has an overlap's worth of history at least. A reference method: it has no global part
    and forgets what lies before its block.
    """

    block: int = 4096
    overlap: float = 0.10

    def __post_init__(self) -> None:
        if self.block < 1 or not 0 <= self.overlap < 1:
            raise ValueError(
                f"block={self.block}, overlap={self.overlap}: use a block of 1 or more and 0 <= overlap < 1"
            )

    @property
    def stride(self) -> int:
        return max(1, round(self.block * (1 - self.overlap)))

    def mask(self, q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """bool `[T, n]`."""
        # A token takes the newest block with at least `block - stride` tokens of history, the first one if none has.
        history = positions(q, keys) - (self.block - self.stride)
        start = history.clamp(min=0) // self.stride * self.stride
        return causal(q, keys) & (torch.arange(len(keys)) >= start.unsqueeze(1))

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> Partial:
        return masked_attention(q, keys, values, self.mask(q, keys), scale)
