"""Asynchronous transfers between files and memory: the contract of an engine, and the choice of one.

A batch of transfers is submitted for a ticket, and the ticket is waited for. At most `depth` transfers of an engine are
in flight; `submit` blocks while there is no room (back-pressure), it never drops one. Transfers of a batch may finish
in any order. Which engine runs: io_uring where the kernel allows it, else a pool of threads; both behave alike.
"""

from __future__ import annotations

import errno
import logging
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]
READ, WRITE = 0, 1
PENDING = np.iinfo(np.int64).min
ENGINES = ("auto", "io_uring", "threads")


class Ticket:
    """A submitted batch. `results` `[n]`: bytes moved, or minus an errno, or `PENDING`; final once `done`."""

    def __init__(self, count: int) -> None:
        self.results: Ints = np.full(count, PENDING, np.int64)
        self.left = count

    @property
    def done(self) -> bool:
        return self.left == 0

    def give_up(self, start: int) -> None:
        """Transfers from `start` on were never handed to the system."""
        self.results[start:] = -errno.ETIMEDOUT
        self.left -= len(self.results) - start


class IoEngine(ABC):
    """Moves bytes. Any thread may call; memory that a transfer uses must stay until its ticket is done."""

    name: str
    depth: int

    @abstractmethod
    def submit(self, op: int, fd: int, offsets: Ints, addresses: Ints, lengths: Ints, timeout: float = 60.0) -> Ticket:
        """Starts `op` (READ or WRITE) for each i: `lengths[i]` bytes between the file at `offsets[i]` and memory at
        `addresses[i]`. Blocks while `depth` transfers are in flight, for `timeout` seconds at most: those that found
        no room by then have the result -ETIMEDOUT. What the system refuses shows in the ticket too.
        """

    @abstractmethod
    def wait(self, ticket: Ticket, timeout: float) -> Ints:
        """The ticket's results. Raises TimeoutError if it isn't done in `timeout` seconds; it may be awaited again."""

    def poll(self, ticket: Ticket) -> bool:
        """Whether the ticket is done; never blocks."""
        try:
            self.wait(ticket, 0.0)
        except TimeoutError:
            return False
        return True

    @abstractmethod
    def close(self) -> None:
        """Waits for what is in flight, then frees the engine."""


def make_engine(kind: str = "auto", depth: int = 64) -> IoEngine:
    """An engine of a kind (`ENGINES`). `auto` falls back to threads where io_uring isn't allowed, and logs why.

    Raises OSError if io_uring is asked for and not there.
    """
    from .io_threads import ThreadEngine
    from .io_uring import UringEngine

    if kind not in ENGINES:
        raise ValueError(f"I/O engine {kind!r}: use one of {', '.join(ENGINES)}")
    if kind != "threads":
        try:
            return UringEngine(depth)
        except OSError as error:
            if kind == "io_uring":
                raise
            logger.info("KTX: io_uring can't be used here (%s); disk transfers run on threads", error)
    return ThreadEngine(depth)
