"""The engine for kernels without io_uring: a pool of threads, each in pread or pwrite."""

from __future__ import annotations

import ctypes
import errno
import threading
import time
from queue import Full, Queue

from .io import READ, Ints, IoEngine, Ticket

MAX_THREADS = 16
CLOSE_SECONDS = 5.0  # a disk that hangs is left behind

_libc = ctypes.CDLL(None, use_errno=True)  # by address, without a buffer object for each transfer
_TRANSFERS = (getattr(_libc, "pread64", _libc.pread), getattr(_libc, "pwrite64", _libc.pwrite))
for _transfer in _TRANSFERS:
    _transfer.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
    _transfer.restype = ctypes.c_ssize_t


class ThreadEngine(IoEngine):
    """`min(depth, 16)` threads; they are daemons, so a stuck disk can't keep the process alive."""

    name = "threads"

    def __init__(self, depth: int = 64) -> None:
        self.depth = depth
        self._queue: Queue[tuple[Ticket, int, int, int, int, int, int] | None] = Queue(maxsize=depth)
        self._finished = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"ktx-io-{i}", daemon=True) for i in range(min(depth, MAX_THREADS))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, op: int, fd: int, offsets: Ints, addresses: Ints, lengths: Ints, timeout: float = 60.0) -> Ticket:
        ticket, end = Ticket(len(offsets)), time.monotonic() + timeout
        for i, transfer in enumerate(zip(offsets.tolist(), addresses.tolist(), lengths.tolist(), strict=True)):
            try:
                self._queue.put((ticket, i, op, fd, *transfer), timeout=max(0.0, end - time.monotonic()))
            except Full:
                with self._finished:
                    ticket.give_up(i)
                break
        return ticket

    def wait(self, ticket: Ticket, timeout: float) -> Ints:
        end = time.monotonic() + timeout
        with self._finished:
            while not ticket.done:
                left = end - time.monotonic()
                if left <= 0 or not self._finished.wait(left):
                    raise TimeoutError(f"{ticket.left} transfers aren't finished after {timeout:.1f} s")
        return ticket.results

    def close(self) -> None:
        for _ in self._threads:
            try:
                self._queue.put(None, timeout=CLOSE_SECONDS)
            except Full:
                return
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            ticket, i, op, fd, offset, address, length = item
            moved = _transfer_once(op, fd, address, length, offset)
            with self._finished:
                ticket.results[i] = moved
                ticket.left -= 1
                if ticket.done:
                    self._finished.notify_all()


def _transfer_once(op: int, fd: int, address: int, length: int, offset: int) -> int:
    """Bytes moved by one system call, or minus the errno."""
    call = _TRANSFERS[0 if op == READ else 1]
    while True:
        moved = call(fd, address, length, offset)
        if moved >= 0:
            return moved
        error = ctypes.get_errno()
        if error != errno.EINTR:
            return -error
