"""Scorer `mean`: the logit of the page's mean key alone. A yardstick; it loses needles."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .pages import ContextPages, mean_logits, soften


@dataclass(frozen=True)
class MeanScorer:
    """Log-mass as if every key of the page were its mean (block means as in MoBA, arXiv:2502.13189): D + 2 bytes."""

    def __call__(self, q: torch.Tensor, context: ContextPages, pages: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        mean, _ = context.moments(pages)
        return soften(mean_logits(q, mean), context.softcap) + math.log(context.layout.page_size)
