"""Scorer `oracle`: the true mass of every page, by reading it. The upper limit of every other scorer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .pages import ContextPages, soften

CHUNK = 128  # pages held at once


@dataclass(frozen=True)
class OracleScorer:
    """Log-mass over the keys as attention reads them."""

    def __call__(self, q: torch.Tensor, context: ContextPages, pages: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        parts = []
        for part in pages.split(CHUNK):
            logits = torch.einsum("rhgsd,nhtd->rhgsnt", q, context.keys(part))
            parts.append(torch.logsumexp(soften(logits, context.softcap), -1))
        return torch.cat(parts, -1) if parts else q.new_zeros(*q.shape[:-1], 0)
