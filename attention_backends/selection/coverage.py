"""Selector `coverage`, the default: the fewest pages that give every query head its share of softmax mass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .settings import SparseSettings


@dataclass(frozen=True)
class CoverageSelector:
    """The shortest prefix that reaches `settings.coverage` for the worst head of the group, not for their mean.

    At least `min_pages`, at most `cap`. A top-p rule over pages, as Twilight (arXiv:2502.02770) has it over tokens.
    Coverage 1 takes all pages, whatever rounding makes of the sum.
    """

    def __call__(self, covered: torch.Tensor, settings: SparseSettings, context_pages: int) -> torch.Tensor:
        candidates = covered.shape[-1] - 1
        if settings.coverage >= 1.0:
            return torch.full(covered.shape[:2], candidates)
        short = covered.amin(2) < settings.coverage  # [R, H, n + 1], falling in n
        return short.sum(-1).clamp(settings.min_pages, settings.cap)
