"""The engine on io_uring, by raw system calls: one call starts a whole batch, and results are read from shared memory.

Queue entries are filled and read as numpy records over the rings that the kernel maps, so a batch costs the same few
array operations whatever its size. See io_uring_setup(2), io_uring_enter(2) and <linux/io_uring.h>. Containers often
forbid these calls (seccomp, kernel.io_uring_disabled): the constructor then raises OSError, before anything is started.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time

import numpy as np

from .io import READ, Ints, IoEngine, Ticket

_SETUP, _ENTER = 425, 426  # the same on every architecture
_OP_READ, _OP_WRITE = 22, 23
_OFF_SQ_RING, _OFF_CQ_RING, _OFF_SQES = 0, 0x8000000, 0x10000000
_FEATURES = 1 | 1 << 1 | 1 << 8  # one mapping for both rings, no lost completions, timeouts on enter (Linux 5.11)
_GETEVENTS, _EXT_ARG = 1, 1 << 3
BATCH_SECONDS = 0.005
CLOSE_SECONDS = 5.0  # a disk that hangs is left behind

_RING = [(name, "u4") for name in ("head", "tail", "mask", "entries", "a", "b", "c", "d")] + [("user", "u8")]
_PARAMS = np.dtype(
    [(n, "u4") for n in ("sq_entries", "cq_entries", "flags", "cpu", "idle", "features", "wq_fd")]
    + [("reserved", "u4", 3), ("sq", _RING), ("cq", _RING)]
)
_SQE = np.dtype(
    [("opcode", "u1"), ("flags", "u1"), ("ioprio", "u2"), ("fd", "i4"), ("offset", "u8"), ("address", "u8")]
    + [("length", "u4"), ("rw_flags", "u4"), ("user", "u8"), ("tail", "u8", 3)]
)
_CQE = np.dtype([("user", "u8"), ("result", "i4"), ("flags", "u4")])
_EXT = np.dtype([("sigmask", "u8"), ("sigmask_size", "u4"), ("pad", "u4"), ("timespec", "u8")])

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


class UringEngine(IoEngine):
    """One ring for all threads. Of those that wait, one sleeps in the kernel and hands results to the others."""

    name = "io_uring"

    def __init__(self, depth: int = 64) -> None:
        self.depth = depth
        params = np.zeros(1, _PARAMS)
        self._fd = _syscall(_SETUP, ctypes.c_uint(depth), ctypes.c_void_p(params.ctypes.data))
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        if int(params["features"][0]) & _FEATURES != _FEATURES:
            os.close(self._fd)
            raise OSError(errno.ENOSYS, "io_uring of this kernel is too old: 5.11 is needed")
        self._map(params[0])
        self._lock = threading.Condition()
        self._tickets: dict[int, Ticket] = {}
        self._next_ticket = 0
        self._in_flight = 0
        self._leader = False  # whether a thread sleeps in the kernel

    def _map(self, params: np.void) -> None:
        sq, cq = params["sq"], params["cq"]
        entries, cq_entries = int(params["sq_entries"]), int(params["cq_entries"])
        ring_bytes = max(int(sq["c"]) + 4 * entries, int(cq["b"]) + _CQE.itemsize * cq_entries)
        self._ring = mmap.mmap(self._fd, ring_bytes, offset=_OFF_SQ_RING)
        self._sqe_map = mmap.mmap(self._fd, _SQE.itemsize * entries, offset=_OFF_SQES)
        self._sqes = np.frombuffer(self._sqe_map, _SQE)
        self._cqes = np.frombuffer(self._ring, _CQE, cq_entries, int(cq["b"]))

        def word(offset: int) -> np.ndarray:
            return np.frombuffer(self._ring, np.uint32, 1, int(offset))

        self._sq_head, self._sq_tail, self._sq_mask = word(sq["head"]), word(sq["tail"]), entries - 1
        self._cq_head, self._cq_tail, self._cq_mask = word(cq["head"]), word(cq["tail"]), cq_entries - 1
        np.frombuffer(self._ring, np.uint32, entries, int(sq["c"]))[:] = np.arange(entries)  # entry i is at place i

    def submit(self, op: int, fd: int, offsets: Ints, addresses: Ints, lengths: Ints, timeout: float = 60.0) -> Ticket:
        count, end = len(offsets), time.monotonic() + timeout
        ticket = Ticket(count)
        batch = np.zeros(count, _SQE)
        batch["opcode"], batch["fd"] = (_OP_READ if op == READ else _OP_WRITE), fd
        batch["offset"], batch["address"], batch["length"] = offsets, addresses, lengths
        with self._lock:
            number, self._next_ticket = self._next_ticket, self._next_ticket + 1
            batch["user"] = (number << 32) + np.arange(count)
            self._tickets[number] = ticket
            start = 0
            while start < count:
                room = min(self.depth - self._in_flight, count - start)
                if room > 0:
                    self._start(batch[start : start + room])
                    start += room
                elif (left := end - time.monotonic()) > 0:
                    self._await_completions(left, min(count - start, self.depth // 4))
                else:
                    ticket.give_up(start)
                    break
            if ticket.done:
                self._tickets.pop(number, None)
        return ticket

    def _start(self, batch: np.ndarray) -> None:
        """Hands entries to the kernel; there is room for them."""
        count, tail = len(batch), int(self._sq_tail[0])
        self._sqes[(tail + np.arange(count)) & self._sq_mask] = batch
        self._sq_tail[0] = (tail + count) & 0xFFFFFFFF
        self._in_flight += count
        while count:
            started = _syscall(
                _ENTER, ctypes.c_int(self._fd), ctypes.c_uint(count), ctypes.c_uint(0), ctypes.c_uint(0), None,
                ctypes.c_size_t(0),
            )  # fmt: skip
            if started >= 0:
                count -= started
                continue
            error = ctypes.get_errno()
            if error not in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                raise OSError(error, f"io_uring_enter: {os.strerror(error)}")
            self._lock.wait(0.001)  # the kernel is short of memory for the moment
            self._reap()

    def wait(self, ticket: Ticket, timeout: float) -> Ints:
        end = time.monotonic() + timeout
        with self._lock:
            self._reap()
            while not ticket.done:
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"{ticket.left} transfers aren't finished after {timeout:.1f} s")
                self._await_completions(left, min(ticket.left, self.depth // 4))
        return ticket.results

    def _await_completions(self, timeout: float, count: int = 1) -> None:
        """Returns, with the lock held, after about `count` completions (few wake-ups, a busy disk) or the timeout.

        Only one thread sleeps in the kernel, and only it takes completions meanwhile: else another could take those
        that it is about to sleep for, and leave it asleep.
        """
        if self._leader:
            self._lock.wait(timeout)
            return
        self._leader = True
        self._lock.release()
        try:
            count = max(1, min(count, self._in_flight))
            # A batch is a hint: one transfer that hangs must not keep the others' results from their threads.
            self._sleep(timeout if count == 1 else min(timeout, BATCH_SECONDS), count)
        finally:
            self._lock.acquire()
            self._leader = False
            self._reap()
            self._lock.notify_all()

    def _sleep(self, timeout: float, count: int) -> None:
        spec = np.array([int(timeout), int(timeout % 1 * 1e9)], np.int64)
        argument = np.zeros(1, _EXT)
        argument["timespec"] = spec.ctypes.data
        code = _syscall(
            _ENTER, ctypes.c_int(self._fd), ctypes.c_uint(0), ctypes.c_uint(count),
            ctypes.c_uint(_GETEVENTS | _EXT_ARG), ctypes.c_void_p(argument.ctypes.data), ctypes.c_size_t(_EXT.itemsize),
        )  # fmt: skip
        if code < 0 and (error := ctypes.get_errno()) not in (errno.ETIME, errno.EINTR, errno.EAGAIN, errno.EBUSY):
            raise OSError(error, f"io_uring_enter: {os.strerror(error)}")

    def _reap(self) -> None:
        """Hands finished transfers to their tickets, unless that is the leader's to do; the lock is held."""
        if self._leader:
            return
        head, tail = int(self._cq_head[0]), int(self._cq_tail[0])
        count = (tail - head) & 0xFFFFFFFF
        if not count:
            return
        found = self._cqes[(head + np.arange(count)) & self._cq_mask]
        self._cq_head[0] = tail
        self._in_flight -= count
        numbers, places = found["user"] >> np.uint64(32), (found["user"] & np.uint64(0xFFFFFFFF)).astype(np.int64)
        for number in np.unique(numbers).tolist():
            ticket, own = self._tickets[number], numbers == number
            ticket.results[places[own]] = found["result"][own]
            ticket.left -= int(own.sum())
            if ticket.done:
                del self._tickets[number]
        self._lock.notify_all()

    def close(self) -> None:
        with self._lock:
            end = time.monotonic() + CLOSE_SECONDS
            while self._in_flight:
                if time.monotonic() > end:
                    return
                self._await_completions(CLOSE_SECONDS)
            del self._sqes, self._cqes, self._sq_head, self._sq_tail, self._cq_head, self._cq_tail
            self._ring.close()
            self._sqe_map.close()
            os.close(self._fd)
