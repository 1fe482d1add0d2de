"""Pages beyond a GPU's memory: one engine rank's pinned host memory, and a `DevicePages` over it for each layer.

Host memory is the home of every sealed page; the device's slots are a cache that kernels keep (`triton/residency.py`).
Nothing here runs between kernels: after construction the CPU only reads counters, some steps late. There is no disk
below yet: host memory must hold all blocks.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

import torch

from ..kv_quant import PageLayout
from ..offload import CapacityError, PoolStats
from ..offload.capacity import GIB
from ..offload.tiers import allocate_host
from ..tiering import TierPlan, page_spec
from .tiered import checked_capacity
from .triton.device_pages import DevicePages
from .triton.residency import FETCHED, HITS, IN_PLACE

logger = logging.getLogger("vllm.ktx")

_PORTABLE_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped: kernels of any context address it


class DeviceTiers:
    """The pages of a rank: slots in `memory` (uint8 `[num_slots, payload_bytes]` a layer, in layer order, on the
    device) above `plan.host_bytes` of host memory.

    planes: `[num_blocks, scoring_bytes]` a layer on the device, for the scoring planes of all pages, or None: they are
    read in host memory. ranks: how many of an engine share the machine. Raises CapacityError, naming
    settings and numbers, where host memory can't be had, doesn't hold `num_blocks`, or can't be pinned, ValueError for
    a disk.
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
        if plan.disk_bytes:
            raise ValueError(
                f"ktx.disk_gib={plan.disk_bytes * ranks / GIB:g}: on a GPU pages go to host memory only; set it to 0 "
                "and raise ktx.host_gib"
            )
        spec, device = page_spec(layout, len(memory), num_blocks), memory[0].device
        self.warnings = list(checked_capacity(plan, spec, ranks).warnings)
        if plan.eviction == "attention":
            self.warnings.append("ktx.eviction='attention': on a GPU slots are given up by age alone ('clock')")
        self.page_bytes, self.counts = spec.page_bytes, torch.zeros(len(memory), 3, dtype=torch.int64, device=device)
        registered: list[torch.Tensor] = []
        self._seen, self._copied = torch.zeros(2, len(memory), 3, dtype=torch.int64)
        self._arrived: torch.cuda.Event | None = None
        self.close = weakref.finalize(self, _unregister, registered)  # host memory goes with the engine
        self.layers = []
        for slots, first, counts in zip(memory, planes, self.counts, strict=True):
            if not len(slots):  # of a small cache that vLLM profiles with
                slots = torch.empty(1, spec.page_bytes, dtype=torch.uint8, device=device)
            host = pinned(num_blocks, spec.page_bytes, device, registered)
            self.layers.append(DevicePages(layout, slots, host, first, counts))
        if device.type == "cuda":
            self._copied = self._copied.pin_memory()

    def take_stats(self) -> PoolStats:
        """Counts since the last call, as of a step that the device has finished: never waits. `misses`: fetched, or
        read in host memory."""
        stats = PoolStats()
        if self._arrived is not None and not self._arrived.query():
            return stats
        total = (self._copied - self._seen).sum(0)
        self._seen.copy_(self._copied)
        hits, fetched, in_place = (int(total[i.value]) for i in (HITS, FETCHED, IN_PLACE))
        stats.hits, stats.misses, stats.fetched_bytes = hits, fetched + in_place, fetched * self.page_bytes
        self._copied.copy_(self.counts, non_blocking=True)
        if self.counts.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        return stats


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


def _unregister(registered: list[torch.Tensor]) -> None:
    if registered and torch.cuda.is_available():
        torch.cuda.synchronize()
        for memory in registered:
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
    registered.clear()
