"""Pages that the device doesn't hold, for the backend: one hot pool, store and pipeline an engine, one view of them a
layer.

Everything here runs on the thread that runs the model. A page that can't be had (`TierFault`, `PoolFull`) costs the
rows that need it, not the step: the backend computes them without context, and `take_faults` tells vLLM's scheduler
which blocks are void, so that it computes those requests again.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from contextlib import ExitStack
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
    PageSpec,
    PoolFull,
    PoolStats,
    TieredStore,
    TierFault,
    Trace,
    Verdict,
    check_capacity,
)
from ..offload.capacity import GIB, look
from ..offload.page_table import RESIDENT
from ..offload.tiers import SCORING, allocate_host
from ..tiering import TierPlan, check_slots, device_fix, page_spec
from .kernels import MIN_WAVE, Kernels


class Tiers:
    """The pages of an engine's rank: slots in `memory` (uint8 `[num_slots, payload_bytes]` a layer, in layer order)
    above host memory and disk. ranks: how many of an engine share the machine and the blocks. Raises CapacityError,
    naming settings and numbers, if they can't hold `num_blocks`, ValueError if `memory` has less than `MIN_WAVE` slots
    a layer."""

    def __init__(
        self,
        plan: TierPlan,
        layout: PageLayout,
        num_blocks: int,
        memory: list[torch.Tensor],
        trace: Trace | None = None,
        ranks: int = 1,
    ) -> None:
        check_slots(len(memory[0]), plan.overcommit, device_fix(plan.overcommit, layout, len(memory)))
        spec = page_spec(layout, len(memory), num_blocks)
        verdict = checked_capacity(plan, spec, ranks)
        self.warnings = list(verdict.warnings)
        plane_bytes = plan.plane_bytes(spec)
        if plan.scores_codes and not plane_bytes:
            self.warnings.append(
                "ktx.host_gib has no room for the scoring planes, which are then fetched like pages: raise it by "
                f"{spec.num_pages * spec.scoring_bytes / GIB:.2f}"
            )
        self.spec, self.trace, self._alone = spec, trace, ranks == 1
        self.weighs = plan.eviction == "attention"  # by what the rows of a step choose
        with ExitStack() as opened:  # a start-up that fails leaves nothing open
            disk = None
            if plan.disk_bytes:
                on_disk = replace(spec, num_blocks=min(num_blocks, max(1, verdict.disk_blocks)))
                disk = DiskTier(on_disk, plan.disk_dir)  # type: ignore[arg-type]
                opened.callback(disk.close)
            self.store = TieredStore(spec, plan.host_bytes - plane_bytes, disk)
            wave = max(MIN_WAVE, len(memory[0]) * 7 // 8)
            self.pool = HotPool(spec, memory, self.store, plan.eviction, trace=trace, wave=wave)
            opened.callback(self.pool.close)
            self.pipeline = LayerPipeline(self.pool, len(memory), min(plan.prefetch_layers, len(memory) - 1))
            self.layers = []
            for layer, slots in enumerate(memory):
                planes = torch.from_numpy(allocate_host(num_blocks, spec.scoring_bytes)) if plane_bytes else None
                self.layers.append(LayerPages(self, layer, slots, planes))
            self.close = opened.pop_all().close
        self._faults: set[int] = set()
        self._unplaced: set[int] = set()

    def begin_step(self, batch: Hashable, begun: npt.NDArray[np.int32] | None = None) -> PoolStats:
        """A step of the rows that `batch` identifies begins, in which the blocks `begun` `[n]` get new content; returns
        the pool's counts since the last one."""
        if begun is not None and len(begun):
            self.pool.forget(begun)
        self.pipeline.begin_step(batch)
        return self.pool.take_stats()

    def note_faults(self, blocks: set[int]) -> None:
        """The content of `blocks` is lost, in every layer. Raises RuntimeError where other ranks would use it."""
        if not self._alone:
            raise RuntimeError(f"KTX: blocks {sorted(blocks)} are lost on one of several ranks: the engine must stop")
        self._faults |= blocks
        self.pool.forget(sorted(blocks))

    def note_unplaced(self, blocks: npt.NDArray[np.int32]) -> None:
        """New pages of `blocks` found no room: they are lost from the next step on, when vLLM counts them as
        computed."""
        self._unplaced.update(blocks.tolist())

    def take_unplaced(self) -> set[int]:
        """Blocks noted so since the last call."""
        unplaced, self._unplaced = self._unplaced, set()
        return unplaced

    def take_faults(self) -> set[int]:
        """Blocks that were lost since the last call."""
        faults, self._faults = self._faults, set()
        return faults


