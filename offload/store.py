"""The backing store below the device: host memory first, then disk, as one tier.

Where a block's pages live follows from its id, so the store can't run out and needs no allocator. If the disk holds all
blocks, every page has its *home* on disk; else the first blocks, those that don't fit, have their home in host memory.
What is left of host memory caches pages of the disk: writes land there and go to disk when their frame is needed
(a store whose working set fits host memory never touches the disk), whole pages that were read are promoted, and the
longest unused frame makes room. Chosen over homes alone (the first H blocks in RAM, the rest on disk) because block ids
say nothing about use, and over moving pages between equal places because a promotion would then cost a disk write.

A cached page that is being written to disk can be read; a write to it waits for that. Promotions take clean frames
only, so no read ever waits for a disk write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .errors import CapacityError, PageFault, TierFault
from .tiers import REST, SCORING, Bytes, HostTier, Ints, PageSpec, Tier, allocate_host

CLEAN_BATCH = 64


def host_blocks_needed(spec: PageSpec, disk_blocks: int) -> int:
    """Blocks whose home must be host memory if `disk_blocks` have theirs on disk."""
    return max(0, spec.num_blocks - disk_blocks)


class TieredStore(Tier):
    """Host memory of `host_bytes` over `disk`, which holds the last `disk.spec.num_blocks` blocks of `spec`.

    Either may be absent (`host_bytes=0`, `disk=None`). Raises CapacityError, naming the settings, if both together
    don't hold all blocks or the memory can't be had.
    """

    def __init__(self, spec: PageSpec, host_bytes: int, disk: Tier | None = None) -> None:
        self.spec, self._disk = spec, disk
        self._home_blocks = host_blocks_needed(spec, disk.spec.num_blocks if disk else 0)
        block_bytes = spec.num_layers * spec.page_bytes
        if self._home_blocks * block_bytes > host_bytes:
            raise CapacityError(
                f"the store needs {spec.num_blocks} blocks of {block_bytes} bytes; ktx.host_gib holds "
                f"{host_bytes // block_bytes}, the disk {spec.num_blocks - self._home_blocks}: raise ktx.host_gib to "
                f"{self._home_blocks * block_bytes / 2**30:.2f} or ktx.disk_gib"
            )
        self._home = HostTier(replace(spec, num_blocks=self._home_blocks)) if self._home_blocks else None
        frames = (host_bytes - self._home_blocks * block_bytes) // spec.page_bytes if disk else 0
        self._cache = _Frames(disk, min(frames, disk.spec.num_pages)) if disk and frames else None
        self.name = "+".join(name for name, there in (("host", host_bytes), ("disk", disk)) if there)

    def read(self, pages: Ints, out: Bytes, rows: Ints, parts: int = SCORING | REST) -> None:
        self._split(pages, lambda tier, own, at: tier.read(own, out, rows[at], parts))

    def write(self, pages: Ints, source: Bytes, rows: Ints) -> None:
        self._split(pages, lambda tier, own, at: tier.write(own, source, rows[at]))

    def close(self) -> None:
        if self._disk:
            self._disk.close()

    def check_integrity(self) -> None:
        """Raises AssertionError if the cache's tables disagree."""
        if self._cache:
            self._cache.check_integrity()

    def _split(self, pages: Ints, call: Callable[[Tier, Ints, Ints], None]) -> None:
        """Calls for the pages of each home, with their addresses there and their positions in the batch."""
        if self._home_blocks == self.spec.num_blocks:
            assert self._home is not None
            call(self._home, pages, np.arange(len(pages)))
            return
        layers, blocks = np.divmod(pages, self.spec.num_blocks)
        at_home = blocks < self._home_blocks
        faults: dict[int, PageFault] = {}
        for tier, at, first in (
            (self._home, np.flatnonzero(at_home), 0),
            (self._cache or self._disk, np.flatnonzero(~at_home), self._home_blocks),
        ):
            if not len(at):
                continue
            assert tier is not None
            try:
                call(tier, layers[at] * tier.spec.num_blocks + blocks[at] - first, at)
            except TierFault as fault:
                for position, why in fault.faults.items():
                    i = int(at[position])
                    why.layer, why.block = self.spec.name(int(pages[i]))
                    faults[i] = why
        if faults:
            raise TierFault(faults)


