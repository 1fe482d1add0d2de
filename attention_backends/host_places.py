"""Which blocks of a GPU's rank are in its pinned host memory, where fewer fit than there are, the others being on disk.

Kernels find a block by its place in host memory, and can't wait for a disk: every block that a step may read has a
place before its kernels are launched, and what is on disk is content that no running request names (cached prefixes).
The table of places is the CPU's, a `HotPool` whose one layer of slots is host memory and whose pages are whole blocks,
all layers side by side; a step gets what changed with its other arrays.

The device runs behind the CPU. So a place is given away only when the last step that names it is done, and is written
to disk only when the step that filled it is: an event a step says so. Sealing is planned here and done by kernels.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..metrics import STATS
from ..offload import DiskTier, HotPool, PageSpec, PoolFull, PoolStats, TierFault
from ..tiering import TierPlan

logger = logging.getLogger("vllm.ktx")
Blocks = npt.NDArray[np.int32]


class HostPlaces:
    """`memory`: uint8 `[places, spec.page_bytes]` of host memory, over a file for all blocks of `spec` (one layer,
    whole blocks). new_event: what marks the end of a step's kernels, with `record`, `query`, `synchronize`. alone:
    whether no other rank would use a lost block. Raises CapacityError if the file can't be had.

    `table`: int32 `[num_blocks]`, each block's place, -1 for none; changes in `begin_step` only.
    """

    def __init__(
        self, plan: TierPlan, spec: PageSpec, memory: torch.Tensor, new_event: Callable[[], Any], alone: bool = True
    ) -> None:
        with ExitStack() as opened:  # a start-up that fails leaves nothing open
            disk = DiskTier(spec, plan.disk_dir)  # type: ignore[arg-type]
            opened.callback(disk.close)
            policy = "clock" if plan.eviction == "clock" else "lru"
            self.pool = HotPool(spec, [memory], disk, policy, wave=len(memory), fence=self._await_step)
            opened.callback(self.pool.close)
            self.close = opened.pop_all().close
        self.table: npt.NDArray[np.int32] = self.pool.slot_table(0).numpy()
        self._new_event, self._alone = new_event, alone
        self._running: deque[tuple[int, Any]] = deque()  # steps whose kernels may still run, the oldest first
        self._step = 0
        self._sealed = np.empty(0, np.int64)  # by the kernels of the last step
        self._faults: set[int] = set()  # not told yet
        self._told: set[int] = set()  # void since they were told

    def begin_step(self, reads: Blocks, seals: Blocks, begun: Blocks) -> set[int]:
        """A step is about to be launched, all kernels of earlier ones have been: it reads the sealed pages of `reads`,
        seals `seals` and begins to fill `begun`, whose content of before is void. Waits for what is on disk.

        Returns the blocks that can't be had or found no place; rows that read them must go without, and `take_faults`
        names them. Raises RuntimeError where other ranks would use them.
        """
        self._end_last_step()
        self.pool.forget(begun)
        filled: npt.NDArray[np.int64] = np.unique(seals).astype(np.int64)
        self._told -= {*begun.tolist(), *filled.tolist()}
        missing = self._fetch(reads)
        unplaced = self._make_room(filled[~np.isin(filled, list(missing))])
        self.pool.use_until(0, reads, self._step)
        self.pool.use_until(0, filled, self._step)
        if lost := missing | unplaced:
            # A step that was scheduled before the scheduler knew asks again: told twice, it would count as two tries.
            self._lose(lost, lost - self._told)
            self._told |= missing
        self._sealed = filled[self.table[filled] >= 0]
        return lost

    def take_faults(self) -> set[int]:
        """Blocks that were lost since the last call."""
        faults, self._faults = self._faults, set()
        return faults

    def take_stats(self) -> PoolStats:
        return self.pool.take_stats()

    def _end_last_step(self) -> None:
        """Its kernels are launched: an event tells when they are done, and that what they sealed can be read then."""
        event = self._new_event()
        event.record()
        self._running.append((self._step, event))
        self._step += 1
        while self._running and self._running[0][1].query():
            self.pool.finished(self._running.popleft()[0])
        if len(self._sealed):
            self.pool.commit(0, self._sealed, event.synchronize)
        self.pool.release(0)

    def _await_step(self) -> bool:
        if not self._running:
            return False
        step, event = self._running.popleft()
        event.synchronize()
        self.pool.finished(step)
        return True

    def _fetch(self, reads: Blocks) -> set[int]:
        """Every block of `reads` has its place, or is returned."""
        lost: set[int] = set()
        if len(reads) > self.pool.wave:
            reads = reads[np.sort(np.unique(reads, return_index=True)[1])]
        while len(reads):
            try:
                if len(reads) > self.pool.wave:
                    raise PoolFull(f"a step reads {len(reads)} blocks, host memory holds {self.pool.wave}")
                self.pool.ensure(0, reads)
                break
            except TierFault as fault:
                gone = {page.block for page in fault.faults.values()}
                if gone - self._told:
                    logger.error("KTX: %s; the requests that read it are computed again", fault)
            except PoolFull as full:  # the last rows go without
                gone = set(reads[min(self.pool.wave, len(reads) * 7 // 8) :].tolist())
                logger.error("KTX: %d blocks find no place in host memory: %s", len(gone), full)
            lost |= gone
            reads = reads[~np.isin(reads, list(gone))]
        return lost

    def _make_room(self, seals: npt.NDArray[Any]) -> set[int]:
        """Every block of `seals` has a place to be filled, or is returned."""
        there = self.table[seals] >= 0
        if there.any():
            self.pool.allocate(0, seals[there], in_place=True)
        rest, lost = seals[~there], set()
        for start in range(0, len(rest), step := max(1, self.pool.wave // 4)):
            some = rest[start : start + step]
            try:
                self.pool.allocate(0, some)
            except PoolFull as full:
                logger.error("KTX: %d new pages find no place in host memory: %s", len(some), full)
                lost |= set(some.tolist())
        return lost

    def _lose(self, lost: set[int], untold: set[int]) -> None:
        if not self._alone:
            raise RuntimeError(f"KTX: blocks {sorted(lost)} are lost on one of several ranks: the engine must stop")
        STATS.tier_faults += len(untold)
        self._faults |= untold
        self.pool.forget(sorted(lost))
