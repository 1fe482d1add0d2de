"""Scorer `cascade`, the default: headers for all candidates, then two-bit keys for the best share of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .codes import CodesScorer
from .pages import VARIANCE_FACTOR, ContextPages, estimate_mass, rank, shares

# TODO thresholds
SPREAD = (1.0, 3.0)
EXPLAINED = (0.2, 0.6)
ROUNDING = 1e-3  # 0.35 * 20 pages are 7, in any precision


@dataclass(frozen=True)
class CascadeScorer:
    """`variance` for every page, replaced by `codes` for the best `depth` of them by estimated share.

    `share`: the depth where headers explain the keys well; it rises to 1 as they do worse, see `depth`.
    """

    share: float = 0.35

    def __call__(self, q: torch.Tensor, context: ContextPages, pages: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        mean, deviation = context.moments(pages)
        log_mass, a, v = estimate_mass(q, mean, deviation, context.layout.page_size, context.softcap)
        count = torch.ceil(self.depth(a, v) * len(pages) - ROUNDING).long()
        order = rank(shares(log_mass, base)[0])
        place = torch.argsort(order, -1)
        deep = place < count.unsqueeze(-1)  # [R, H, n]
        wanted = deep.any(0).any(0)
        if wanted.any():
            codes = log_mass.clone()
            codes[..., wanted] = CodesScorer()(q, context, pages[wanted], base)
            log_mass = torch.where(deep[:, :, None, None], codes, log_mass)
        return log_mass

    def depth(self, a: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Share of the candidates to look into, `[R, H]`, from their mean logits and variances `[R, H, G, S, n]`."""
        spread, explained = explain(a, v)
        wide = ((spread - SPREAD[0]) / (SPREAD[1] - SPREAD[0])).clamp(0, 1)
        blind = ((EXPLAINED[1] - explained) / (EXPLAINED[1] - EXPLAINED[0])).clamp(0, 1)
        return self.share + (1 - self.share) * torch.nan_to_num(wide * blind, nan=1.0)


def explain(a: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How well headers explain the keys, `[R, H]` each, from mean logits and variances `[R, H, G, S, n]`.

    Spread: root mean square of what a page's mean leaves open, in logits. Explained: the share of the logits' variance
    over all candidate tokens that lies between pages, the least of all queries.
    """
    within = v.mean(-1) / VARIANCE_FACTOR
    between = a.var(-1, unbiased=False)
    explained = (between / (between + within).clamp(min=1e-30)).amin((2, 3))
    return within.mean((2, 3)).sqrt(), explained
