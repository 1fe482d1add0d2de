"""The hot pool: a fixed number of slots a layer that hold the pages in use, above a store that holds all the others.

One thread, the compute thread, asks for pages and makes new ones; the page table changes only in its calls, so a kernel
that runs between them sees a table that stands still. Two background threads move bytes: one fetches what was asked for
ahead, one writes new pages to the store before their slots are needed. What `ensure` finds missing it reads itself (it
would wait anyway); a page that is on its way is waited for, never skipped; every wait has an end.

Fail closed: a page that can't be had is an exception that names it, never bytes of another page or zeros.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from .errors import PoolFull, TierFault
from .page_table import FETCHING, FILLING, RESIDENT, PageTable
from .slots import SlotMemory
from .tiers import REST, SCORING, Ints, PageSpec, Tier
from .trace import Trace
from .transfers import QUEUED, Fetch, PoolStats, Transfers

WHOLE = SCORING | REST
MIN_SLOTS = 4


class HotPool:
    """Slots over `memory`, one uint8 tensor `[num_slots, >= page_bytes]` a layer, above `store`.

    policy: what to evict (`eviction.POLICIES`). dirty_share: new pages stay in the pool alone up to this share of its
    slots; more are written to the store ahead of need. queue_pages: most pages a background thread may have waiting.
    fence: where kernels run on a device behind the compute thread, see `use_until`.
    timeout: seconds that a page or a slot is waited for.

    A call may ask for up to `wave` pages (None: a quarter of the slots); attention over more runs in waves. At least
    `MIN_SLOTS` slots are needed. Null blocks (vLLM's padding) must not be asked for.
    """

    def __init__(
        self,
        spec: PageSpec,
        memory: Sequence[torch.Tensor],
        store: Tier,
        policy: str = "lru",
        dirty_share: float = 0.5,
        queue_pages: int = 4096,
        timeout: float = 120.0,
        trace: Trace | None = None,
        bounce: bool = False,
        wave: int | None = None,
        fence: Callable[[], bool] | None = None,
    ) -> None:
        num_slots = len(memory[0])
        if num_slots < MIN_SLOTS or len(memory) != spec.num_layers or any(len(m) != num_slots for m in memory):
            raise ValueError(
                f"hot pool: found {len(memory)} layers of {num_slots} slots, needed {spec.num_layers} of the same "
                f"size, at least {MIN_SLOTS}: lower ktx.overcommit or give the KV cache more memory"
            )
        self.spec, self.wave = spec, num_slots // 4 if wave is None else min(wave, num_slots)
        self._table = PageTable(spec.num_layers, spec.num_blocks, num_slots, policy, spec.all_parts)
        slots, dirty_limit = [SlotMemory(m, spec, bounce) for m in memory], int(dirty_share * num_slots)
        self._queue_pages = queue_pages
        self._moves = Transfers(self._table, slots, store, dirty_limit, timeout, trace, fence)
        self._lock = self._moves.lock

    def slot_table(self, layer: int) -> torch.Tensor:
        """int32 `[num_blocks]`: each block's slot (-1: none), shared with the pool. A slot may be read only after
        `ensure` or `allocate` returned its page, until `release`."""
        return torch.from_numpy(self._table.slot_of[layer])

    def slot_flags(self, layer: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """uint8 `[num_slots]` each, shared with the pool: a slot's state (`RESIDENT`: its parts may be read) and its
        parts. Who finds a page readable by them, between calls of the compute thread, may read it without `ensure`."""
        return self._table.state[layer], self._table.have[layer]

    def used(self, layer: int, slots: Ints) -> npt.NDArray[np.int32]:
        """The pages in distinct `slots` `[n]` were found there and read: the blocks that are in them, -1 for none."""
        with self._lock:
            self._table.policies[layer].use(slots)
            self._moves.stats.hits += len(slots)
            return self._table.block_of[layer, slots]

    def ensure(self, layer: int, blocks: npt.ArrayLike, parts: int = WHOLE) -> npt.NDArray[np.int32]:
        """The slots `[n]` of pages, all of whose parts are there when it returns; held until `release(layer)`.

        Raises TierFault (positions in `blocks`) if pages can't be had, ValueError for more than `wave` distinct ones,
        PoolFull if the slots are held. Then the pages that came are there, and nothing new is held.
        """
        asked, parts, table = self._blocks(layer, blocks), self._parts(parts), self._table
        with self._lock:  # what nearly every call finds
            slots = table.slot_of[layer, asked]
            if len(asked) <= self.wave and self._there(layer, slots, parts).all():
                table.held[layer, slots] = True
                table.policies[layer].use(slots.astype(np.int64))
                self._moves.stats.hits += len(asked)
                return slots
        wanted = np.unique(asked)
        self._check_wave("ensure", len(wanted))
        with self._lock:
            stats = self._moves.stats
            before = table.held[layer].copy()
            slots = table.slot_of[layer, wanted]
            there = self._there(layer, slots, parts)
            coming = int((table.state[layer, slots[(slots >= 0) & ~there]] == FETCHING).sum())
            stats.hits += int(there.sum())
            stats.late += coming
            stats.misses += len(wanted) - int(there.sum()) - coming
            table.held[layer, slots[slots >= 0]] = True
        if not there.all():
            start = time.perf_counter()
            try:
                faults = self._moves.fetch(layer, wanted, parts)
                if faults:
                    raise TierFault({i: faults[b] for i, b in enumerate(asked.tolist()) if b in faults})
            except (TierFault, PoolFull):
                with self._lock:
                    table.held[layer] = before & (table.block_of[layer] >= 0)
                raise
            finally:
                self._moves.note_stall("wait for pages", layer, start)
        with self._lock:
            slots = table.slot_of[layer, asked]
            table.policies[layer].use(np.unique(slots).astype(np.int64))
            return slots

    def prefetch(self, layer: int, blocks: npt.ArrayLike, parts: int = WHOLE) -> list[Fetch]:
        """Asks for pages ahead; never waits. Returns tickets for `cancel`.

        A hint: pages that are there, on their way or not in the store are left out, and so are those for which no slot
        is free or clean, or that would overfill the queue (counted as `prefetch_dropped`).
        """
        wanted, parts = self._blocks(layer, blocks), self._parts(parts)
        with self._lock:
            wanted = np.unique(wanted)
            room = self._queue_pages - self._moves.queued()
            fetches, left_out = self._moves.request(layer, wanted, parts, max(room, 0), hold=False)
            self._moves.stats.prefetch_dropped += left_out
            return self._moves.enqueue(fetches)

    def has(self, layer: int, blocks: Ints) -> bool:
        """Whether whole pages of `blocks` int64 `[n]`, known to be in range, are all there or on their way."""
        slots = self._table.slot_of[layer, blocks]
        return bool((slots >= 0).all()) and bool((self._table.have[layer, slots] == self.spec.all_parts).all())

    def cancel(self, fetches: Sequence[Fetch]) -> None:
        """Takes back what wasn't begun yet; the rest arrives as if nothing had happened."""
        with self._lock:
            for fetch in fetches:
                self._moves.cancel(fetch)

    def allocate(self, layer: int, blocks: npt.ArrayLike, in_place: bool = False) -> npt.NDArray[np.int32]:
        """Slots `[n]` for new pages of distinct blocks, to be filled by the caller and then committed; held.

        What the pages held before is forgotten, everywhere; `in_place`: pages that have a slot keep it, so until they
        are filled their old content can be read there. Waits for the write-back of other pages if it must; raises
        PoolFull if that doesn't make room, ValueError for more than `wave` blocks.
        """
        wanted = self._blocks(layer, blocks)
        self._check_wave("allocate", len(wanted))
        end, start = time.monotonic() + self._moves.timeout, time.perf_counter()
        with self._lock:
            fresh = self._moves.refill(layer, wanted, end) if in_place else wanted
            self._moves.forget(layer, fresh)
            done, waited = 0, False
            while done < len(fresh):
                done += len(self._table.take(layer, fresh[done:], FILLING))
                if done < len(fresh):
                    waited = True
                    try:
                        self._moves.await_room(layer, len(fresh) - done, end)
                    except PoolFull:
                        self._table.forget(layer, wanted)
                        raise
        if waited:
            self._moves.note_stall("wait for slots", layer, start)
        return self._table.slot_of[layer, wanted]

    def commit(self, layer: int, blocks: npt.ArrayLike, ready: Callable[[], None] | None = None) -> None:
        """The pages allocated for `blocks` are complete, or will be once `ready()` returns (an event's `synchronize`;
        the latest of a layer stands for all before it). They are written to the store when their slots are needed."""
        wanted = self._blocks(layer, blocks)
        with self._lock:
            slots = self._table.slot_of[layer, wanted].astype(np.int64)
            if (slots < 0).any() or (self._table.state[layer, slots] != FILLING).any():
                raise ValueError(f"layer {layer}: commit of blocks that weren't allocated, or were committed before")
            if ready is not None:
                self._moves.ready[layer] = ready
            self._table.filled(layer, slots)
            self._lock.notify_all()

    def release(self, layer: int) -> None:
        """The kernels that read or filled the layer's held pages are done."""
        with self._lock:
            self._table.held[layer] = self._table.state[layer] == FILLING

    def use_until(self, layer: int, blocks: npt.ArrayLike, step: int) -> None:
        """Kernels of the device's step number `step` (from 1, rising) use the slots of these pages: even if the pages
        are forgotten or asked to make room, the slots go to no others until `finished` says that the step is done."""
        slots = self._table.slot_of[layer, self._blocks(layer, blocks)]
        with self._lock:
            self._table.busy[layer, slots[slots >= 0]] = step

    def finished(self, step: int) -> None:
        """The device has done its steps up to `step`. May be called from `fence`."""
        with self._lock:
            self._table.done = max(self._table.done, step)
            self._lock.notify_all()

    def weigh(self, layer: int, blocks: npt.ArrayLike, mass: npt.NDArray[np.float32]) -> None:
        """Tells the policy what share of the softmax distinct pages got in this step, `mass` `[n]`."""
        wanted = self._blocks(layer, blocks)
        with self._lock:
            slots = self._table.slot_of[layer, wanted].astype(np.int64)
            self._table.policies[layer].weigh(slots[slots >= 0], mass[slots >= 0])

    def forget(self, blocks: npt.ArrayLike) -> None:
        """The blocks get new content: every layer's page of them is void, wherever it is."""
        for layer in range(self.spec.num_layers):
            wanted = self._blocks(layer, blocks)
            with self._lock:
                self._moves.forget(layer, wanted)
                self._lock.notify_all()

    def flush(self, timeout: float = 600.0) -> None:
        """Waits until the store has every committed page. Raises TierFault for those that it refuses, TimeoutError."""
        end = time.monotonic() + timeout
        with self._lock:
            while self._table.num_writable().any() or self._table.cleaning.any():
                self._moves.urgent[:] = True
                self._lock.notify_all()
                if not self._lock.wait(max(0.0, end - time.monotonic())):
                    raise TimeoutError(f"hot pool: {int(self._table.dirty.sum())} pages aren't written yet")
            if refused := self._moves.refusals():
                raise TierFault(refused)

    def take_stats(self) -> PoolStats:
        """The counts since the last call."""
        with self._lock:
            stats, self._moves.stats = self._moves.stats, PoolStats()
            stats.evictions, self._table.evictions = self._table.evictions, 0
            stats.queue_depth = self._moves.queued()
            return stats

    def check_integrity(self) -> None:
        """Raises AssertionError if the pool's tables disagree."""
        with self._lock:
            self._table.check_integrity()
            assert all(fetch.state == QUEUED for fetch in self._moves.queue), "a fetch in the queue isn't waiting"

    def close(self) -> None:
        """Stops the background threads; new pages that aren't in the store are gone. The store stays open."""
        self._moves.close()

    def _blocks(self, layer: int, blocks: npt.ArrayLike) -> Ints:
        found = np.asarray(blocks, np.int64).reshape(-1)
        self.spec.pages(layer, found)  # checks
        return found

    def _parts(self, parts: int) -> int:
        return parts & self.spec.all_parts or self.spec.all_parts

    def _there(self, layer: int, slots: npt.NDArray[np.int32], parts: int) -> npt.NDArray[np.bool_]:
        """`[n]`: whether a slot (-1: none) has all of the parts, arrived."""
        table = self._table
        return (slots >= 0) & (table.state[layer, slots] == RESIDENT) & (table.have[layer, slots] & parts == parts)

    def _check_wave(self, what: str, count: int) -> None:
        if count > self.wave:
            raise ValueError(f"hot pool: {what} of {count} pages at once, a wave has at most {self.wave}")
