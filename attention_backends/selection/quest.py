"""Scorer `quest`: an upper bound of the page's logits from per-channel minima and maxima. A yardstick."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .pages import ContextPages, mean_logits, soften


@dataclass(frozen=True)
class QuestScorer:
    """sum_d max(q_d min_d, q_d max_d) over the page's keys (Quest, arXiv:2406.10774); 4 D bytes in fp16.

    An upper bound of the largest logit, taken for the log-mass. It reads whole pages here: only the ranking is Quest's.
    """

    def __call__(self, q: torch.Tensor, context: ContextPages, pages: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        keys = context.keys(pages)
        bound = mean_logits(q.clamp(min=0), keys.amax(-2)) + mean_logits(q.clamp(max=0), keys.amin(-2))
        return soften(bound, context.softcap)
