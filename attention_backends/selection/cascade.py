"""Scorer `cascade`, the default: headers for all candidates, then two-bit keys for the best share of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .codes import CodesScorer
from .pages import VARIANCE_FACTOR, ContextPages, estimate_mass, rank, shares

# Among random keys of one length, one that matches the query stands out by sqrt(D) times the spread, and weighs nothing
# if that is less than ln(tokens): from a spread of about 1 on (D = 128, 128K tokens) such keys must be looked for, and
# below half of that there are none. Headers that explain more than EXPLAINED[1] rank as well as two-bit keys do
# (measured on SmolLM2; see docs/adding-a-scorer.md).
SPREAD = (0.5, 1.0)  # logits
EXPLAINED = (0.1, 0.4)
ROUNDING = 1e-3  # 0.35 * 20 pages are 7, in any precision


@dataclass(frozen=True)
class CascadeScorer:
    """`variance` for every page, replaced by `codes` for the best `depth` of them by estimated share.

    What the codes find more than the headers of the same pages said, the other pages are taken to hide too: their
    estimates are raised by that factor (never lowered), head by head. Without it a claim of 0.95 reaches 0.92.

    `share`: the depth where headers explain the keys well; it rises to 1 as they do worse, see `depth`.
    """

    share: float = 0.35

    def __call__(self, q: torch.Tensor, context: ContextPages, pages: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        mean, deviation = context.moments(pages)
        log_mass, a, v = estimate_mass(q, mean, deviation, context.layout.page_size, context.softcap)
        if not len(pages):
            return log_mass
        count = self._count(a, v)
        place = torch.argsort(rank(shares(log_mass, base)[0]), -1)
        deep = place < count.unsqueeze(-1)  # [R, H, n]
        wanted = deep.any(0).any(0)
        codes = torch.full_like(log_mass, -math.inf)
        codes[..., wanted] = CodesScorer()(q, context, pages[wanted], base)
        return join(log_mass, codes, deep[:, :, None, None])

    def probes(self, q: torch.Tensor, context: ContextPages, pages: torch.Tensor) -> torch.Tensor:
        """Pages whose codes are read, `[R, H]`."""
        return self._count(*estimate_mass(q, *context.moments(pages), context.layout.page_size, context.softcap)[1:])

    def _count(self, a: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.ceil(self.depth(a, v) * a.shape[-1] - ROUNDING)

    def depth(self, a: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Share of the candidates to look into, `[R, H]`, from their mean logits and variances `[R, H, G, S, n]`.

        `share` where headers leave less than `SPREAD[0]` logits open or explain more than `EXPLAINED[1]`; 1 where they
        leave more than `SPREAD[1]` open and explain less than `EXPLAINED[0]`; the product of two ramps between.
        """
        spread, explained = explain(a, v)
        wide = ((spread - SPREAD[0]) / (SPREAD[1] - SPREAD[0])).clamp(0, 1)
        blind = ((EXPLAINED[1] - explained) / (EXPLAINED[1] - EXPLAINED[0])).clamp(0, 1)
        return self.share + (1 - self.share) * torch.nan_to_num(wide * blind, nan=1.0)


def explain(a: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How well headers explain the keys, `[R, H]` each, from mean logits and variances `[R, H, G, S, n]`.

    Spread: root mean square, over candidates and queries, of the deviation of a page's logits from their mean.
    Explained: the part of all candidate tokens' variance in logits that lies between pages, the least of all queries.
    """
    within = v.mean(-1) / VARIANCE_FACTOR
    between = a.var(-1, unbiased=False)
    explained = (between / (between + within).clamp(min=1e-30)).amin((2, 3))
    return within.mean((2, 3)).sqrt(), explained


def join(headers: torch.Tensor, codes: torch.Tensor, deep: torch.Tensor) -> torch.Tensor:
    """Log-masses by `codes` where `deep`, else by `headers` plus what codes found more; `[R, H, G, S, n]` all."""
    found, claimed = (torch.logsumexp(x.masked_fill(~deep, -math.inf), -1, keepdim=True) for x in (codes, headers))
    bias = torch.nan_to_num(found - claimed, nan=0.0, posinf=0.0, neginf=0.0).clamp(min=0)
    return torch.where(deep, codes, headers + bias)
