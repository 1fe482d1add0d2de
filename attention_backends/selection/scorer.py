"""What a scorer is: an estimate of the softmax mass that each candidate page holds for each query."""

from __future__ import annotations

from typing import Protocol

import torch

from .pages import ContextPages


class Scorer(Protocol):
    """Estimates the log-mass of pages, ln of the sum of exp(logit) over their tokens.

    One that looks into two-bit codes may also have `probes(q, context, pages)`: of how many pages it does, `[R, H]`.
    """

    def __call__(self, q: torch.Tensor, context: ContextPages, pages: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """Log-masses `[R, H, G, S, n]` of candidates `pages` (int64 `[n]`, ascending, whole and sealed).

        `q`: queries times the softmax scale, `[R, H, G, S, D]`: R independent decisions for H kv heads, each on behalf
        of G query heads with S queries (1 in decode, 16 of a block in prefill). `base` `[R, H, G, S]`:
        log-mass of what is read in any case. A row's result depends on nothing but the row.
        """
