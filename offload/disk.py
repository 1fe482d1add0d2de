"""The tier on disk: one private file, read and written in large direct transfers, each page checked on the way back.

A page is one run of the file, padded to 4096 bytes, so that a whole page is one transfer; a part of it is the blocks
that hold the part. Neighbouring pages are one transfer of up to 1 MiB, also for a part, if the bytes between are few:
disks count transfers before they count bytes.

A batch is cut into chunks of staging memory; while the disk works on some, others are checked and copied. A transfer
that fails or comes back short is tried again page by page, so that one bad sector costs one page.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .checksum import ChecksumTable
from .errors import PageCorrupt, PageFault, PageIOError, PageMissing, PageTimeout, TierFault
from .io import READ, WRITE, Ints, IoEngine, Ticket, make_engine
from .private_file import open_private
from .staging import ALIGN, Buffer, Staging
from .tiers import REST, SCORING, Bytes, PageSpec, Tier

MERGE_BYTES = 1 << 20
GAP_BYTES = 16 << 10  # read through gaps up to this: a transfer of its own would take longer
CHUNK_BYTES = 2 << 20
WARM_BYTES = 256 << 10  # sums and copies take turns on pieces that stay in a core's cache
NUM_CHUNKS = 8
IN_FLIGHT = NUM_CHUNKS // 2  # chunks of one caller: two side by side never starve each other


@dataclass
class _Chunk:
    """Some pages of a batch, in order of address. Page i is staged at byte `i * stride` of the buffer."""

    pages: Ints
    rows: Ints  # in the caller's memory
    positions: Ints  # in the caller's batch
    buffer: Buffer
    ticket: Ticket
    starts: Ints  # first page of each transfer
    counts: Ints  # pages of each transfer
    lengths: Ints  # bytes of each transfer
    sums: list[np.ndarray]  # of each part, if the chunk is written
    stuck: Ticket | None = None  # the system may still use the buffer for it


@dataclass
class _Batch:
    """One call of `read` or `write`."""

    op: int
    parts: list[int]
    first: int  # bytes of a page that are moved: from here
    end: int  # to here
    memory: Bytes
    faults: dict[int, PageFault]
    deadline: float  # moves on with every chunk that finishes


class DiskTier(Tier):
    """Pages in a file of `file_bytes(spec)` bytes in `folder`.

    engine: what moves the bytes, closed with the tier; None: `make_engine()`.
    timeout: seconds without any progress after which pages count as lost.
    direct: bypass the page cache where the filesystem allows. verify: check the sums of what is read.
    Raises CapacityError, naming the setting, if the file can't be made or its space not be taken.
    """

    name = "disk"

    def __init__(
        self,
        spec: PageSpec,
        folder: Path,
        engine: IoEngine | None = None,
        timeout: float = 60.0,
        direct: bool = True,
        verify: bool = True,
        merge_bytes: int = MERGE_BYTES,
    ) -> None:
        self.spec, self._timeout, self._verify, self.merge_bytes = spec, timeout, verify, min(merge_bytes, CHUNK_BYTES)
        self.stride = _pad(spec.page_bytes)
        with ExitStack() as opened:  # a start-up that fails leaves nothing open
            self.engine = make_engine() if engine is None else engine
            opened.callback(self.engine.close)
            self.fd, self.direct = open_private(folder, self.file_bytes(spec), direct)
            opened.callback(os.close, self.fd)
            self.staging = Staging(NUM_CHUNKS, max(CHUNK_BYTES, self.stride), self.engine)
            self._checksums = ChecksumTable(spec.num_pages, len(spec.parts))
            opened.pop_all()
        self.retries = 0  # transfers that had to be done again, since the start

    @staticmethod
    def file_bytes(spec: PageSpec) -> int:
        """Size of the file for these pages."""
        return spec.num_pages * _pad(spec.page_bytes)

    def read(self, pages: Ints, out: Bytes, rows: Ints, parts: int = SCORING | REST) -> None:
        wanted = self.spec.wanted(parts)
        batch = self._batch(READ, wanted, out)
        known = np.logical_and.reduce([self._checksums.known(part, pages) for part in wanted])
        for i in np.flatnonzero(~known).tolist():
            batch.faults[i] = PageMissing(*self.spec.name(int(pages[i])), "it was never written")
        self._run(batch, pages, rows, np.flatnonzero(known))

    def write(self, pages: Ints, source: Bytes, rows: Ints) -> None:
        batch = self._batch(WRITE, self.spec.wanted(self.spec.all_parts), source)
        self._checksums.invalidate(pages)
        self._run(batch, pages, rows, np.arange(len(pages)))

    def close(self) -> None:
        self.engine.close()
        os.close(self.fd)

    def _batch(self, op: int, parts: list[int], memory: Bytes) -> _Batch:
        first = self.spec.parts[parts[0]][0] // ALIGN * ALIGN
        end = _pad(self.spec.parts[parts[-1]][1])
        return _Batch(op, parts, first, end, memory, {}, time.monotonic() + self._timeout)

    def _run(self, batch: _Batch, pages: Ints, rows: Ints, positions: Ints) -> None:
        """Moves the pages at `positions`, a few chunks at a time; raises TierFault at the end if pages failed."""
        positions = positions[np.argsort(pages[positions], kind="stable")]
        flying: deque[_Chunk] = deque()
        for own in self._cut(batch, pages, positions):
            buffer = None
            while buffer is None:
                if len(flying) < IN_FLIGHT:
                    buffer = self.staging.acquire(0.0 if flying else _left(batch.deadline))
                if buffer is None and not flying:
                    break
                if buffer is None:
                    self._finish(batch, flying.popleft())
            if buffer is None:
                self._fail(batch, pages[own], own, errno.ETIMEDOUT)
            else:
                flying.append(self._start(batch, pages[own], rows[own], own, buffer))
        while flying:
            self._finish(batch, flying.popleft())
        if batch.faults:
            raise TierFault(batch.faults)

    def _cut(self, batch: _Batch, pages: Ints, positions: Ints) -> Iterator[Ints]:
        """Chunks of sorted positions: what a buffer holds, and not more transfers than half of what the engine has in
        flight, so that the disk still has the other half to do while a chunk is checked."""
        bounds = np.append(self._transfers(batch, pages[positions]), len(positions))
        most, first = max(CHUNK_BYTES // self.stride, 1), 0
        while first < len(bounds) - 1:
            fits = int(np.searchsorted(bounds, bounds[first] + most, "right")) - 1
            last = min(max(fits, first + 1), first + max(self.engine.depth // 2, 1))
            yield positions[bounds[first] : bounds[last]]
            first = last

    def _transfers(self, batch: _Batch, pages: Ints) -> Ints:
        """The first page of each transfer of sorted pages: one that doesn't follow the page before, or would make the
        transfer too long."""
        if not len(pages):
            return pages
        gap = self.stride - (batch.end - batch.first)
        most = max(self.merge_bytes // self.stride, 1) if gap <= GAP_BYTES else 1
        steps = np.flatnonzero(np.diff(pages, prepend=pages[0] - 2) != 1)
        in_run = np.arange(len(pages)) - np.repeat(steps, np.diff(steps, append=len(pages)))
        return np.flatnonzero(in_run % most == 0)

    def _start(self, batch: _Batch, pages: Ints, rows: Ints, positions: Ints, buffer: Buffer) -> _Chunk:
        sums = [np.empty(len(pages), np.uint32) for _ in batch.parts]
        if batch.op == WRITE:
            staged = self._staged(buffer, len(pages))[:, : self.spec.page_bytes]
            for piece in self._pieces(len(pages)):
                staged[piece] = batch.memory[rows[piece], : self.spec.page_bytes]
                for part in batch.parts:
                    low, high = self.spec.parts[part]
                    sums[part][piece] = self._checksums.sums(part, pages[piece], staged[piece, low:high])
        width = batch.end - batch.first
        starts = self._transfers(batch, pages)
        counts = np.diff(starts, append=len(pages))
        lengths = (counts - 1) * self.stride + width
        offsets = pages[starts] * self.stride + batch.first
        addresses = buffer.address + starts * self.stride + batch.first
        ticket = self.engine.submit(batch.op, self.fd, offsets, addresses, lengths, _left(batch.deadline))
        return _Chunk(pages, rows, positions, buffer, ticket, starts, counts, lengths, sums)

    def _finish(self, batch: _Batch, chunk: _Chunk) -> None:
        """Waits for a chunk, checks it, copies what was read."""
        try:
            results = self.engine.wait(chunk.ticket, _left(batch.deadline))
        except TimeoutError:
            self.staging.abandon(chunk.buffer, chunk.ticket)
            self._fail(batch, chunk.pages, chunk.positions, errno.ETIMEDOUT)
            return
        try:
            good = np.repeat(results == chunk.lengths, chunk.counts)
            if not good.all():
                late = np.repeat(results == -errno.ETIMEDOUT, chunk.counts)
                self._fail(batch, chunk.pages[late], chunk.positions[late], errno.ETIMEDOUT)
                good[self._redo(batch, chunk, np.flatnonzero(~good & ~late))] = True
            self._settle(batch, chunk, np.flatnonzero(good))
        finally:
            if chunk.stuck is None:
                self.staging.release(chunk.buffer)
            else:
                self.staging.abandon(chunk.buffer, chunk.stuck)
        batch.deadline = time.monotonic() + self._timeout

    def _settle(self, batch: _Batch, chunk: _Chunk, places: Ints) -> None:
        """Records what was written; checks what was read, and copies what is right."""
        if batch.op == WRITE:
            for part, sums in zip(batch.parts, chunk.sums, strict=True):
                self._checksums.record(part, chunk.pages[places], sums[places])
            return
        every = self._staged(chunk.buffer, len(chunk.pages))
        first, end = self.spec.parts[batch.parts[0]][0], self.spec.parts[batch.parts[-1]][1]
        for piece in self._pieces(len(places)):
            here = places[piece]
            staged = every[piece] if len(places) == len(every) else every[here]
            right = np.ones(len(here), bool)
            for part in batch.parts if self._verify else ():
                low, high = self.spec.parts[part]
                right &= self._checksums.matches(part, chunk.pages[here], staged[:, low:high])
            if not right.all():
                for place in here[~right].tolist():
                    layer, block = self.spec.name(int(chunk.pages[place]))
                    fault = PageCorrupt(layer, block, "the bytes on disk don't match their checksum")
                    batch.faults[int(chunk.positions[place])] = fault
                here, staged = here[right], staged[right]
            batch.memory[chunk.rows[here], first:end] = staged[:, first:end]

    def _redo(self, batch: _Batch, chunk: _Chunk, places: Ints) -> Ints:
        """Repeats failed transfers page by page; returns the places that are right now."""
        width, right = batch.end - batch.first, []
        for place in places.tolist():
            self.retries += 1
            offset = int(chunk.pages[place]) * self.stride + batch.first
            address = chunk.buffer.address + place * self.stride + batch.first
            one = np.array([[offset], [address], [width]])
            ticket = self.engine.submit(batch.op, self.fd, one[0], one[1], one[2], self._timeout)
            try:
                moved = int(self.engine.wait(ticket, self._timeout)[0])
            except TimeoutError:  # the rest would wait as long
                chunk.stuck = ticket
                late = places[places >= place]
                self._fail(batch, chunk.pages[late], chunk.positions[late], errno.ETIMEDOUT)
                break
            if moved == width:
                right.append(place)
            else:
                at = slice(place, place + 1)
                self._fail(batch, chunk.pages[at], chunk.positions[at], max(-moved, 0), f"{moved} of {width} bytes")
        return np.array(right, np.int64)

    def _fail(self, batch: _Batch, pages: Ints, positions: Ints, code: int, short: str = "") -> None:
        """Notes that pages failed with errno `code`, or came back short (0)."""
        verb = "read" if batch.op == READ else "write"
        for page, position in zip(pages.tolist(), positions.tolist(), strict=True):
            layer, block = self.spec.name(page)
            fault: PageFault
            if code == errno.ETIMEDOUT:
                fault = PageTimeout(layer, block, f"the disk didn't finish the {verb} in {self._timeout:.0f} s")
            elif code:
                fault = PageIOError(layer, block, f"disk {verb} failed: {os.strerror(code)}", code)
            else:
                fault = PageIOError(layer, block, f"short {verb}: {short}")
            batch.faults[position] = fault

    def _pieces(self, count: int) -> list[slice]:
        size = max(WARM_BYTES // self.stride, 1)
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def _staged(self, buffer: Buffer, count: int) -> Bytes:
        return buffer.data[: count * self.stride].reshape(count, self.stride)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _pad(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
