"""Selector `global_ratio`: a fixed share of the context's pages (the classic 1 %)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .settings import SparseSettings

ROUNDING = 1e-3  # 0.1 * 30 pages are 3, in any precision


@dataclass(frozen=True)
class GlobalRatioSelector:
    """ceil(`settings.global_ratio` * pages of the context)."""

    def __call__(self, covered: torch.Tensor, settings: SparseSettings, context_pages: int) -> torch.Tensor:
        assert settings.global_ratio is not None
        return torch.full(covered.shape[:2], math.ceil(settings.global_ratio * context_pages - ROUNDING))