class _Frames(Tier):
    """A write-back cache of whole pages of `disk`, `count` frames in host memory."""

    name = "host"

    def __init__(self, disk: Tier, count: int) -> None:
        self.spec, self._disk = disk.spec, disk
        self._memory = allocate_host(count, disk.spec.page_bytes)
        self._frame_of = np.full(disk.spec.num_pages, -1, np.int32)
        self._version = np.zeros(disk.spec.num_pages, np.uint32)  # counts writes: a read that a write overtook is stale
        self._page_of = np.full(count, -1, np.int64)
        self._dirty = np.zeros(count, bool)
        self._cleaning = np.zeros(count, bool)
        self._users = np.zeros(count, np.int32)  # calls that are copying to or from the frame
        self._used = np.zeros(count, np.int64)
        self._clock = 0
        self._lock = threading.Condition()

    def read(self, pages: Ints, out: Bytes, rows: Ints, parts: int = SCORING | REST) -> None:
        with self._lock:
            frames = self._frame_of[pages].astype(np.int64)
            hit = frames >= 0
            self._enter(frames[hit])
            misses = np.flatnonzero(~hit)
            versions = self._version[pages[misses]]
        for part in self.spec.wanted(parts):
            low, high = self.spec.parts[part]
            out[rows[hit], low:high] = self._memory[frames[hit], low:high]
        self._leave(frames[hit])
        if not len(misses):
            return
        try:
            self._disk.read(pages[misses], out, rows[misses], parts)
        except TierFault as fault:
            raise TierFault({int(misses[i]): why for i, why in fault.faults.items()}) from fault
        if parts & self.spec.all_parts == self.spec.all_parts:
            self._promote(pages[misses], versions, out, rows[misses])

    def write(self, pages: Ints, source: Bytes, rows: Ints) -> None:
        with self._lock:
            self._version[pages] += 1
        faults: dict[int, PageFault] = {}
        for start in range(0, len(pages), CLEAN_BATCH):
            part = slice(start, start + CLEAN_BATCH)
            try:
                self._write_some(pages[part], source, rows[part])
            except TierFault as fault:
                faults |= {start + i: why for i, why in fault.faults.items()}
        with self._lock:  # again: a read that began in between is stale too
            self._version[pages] += 1
        if faults:
            raise TierFault(faults)

    def check_integrity(self) -> None:
        used = np.flatnonzero(self._page_of >= 0)
        assert (self._frame_of[self._page_of[used]] == used).all(), "frame_of is not the inverse of page_of"
        assert (self._frame_of >= 0).sum() == len(used), "a page points to a frame that is not its own"
        assert not self._users.any() and not self._cleaning.any(), "a frame is in use while no call runs"

    def _write_some(self, pages: Ints, source: Bytes, rows: Ints) -> None:
        frames = self._frames_for(pages)
        kept = frames >= 0
        self._memory[frames[kept]] = source[rows[kept], : self.spec.page_bytes]
        with self._lock:
            self._dirty[frames[kept]] = True
        self._leave(frames[kept])
        through = np.flatnonzero(~kept)
        if len(through):
            try:
                self._disk.write(pages[through], source, rows[through])
            except TierFault as fault:
                raise TierFault({int(through[i]): why for i, why in fault.faults.items()}) from fault

    def _frames_for(self, pages: Ints) -> Ints:
        """Frames for pages to be written, in use by the caller; -1 where there is none even after cleaning."""
        with self._lock:
            while self._cleaning[self._resident(pages)].any():
                self._lock.wait()
            frames = self._frame_of[pages].astype(np.int64)
            self._enter(frames[frames >= 0])
            fresh = np.flatnonzero(frames < 0)
        if len(fresh) > (found := len(self._clean_frames(len(fresh)))):
            self._clean(max(len(fresh) - found, CLEAN_BATCH))
        with self._lock:
            again = self._frame_of[pages[fresh]].astype(np.int64)  # a read may have promoted one meanwhile
            self._enter(again[again >= 0])
            frames[fresh[again >= 0]] = again[again >= 0]
            fresh = fresh[again < 0]
            taken = self._take(len(fresh), pages[fresh])
            frames[fresh[: len(taken)]] = taken
        return frames

    def _promote(self, pages: Ints, versions: np.ndarray, out: Bytes, rows: Ints) -> None:
        """Keeps pages that were read, as far as clean frames go, unless they were written in the meantime."""
        with self._lock:
            fresh = (self._version[pages] == versions) & (self._frame_of[pages] < 0)
            pages, first = np.unique(pages[fresh], return_index=True)
            rows = rows[fresh][first]
            # In use before they are mapped, and their bytes aren't there yet: copy with the lock held.
            frames = self._take(len(pages), pages)
            self._memory[frames] = out[rows[: len(frames)], : self.spec.page_bytes]
        self._leave(frames)

    def _take(self, count: int, pages: Ints) -> Ints:
        """Gives up to `count` clean frames to pages; in use by the caller; the lock is held."""
        frames = self._clean_frames(count)
        old = self._page_of[frames]
        owned = (old >= 0) & (self._frame_of[old] == frames)
        self._frame_of[old[owned]] = -1
        self._page_of[frames] = pages[: len(frames)]
        self._frame_of[pages[: len(frames)]] = frames
        self._enter(frames)
        return frames

    def _clean_frames(self, count: int) -> Ints:
        with self._lock:
            found = np.flatnonzero(~self._dirty & ~self._cleaning & (self._users == 0))
            if len(found) > count:
                found = found[np.argpartition(self._used[found], count)[:count]]
            return found

    def _clean(self, count: int) -> None:
        """Writes the `count` longest unused dirty frames to disk; those that fail stay dirty."""
        with self._lock:
            frames = np.flatnonzero(self._dirty & ~self._cleaning & (self._users == 0))
            frames = frames[np.argsort(self._used[frames])[:count]]
            self._cleaning[frames] = True
            pages = self._page_of[frames]
        failed = np.ones(len(frames), bool)
        try:
            self._disk.write(pages, self._memory, frames)
            failed[:] = False
        except TierFault as fault:
            failed[:] = False
            failed[list(fault.faults)] = True
        finally:
            with self._lock:
                self._dirty[frames[~failed]] = False
                self._cleaning[frames] = False
                self._lock.notify_all()

    def _resident(self, pages: Ints) -> Ints:
        frames = self._frame_of[pages]
        return frames[frames >= 0].astype(np.int64)

    def _enter(self, frames: Ints) -> None:
        np.add.at(self._users, frames, 1)
        self._clock += 1
        self._used[frames] = self._clock

    def _leave(self, frames: Ints) -> None:
        with self._lock:
            np.subtract.at(self._users, frames, 1)
