"""The bytes of a hot pool's slots, wherever they are: moves pages between a store and one layer's slots."""

from __future__ import annotations

import numpy as np
import torch

from .errors import PageFault, TierFault
from .tiers import Bytes, Ints, PageSpec, Tier

BOUNCE_PAGES = 64


class SlotMemory:
    """One layer's slots, `memory` uint8 `[num_slots, >= page_bytes]`, rows may be strided.

    Host memory is read and written in place. Device memory goes through `BOUNCE_PAGES` pages of (pinned) host memory
    for each thread's call; `bounce=True` does that for host memory too (for tests).
    """

    def __init__(self, memory: torch.Tensor, spec: PageSpec, bounce: bool = False) -> None:
        if memory.dtype != torch.uint8 or memory.dim() != 2 or memory.shape[1] < spec.page_bytes:
            raise ValueError(
                f"hot pool memory: found {memory.dtype} {tuple(memory.shape)}, needed uint8 [slots, at least "
                f"{spec.page_bytes}]"
            )
        if memory.stride(1) != 1:
            raise ValueError(f"hot pool memory: strides {memory.stride()}, needed contiguous bytes in a row")
        self.spec, self._memory = spec, memory
        self._array: Bytes | None = None if bounce or memory.device.type != "cpu" else memory.numpy()

    def load(self, store: Tier, pages: Ints, slots: Ints, parts: int) -> None:
        """Reads the parts of `pages` into `slots`. Raises TierFault as the store does."""
        if self._array is not None:
            store.read(pages, self._array, slots, parts)
            return
        faults: dict[int, PageFault] = {}
        for start in range(0, len(pages), BOUNCE_PAGES):
            part = slice(start, start + BOUNCE_PAGES)
            bounce = self._bounce(len(pages[part]))
            try:
                store.read(pages[part], bounce.numpy(), np.arange(len(bounce)), parts)
            except TierFault as fault:
                faults |= {start + i: why for i, why in fault.faults.items()}
            at = torch.from_numpy(slots[part]).to(self._memory.device)
            for low, high in (self.spec.parts[wanted] for wanted in self.spec.wanted(parts)):
                self._memory[at, low:high] = bounce[:, low:high].to(self._memory.device)
        if faults:
            raise TierFault(faults)

    def save(self, store: Tier, pages: Ints, slots: Ints) -> None:
        """Writes `slots` as `pages`. Raises TierFault as the store does."""
        if self._array is not None:
            store.write(pages, self._array, slots)
            return
        faults: dict[int, PageFault] = {}
        for start in range(0, len(pages), BOUNCE_PAGES):
            part = slice(start, start + BOUNCE_PAGES)
            bounce = self._bounce(len(pages[part]))
            bounce.copy_(self._memory[torch.from_numpy(slots[part]).to(self._memory.device), : self.spec.page_bytes])
            try:
                store.write(pages[part], bounce.numpy(), np.arange(len(bounce)))
            except TierFault as fault:
                faults |= {start + i: why for i, why in fault.faults.items()}
        if faults:
            raise TierFault(faults)

    def _bounce(self, count: int) -> torch.Tensor:
        pin = self._memory.device.type == "cuda"
        return torch.empty((count, self.spec.page_bytes), dtype=torch.uint8, pin_memory=pin)
