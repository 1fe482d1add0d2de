"""Pages that the device doesn't hold, for the backend: one hot pool, store and pipeline an engine, one view of them a layer.

Everything here runs on the thread that runs the model. A page that can't be had (`TierFault`, `PoolFull`) costs the rows
that need it, not the step: the backend computes them without context, and `take_faults` tells vLLM's scheduler which
blocks are void, so that it computes those requests again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from ..kv_quant import PageLayout
from ..offload import (
    WHOLE,
    CapacityError,
    DiskTier,
    HotPool,
    LayerPipeline,
    PoolFull,
    PoolStats,
    TieredStore,
    TierFault,
    Trace,
    check_capacity,
)
from ..offload.capacity import GIB
from ..offload.tiers import SCORING
from ..tiering import TierPlan, page_spec
from .kernels import MIN_WAVE


class Tiers:
    """The pages of an engine's rank: slots in `memory` (uint8 `[num_slots, payload_bytes]` a layer, in layer order) above
    host memory and disk. Raises CapacityError, naming settings and numbers, if they can't hold `num_blocks`."""

    def __init__(
        self, plan: TierPlan, layout: PageLayout, num_blocks: int, memory: list[torch.Tensor], trace: Trace | None = None
    ) -> None:
        spec = page_spec(layout, len(memory), num_blocks)
        verdict = check_capacity(spec, plan.host_bytes / GIB, plan.disk_bytes / GIB, plan.disk_dir)
        if not verdict.ok:
            raise CapacityError("KTX: " + "; ".join(verdict.errors))
        self.warnings = verdict.warnings
        disk = None
        if plan.disk_bytes:
            on_disk = replace(spec, num_blocks=min(num_blocks, max(1, verdict.disk_blocks)))
            disk = DiskTier(on_disk, plan.disk_dir)  # type: ignore[arg-type]
        self.spec, self.trace = spec, trace
        self.store = TieredStore(spec, plan.host_bytes, disk)
        wave = max(MIN_WAVE, len(memory[0]) // 2)
        self.pool = HotPool(spec, memory, self.store, plan.eviction, trace=trace, wave=wave)
        self.weighs = plan.eviction == "attention"
        ahead = min(plan.prefetch_layers, len(memory) - 1)
        self.pipeline = LayerPipeline(self.pool, len(memory), ahead)
        self.layers = [LayerPages(self, layer) for layer in range(len(memory))]
        self._faults: set[int] = set()

    def begin_step(self, batch: Hashable) -> PoolStats:
        """A step of the rows that `batch` identifies begins; returns the pool's counts since the last one."""
        self.pipeline.begin_step(batch)
        return self.pool.take_stats()

    def note_faults(self, blocks: set[int]) -> None:
        """The content of `blocks` is lost, in every layer."""
        self._faults |= blocks
        self.pool.forget(sorted(blocks))

    def take_faults(self) -> set[int]:
        """Blocks that were lost since the last call."""
        faults, self._faults = self._faults, set()
        return faults

    def close(self) -> None:
        self.pool.close()
        self.store.close()


class LayerPages:
    """One layer's pages; the `Residency` of its kernels."""

    def __init__(self, tiers: Tiers, layer: int) -> None:
        self._tiers, self._pool, self.layer = tiers, tiers.pool, layer
        self.limit = tiers.pool.wave
        self.slot_table = tiers.pool.slot_table(layer)
        self._read: list[npt.NDArray[np.int32]] = []

    def begin(self) -> None:
        """The layer is about to run."""
        self._read.clear()
        self._tiers.pipeline.before_layer(self.layer)

    def bring(self, blocks: npt.NDArray[np.int32], scoring: bool) -> None:
        self._pool.release(self.layer)
        try:
            self._pool.ensure(self.layer, blocks, SCORING if scoring else WHOLE)
        except PoolFull as full:
            raise TierFault(dict(enumerate(full.pages(self.layer, blocks)))) from full
        if not scoring:
            self._read.append(blocks.copy())

    def end(self) -> None:
        """The layer's kernels are done: what they read is the forecast of the next step."""
        self._pool.release(self.layer)
        if self._read:
            blocks = np.concatenate(self._read)
            first = np.unique(blocks, return_index=True)[1]
            self._tiers.pipeline.chosen(self.layer, blocks[np.sort(first)])

    def weigh(self, blocks: npt.NDArray[np.int64], mass: npt.NDArray[np.float32]) -> None:
        self._pool.weigh(self.layer, blocks, mass)

    def place(self, blocks: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For new pages of `blocks` int32 `[n]`: positions (int64) and slots (int32), some at a time; what was to be
        written there must be when the next are asked for. Pages that find no room are left out: they are lost."""
        for start in range(0, len(blocks), self.limit):
            some = blocks[start : start + self.limit].numpy()
            unique, where = np.unique(some, return_inverse=True)  # two rows that compute a lost block again share it
            try:
                slots = self._pool.allocate(self.layer, unique)
            except PoolFull:
                continue
            yield torch.arange(start, start + len(some)), torch.from_numpy(slots[where])
            self._pool.commit(self.layer, unique)
            self._pool.release(self.layer)

    def slot_of(self, block: int) -> int:
        """The slot of one page, brought if need be, until the next call of this object. Raises TierFault."""
        self.bring(np.array([block], np.int32), scoring=False)
        return int(self.slot_table[block])
