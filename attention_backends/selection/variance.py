"""Scorer `variance` (the setting `header`): mean and deviation from the header, with a saturating variance term."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .pages import ContextPages, estimate_mass


@dataclass(frozen=True)
class VarianceScorer:
    """Log-mass from an int8 mean and an int8 deviation per channel: 2 D + 4 bytes a page and kv head.

    The variance term tells a page of equal keys from one with a single key that matches, which a mean alone
    (InfLLM, arXiv:2402.04617, and block-mean methods) can't. See `pages.estimate_mass` for the formula.
    """

    def __call__(self, q: torch.Tensor, context: ContextPages, pages: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        return estimate_mass(q, *context.moments(pages), context.layout.page_size, context.softcap)[0]
