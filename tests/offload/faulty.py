"""Wrappers that go wrong on purpose: the tiers and engines under test have no hooks of their own."""

import errno
import threading

import numpy as np

from vllm_ktx.offload.errors import PageIOError, TierFault
from vllm_ktx.offload.io import IoEngine, Ticket
from vllm_ktx.offload.tiers import REST, SCORING, Tier


class FaultyTier(Tier):
    """Passes calls on. Pages in `bad_reads` / `bad_writes` fail; `gate` (an Event) holds reads back until it is set."""

    name = "faulty"

    def __init__(self, tier: Tier) -> None:
        self.tier, self.spec = tier, tier.spec
        self.bad_reads: set[int] = set()
        self.bad_writes: set[int] = set()
        self.crash: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.write_gate = threading.Event()
        self.write_gate.set()
        self.waiting = 0
        self.reads: list[tuple[int, ...]] = []

    def read(self, pages, out, rows, parts=SCORING | REST):
        self.reads.append(tuple(pages.tolist()))
        if self.crash:
            raise self.crash
        try:
            self._some(pages, self.bad_reads, lambda at: self.tier.read(pages[at], out, rows[at], parts))
        finally:  # held back with the bytes of before
            self.waiting += 1
            self.gate.wait(30)
            self.waiting -= 1

    def write(self, pages, source, rows):
        self.write_gate.wait(30)
        self._some(pages, self.bad_writes, lambda at: self.tier.write(pages[at], source, rows[at]))

    def close(self):
        self.tier.close()

    def _some(self, pages, bad, call):
        failing = np.isin(pages, list(bad))
        at = np.flatnonzero(~failing)
        faults = {int(i): self._fault(int(pages[i])) for i in np.flatnonzero(failing)}
        try:
            call(at)
        except TierFault as fault:
            faults |= {int(at[i]): why for i, why in fault.faults.items()}
        if faults:
            raise TierFault(faults)

    def _fault(self, page: int) -> PageIOError:
        return PageIOError(*self.spec.name(page), "injected", errno.EIO)


class FaultyEngine(IoEngine):
    """Passes transfers on. Those that touch a bad byte end with -EIO or half their length; `hang` holds all results."""

    name = "faulty"

    def __init__(self, engine: IoEngine) -> None:
        self.engine, self.depth = engine, engine.depth
        self.bad_bytes: dict[
            int, str
        ] = {}  # offset in the file -> "eio" or "short", or either for one transfer: "once"
        self.hang = threading.Event()
        self.submitted: list[tuple[int, int, int]] = []
        self._plans: dict[Ticket, dict[int, str]] = {}

    def submit(self, op, fd, offsets, addresses, lengths, timeout=60.0):
        self.submitted += [(op, int(o), int(n)) for o, n in zip(offsets, lengths, strict=True)]
        plan = {}
        for i, (offset, length) in enumerate(zip(offsets.tolist(), lengths.tolist(), strict=True)):
            for byte, kind in list(self.bad_bytes.items()):
                if offset <= byte < offset + length:
                    plan[i] = kind
                    if kind == "once":
                        del self.bad_bytes[byte]
        ticket = self.engine.submit(op, fd, offsets, addresses, lengths, timeout)
        self._plans[ticket] = plan
        return ticket

    def wait(self, ticket, timeout):
        if self.hang.is_set():
            raise TimeoutError("injected")
        results = self.engine.wait(ticket, timeout)
        for i, kind in self._plans.pop(ticket, {}).items():
            results[i] = results[i] // 2 if kind == "short" else -errno.EIO
        return results

    def close(self):
        self.engine.close()
