"""Scorer `codes`: every key at the precision of its top two bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .pages import ContextPages, soften

CHUNK = 128  # pages whose two-bit keys are held at once


@dataclass(frozen=True)
class CodesScorer:
    """Log-mass over two-bit keys: `D * page_size / 4` bytes a page and kv head, and none of them stored for this.

    Plane 0 of the key codes (see `kv_quant/layout.py`) read at mid-rise, k = minimum + scale * (c 2^(b-2) +
    (2^(b-2) - 1) / 2); the rounding error, uniform over one step, adds half its variance
    q_d^2 step_d^2 / 12 to the log-mass as a Gaussian error would.
    """

    def __call__(self, q: torch.Tensor, context: ContextPages, pages: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        parts = [self._score(q, context, part) for part in pages.split(CHUNK)]
        return torch.cat(parts, -1) if parts else q.new_zeros(*q.shape[:-1], 0)

    def probes(self, q: torch.Tensor, context: ContextPages, pages: torch.Tensor) -> torch.Tensor:
        """Pages whose codes are read, `[R, H]`: all."""
        return torch.full(q.shape[:2], len(pages), dtype=q.dtype)

    @staticmethod
    def _score(q: torch.Tensor, context: ContextPages, pages: torch.Tensor) -> torch.Tensor:
        keys, step = context.two_bit_keys(pages)
        logits = soften(torch.einsum("rhgsd,nhtd->rhgsnt", q, keys), context.softcap)
        step = step.expand(len(pages), keys.shape[1], step.shape[2], keys.shape[3])
        error = torch.einsum("rhgsd,nhtd->rhgsnt", q.square(), step.square() / 12)
        return torch.logsumexp(logits + error / 2, -1)
