"""Pages beyond a GPU's memory: one engine rank's pinned host memory, and a `DevicePages` over it for each layer.

Host memory is the home of every sealed page; the device's slots are a cache that kernels keep (`triton/residency.py`).
Nothing here runs between kernels: the CPU only reads counters, some steps late. Where there are more blocks than host
memory holds, the others are on disk, and before each step `HostPlaces` brings up those that it may read.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..kv_quant import PageLayout
from ..offload import CapacityError, DiskTier, PageSpec, PoolStats, StepPlan
from ..offload.capacity import GIB
from ..offload.open_pages import NULL_BLOCK
from ..offload.tiers import allocate_host
from ..tiering import TierPlan, block_spec
from .device_step import DeviceSlots, Passed
from .host_places import Blocks, HostPlaces
from .tiered import checked_capacity
from .triton.device_pages import DevicePages
from .triton.residency import FETCHED, HITS, IN_PLACE

logger = logging.getLogger("vllm.ktx")

_PORTABLE_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped: kernels of any context address it


class DeviceTiers:
    """The pages of a rank: slots in `memory` (uint8 `[num_slots, payload_bytes]` a layer, in layer order, on the
    device) above `plan.host_bytes` of host memory, and `plan.disk_bytes` of disk if that doesn't hold all blocks.

    planes: `[num_blocks, scoring_bytes]` a layer on the device, for the scoring planes of all pages, or None: they are
    read in host memory. ranks: how many of an engine share the machine. Raises CapacityError, naming
    settings and numbers, where host memory or disk can't be had or don't hold `num_blocks`, or the memory can't be
    pinned.
    """

    def __init__(
        self,
        plan: TierPlan,
        layout: PageLayout,
        num_blocks: int,
        memory: list[torch.Tensor],
        planes: Sequence[torch.Tensor | None],
        ranks: int = 1,
    ) -> None:
        spec, device = block_spec(layout, len(memory), num_blocks), memory[0].device
        places = min(plan.places(layout, len(memory)), num_blocks)
        if plan.disk_bytes and places < num_blocks:
            _check_disk(plan, spec, places, ranks)
        self.warnings = list(checked_capacity(plan, spec, ranks).warnings)
        if plan.eviction == "attention":
            self.warnings.append("ktx.eviction='attention': on a GPU slots are given up by age alone ('clock')")
        if plan.disk_bytes and places == num_blocks:
            self.warnings.append("ktx.disk_gib does nothing: ktx.host_gib holds all pages")
        size = layout.payload_bytes
        self.page_bytes, self._page_size = size, layout.page_size
        self.counts = torch.zeros(len(memory), 3, dtype=torch.int64, device=device)
        self._seen, self._copied = torch.zeros(2, len(memory), 3, dtype=torch.int64)
        self._arrived: torch.cuda.Event | None = None
        self.places: HostPlaces | None = None
        self._table: DeviceSlots | None = None
        with ExitStack() as opened:  # a start-up that fails leaves nothing open
            registered: list[torch.Tensor] = []
            opened.callback(unpin, registered)
            if places < num_blocks:  # a block's layers side by side, as they go to disk
                whole = pinned(places, spec.page_bytes, device, registered)
                host = [whole[:, i * size : (i + 1) * size] for i in range(len(memory))]
                new_event = torch.cuda.Event if device.type == "cuda" else Passed
                self.places = HostPlaces(plan, spec, whole, new_event, ranks == 1)
                opened.callback(self.places.close)
                self._table = DeviceSlots(num_blocks, device)
            else:
                host = [pinned(num_blocks, size, device, registered) for _ in memory]
            self.layers = []
            for slots, pages, first, counts in zip(memory, host, planes, self.counts, strict=True):
                if not len(slots):  # of a small cache that vLLM profiles with
                    slots = torch.empty(1, size, dtype=torch.uint8, device=device)
                home = None if self._table is None else self._table.tensor
                self.layers.append(DevicePages(layout, slots, pages, first, counts, home))
            if device.type == "cuda":
                self._copied = self._copied.pin_memory()
            self.close = weakref.finalize(self, opened.pop_all().close)  # host memory and file go with the engine

    def begin_step(
        self, plan: StepPlan, context: Blocks, table: Any, sealed_fill: Blocks, begun: Blocks
    ) -> npt.NDArray[np.bool_] | None:
        """A step is about to be launched: `plan`, made of `context` `[rows]` and the block table `[rows, any]`, after
        which block b has `sealed_fill[b]` sealed tokens; `begun`: blocks that held something else before. Waits for
        what it reads and is on disk. Returns the rows that must go without their context (None: none), which
        `take_faults` explains.
        """
        if self.places is None:
            return None
        size = self._page_size
        rows = [table[row, : -(-int(n) // size)] for row, n in enumerate(context)]
        named = np.concatenate((*rows, np.empty(0, np.int32)))
        seals = np.concatenate((plan.evict[:, 1], plan.seal_fresh[:, 1], plan.seal_open[:, 1]))
        reads = named[(sealed_fill[named] > 0) & (named != NULL_BLOCK)]
        if len(seals):
            reads = reads[~np.isin(reads, seals)]
        lost = self.places.begin_step(np.concatenate((plan.reopen[:, 1], reads)), seals, begun)
        if not lost:
            return None
        return np.array([np.isin(own, list(lost)).any() for own in rows])

    def changes(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]] | None:
        """Blocks that have another place than the last step's kernels knew, and their places; for `apply`."""
        return None if self._table is None or self.places is None else self._table.changes(self.places.table)

    def apply(self, blocks: torch.Tensor, places: torch.Tensor) -> None:
        """What `changes` said, on the device, in stream order."""
        assert self._table is not None
        self._table.apply(blocks, places)

    def take_faults(self) -> set[int]:
        """Blocks that were lost since the last call."""
        return set() if self.places is None else self.places.take_faults()

    def take_stats(self) -> PoolStats:
        """Counts since the last call, as of a step that the device has finished: never waits. `misses`: fetched, or
        read in host memory."""
        stats = PoolStats() if self.places is None else self.places.take_stats()
        stats.hits = stats.misses = 0  # of the device, as told below
        if self._arrived is not None and not self._arrived.query():
            return stats
        total = (self._copied - self._seen).sum(0)
        self._seen.copy_(self._copied)
        hits, fetched, in_place = (int(total[i.value]) for i in (HITS, FETCHED, IN_PLACE))
        stats.hits, stats.misses = hits, fetched + in_place
        stats.fetched_bytes += fetched * self.page_bytes
        self._copied.copy_(self.counts, non_blocking=True)
        if self.counts.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        return stats


