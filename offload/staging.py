"""The buffers that direct transfers need: 4096-aligned, few, and lent to one chunk of pages at a time.

Their number bounds the memory and the transfers of a tier: who finds none waits (back-pressure).
"""

from __future__ import annotations

import mmap
import threading
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .io import IoEngine, Ticket

ALIGN = 4096


@dataclass(frozen=True)
class Buffer:
    """One buffer: its bytes, and where they start."""

    data: npt.NDArray[np.uint8]
    address: int


class Staging:
    """`count` buffers of `size` bytes. A child process doesn't inherit them: a transfer may be in flight."""

    def __init__(self, count: int, size: int, engine: IoEngine) -> None:
        size = -(-size // ALIGN) * ALIGN
        memory = mmap.mmap(-1, count * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
        data = np.frombuffer(memory, np.uint8)
        self._free = [Buffer(data[i * size : (i + 1) * size], data.ctypes.data + i * size) for i in range(count)]
        self._count, self._engine = count, engine
        self._stuck: list[tuple[Buffer, Ticket]] = []
        self._changed = threading.Condition()

    def acquire(self, timeout: float) -> Buffer | None:
        """A buffer, or None if none came free in `timeout` seconds. Who holds one already asks with timeout 0, and on
        None finishes his own chunk first: so all can go on."""
        end = time.monotonic() + timeout
        with self._changed:
            while not self._free:
                self._collect()
                left = end - time.monotonic()
                if not self._free and (left <= 0 or not self._changed.wait(left)):
                    return None
            return self._free.pop()

    def release(self, buffer: Buffer) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    def abandon(self, buffer: Buffer, ticket: Ticket) -> None:
        """Like release, but the system may still write to the buffer until `ticket` is done."""
        with self._changed:
            self._stuck.append((buffer, ticket))

    def _collect(self) -> None:
        done = [self._engine.poll(ticket) for _, ticket in self._stuck]
        self._free += [buffer for (buffer, _), over in zip(self._stuck, done, strict=True) if over]
        self._stuck = [stuck for stuck, over in zip(self._stuck, done, strict=True) if not over]

    def check_integrity(self) -> None:
        """Raises AssertionError if a buffer is still lent while no transfer runs."""
        with self._changed:
            self._collect()
            assert len(self._free) == self._count, f"{len(self._free)} of {self._count} staging buffers are there"