def checked_capacity(plan: TierPlan, spec: PageSpec, ranks: int) -> Verdict:
    """What `plan`'s host memory and disk hold of `spec`'s pages, on a machine that `ranks` share evenly. Raises
    CapacityError, naming settings and numbers, if not all."""

    def part(size: int | None) -> int | None:
        return None if size is None else size // ranks

    machine = look(plan.disk_dir)
    machine = replace(machine, ram=part(machine.ram), disk=part(machine.disk))
    verdict = check_capacity(spec, plan.host_bytes / GIB, plan.disk_bytes / GIB, plan.disk_dir, machine)
    if not verdict.ok:
        raise CapacityError("KTX: " + "; ".join(verdict.errors))
    return verdict


class LayerPages:
    """One layer's pages; the `Residency` of its kernels."""

    def __init__(self, tiers: Tiers, layer: int, slots: torch.Tensor, scoring: torch.Tensor | None) -> None:
        self._tiers, self._pool, self.layer = tiers, tiers.pool, layer
        self._slots, self.scoring, self.native = slots, scoring, None
        self.limit = tiers.pool.wave
        self._batch = max(1, len(slots) // 4)  # new pages at a time: while some are filled others are written back
        self.slot_table = tiers.pool.slot_table(layer)
        state, parts = tiers.pool.slot_flags(layer)
        self._touched = np.zeros(len(slots), np.uint8)  # by the kernels: read without `fetch`
        arrays = (state.ctypes.data, parts.ctypes.data, self._touched.ctypes.data)
        self.slots = (*arrays, RESIDENT, tiers.spec.all_parts)
        self._read: list[npt.NDArray[np.int32]] = []

    def begin(self) -> None:
        """The layer is about to run."""
        self._tiers.pipeline.before_layer(self.layer)

    def fetch(self, blocks: npt.NDArray[np.int32], scoring: bool) -> None:
        self._pool.release(self.layer)
        try:
            self._pool.ensure(self.layer, blocks, SCORING if scoring else WHOLE)
        except PoolFull as full:
            raise TierFault(dict(enumerate(full.pages(self.layer, blocks)))) from full
        if not scoring:
            self._read.append(blocks.copy())

    def end(self, start: float, votes: torch.Tensor | None = None) -> None:
        """The layer's kernels, which began at `start`, are done: what they read is the forecast of the next step.
        `votes` int64 `[num_blocks]`: how many query rows chose each page, if eviction asks for it."""
        if self._tiers.trace is not None:
            self._tiers.trace.add("attention", start, time.perf_counter(), layer=self.layer)
        self._pool.release(self.layer)
        slots = np.flatnonzero(self._touched)
        if len(slots):
            self._touched[:] = 0
            found = self._pool.used(self.layer, slots)
            self._read.append(found[found >= 0])
        if self._read:
            blocks = np.concatenate(self._read)
            self._tiers.pipeline.chosen(self.layer, blocks)
            self._read.clear()
            if votes is not None:  # what nobody had to choose is read by all
                blocks = np.unique(blocks)
                mass = votes.numpy()[blocks].astype(np.float32)
                self._pool.weigh(self.layer, blocks, np.where(mass > 0, mass, mass.max(initial=1.0)))

    def place(self, blocks: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For new pages of `blocks` int32 `[n]`: positions (int64) and slots (int32), some at a time; what was to be
        written there must be when the next are asked for. Pages that find no room are left out: they are lost."""
        for start in range(0, len(blocks), self._batch):
            some = blocks[start : start + self._batch].numpy()
            unique, where = np.unique(some, return_inverse=True)  # slots are for distinct blocks
            try:
                slots = self._pool.allocate(self.layer, unique)
            except PoolFull:
                self._tiers.note_unplaced(unique)
                continue
            yield torch.arange(start, start + len(some)), torch.from_numpy(slots[where])
            if self.scoring is not None:
                self.scoring[unique] = self._slots[slots, : self.scoring.shape[1]]
            self._pool.commit(self.layer, unique)
            self._pool.release(self.layer)

    def seal(
        self,
        kernels: Kernels,
        layout: PageLayout,
        k: torch.Tensor,
        v: torch.Tensor,
        src_offsets: torch.Tensor,
        blocks: torch.Tensor,
        headers: torch.Tensor,
        *strides: int,
    ) -> None:
        """As `Kernels.seal`, into slots that new pages get."""
        for part, slots in self.place(blocks):
            kernels.seal(layout, k, v, src_offsets[part], blocks[part], headers, self._slots, slots, *strides)

    def slot_of(self, block: int) -> int:
        """The slot of one page, fetched if need be, until the next call of this object. Raises TierFault."""
        self.fetch(np.array([block], np.int32), scoring=False)
        return int(self.slot_table[block])
