"""What a selector is: how many of the ranked pages are read."""

from __future__ import annotations

from typing import Protocol

import torch

from .settings import SparseSettings


class Selector(Protocol):
    """Turns ranked shares into a number of pages."""

    def __call__(self, covered: torch.Tensor, settings: SparseSettings, context_pages: int) -> torch.Tensor:
        """Number of pages int64 `[R, H]` to read of the n ranked candidates; a number above n means all.

        `covered` `[R, H, G, n + 1]`: estimated share of head g's softmax mass in what is always read and the first
        0 .. n candidates. `context_pages`: pages of the whole context.
        """
