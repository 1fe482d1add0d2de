"""Selector `top_k`: a fixed number of pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .settings import SparseSettings


@dataclass(frozen=True)
class TopKSelector:
    """The first `settings.top_k` pages, as Quest (arXiv:2406.10774) selects. Simple; a fixed k loses needles."""

    def __call__(self, covered: torch.Tensor, settings: SparseSettings, context_pages: int) -> torch.Tensor:
        assert settings.top_k is not None
        return torch.full(covered.shape[:2], settings.top_k)