def _check_disk(plan: TierPlan, spec: PageSpec, places: int, ranks: int) -> None:
    """Raises CapacityError if the disk doesn't hold all blocks; those in host memory have their place there too."""
    enough, host = DiskTier.file_bytes(spec), spec.total_bytes
    if enough > plan.disk_bytes:
        raise CapacityError(
            f"KTX: on a GPU ktx.disk_gib holds every page if ktx.host_gib ({places} of {spec.num_blocks} blocks) "
            f"doesn't: raise ktx.disk_gib to {math.ceil(enough * ranks / GIB * 100) / 100:g} or ktx.host_gib to "
            f"{math.ceil(host * ranks / GIB * 100) / 100:g}, or lower ktx.overcommit"
        )


def pinned(rows: int, row_bytes: int, device: torch.device, registered: list[torch.Tensor]) -> torch.Tensor:
    """uint8 `[rows, row_bytes]` in host memory that kernels on `device` can address; plain memory for the CPU.

    Locks exactly that much and adds it to `registered`; where the driver refuses, torch's own pinned memory, which may
    take up to twice as much. Raises CapacityError if there is neither.
    """
    memory = torch.from_numpy(allocate_host(rows, row_bytes))
    if device.type != "cuda":
        return memory
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE_MAPPED))
    if error == 0:
        registered.append(memory)
        return memory
    del memory
    try:
        torch.zeros(1, device=device)  # CUDA reports the failure once more, to whoever launches next
    except RuntimeError:
        pass
    logger.warning(
        "KTX: host memory can't be locked where it is (CUDA error %d), so torch allocates it, which may take up to "
        "twice ktx.host_gib",
        error,
    )
    try:
        return torch.empty(rows, row_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as reason:
        raise CapacityError(
            f"KTX: {rows * row_bytes / GIB:.2f} GiB of host memory for a layer's pages can't be pinned (CUDA error "
            f"{error}; {reason}), and kernels read no other: lower ktx.host_gib, allow more locked memory (`ulimit -l`,"
            " the container's limit), or set ktx.overcommit to 1"
        ) from reason


def unpin(registered: list[torch.Tensor]) -> None:
    if registered and torch.cuda.is_available():
        torch.cuda.synchronize()
        for memory in registered:
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
    registered.clear()
