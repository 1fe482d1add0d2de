"""Moves pages between a hot pool's slots and its store: on the compute thread what it waits for, on two background
threads what was asked for ahead and what has to be written back.

Owns the lock, the queue and the threads of a pool; `HotPool` is what others call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .errors import PageCorrupt, PageFault, PageIOError, PageMissing, PageTimeout, PoolFull, TierFault
from .page_table import FETCHING, FILLING, ORPHAN, RESIDENT, PageTable
from .slots import SlotMemory
from .tiers import Ints, Tier
from .trace import Trace

FETCH_PAGES = 64  # pages of one background transfer: what a page that is suddenly needed may wait behind
WRITE_PAGES = 64
QUEUED, RUNNING, DONE = range(3)


@dataclass(eq=False)
class Fetch:
    """Pages of a layer that are on their way; a ticket for `cancel`. `faults`: block -> why it didn't come."""

    layer: int
    blocks: Ints
    slots: Ints
    parts: int
    state: int = QUEUED
    faults: dict[int, PageFault] = field(default_factory=dict)


@dataclass
class PoolStats:
    """Counts since they were last taken; pages unless said otherwise.

    hits: asked for and there; late: asked for and on their way; misses: asked for, neither. evictions. lost: given up
    after failed writes. corrupt, io_errors: faults by kind. prefetched, prefetch_dropped: asked for ahead; no room for.
    fetched_bytes, written_bytes: from and to the store. stall_seconds: of waiting for pages and slots. queue_depth,
    queue_peak: pages that wait for the fetch thread now, and the most that did.
    """

    hits: int = 0
    late: int = 0
    misses: int = 0
    evictions: int = 0
    lost: int = 0
    corrupt: int = 0
    io_errors: int = 0
    prefetched: int = 0
    prefetch_dropped: int = 0
    fetched_bytes: int = 0
    written_bytes: int = 0
    stall_seconds: float = 0.0
    queue_depth: int = 0
    queue_peak: int = 0


class Transfers:
    """`slots`: one a layer. dirty_limit: more dirty pages in a layer than this are written back unasked. timeout:
    seconds that a page or a slot is waited for. fence: waits for a step of the device that is under way and tells the
    table; False if there is none (None: kernels run on the compute thread). Methods marked so want `lock` held."""

    def __init__(
        self,
        table: PageTable,
        slots: list[SlotMemory],
        store: Tier,
        dirty_limit: int,
        timeout: float,
        trace: Trace | None,
        fence: Callable[[], bool] | None = None,
    ) -> None:
        self.fence = fence
        self.table, self.slots, self.store, self.spec = table, slots, store, store.spec
        self.dirty_limit, self.timeout, self.trace = dirty_limit, timeout, trace
        self.lock = threading.Condition()
        self.stats = PoolStats()
        self.queue: deque[Fetch] = deque()
        self.ready: list[Callable[[], None] | None] = [None] * table.num_layers
        self.urgent = np.zeros(table.num_layers, bool)  # somebody waits for slots, or for everything to be written
        self._fetch_of = np.full(table.state.shape, None, object)  # of slots that are FETCHING
        self._refused: dict[tuple[int, int], str] = {}  # pages that couldn't be written, and why
        self._closing = False
        self._threads = [
            threading.Thread(target=work, name=f"ktx-{name}", daemon=True)
            for name, work in (("fetch", self._fetch_loop), ("write-back", self._write_loop))
        ]
        for thread in self._threads:
            thread.start()

    def request(self, layer: int, wanted: Ints, parts: int, limit: int, hold: bool) -> tuple[list[Fetch], int]:
        """Maps what is missing of distinct pages, up to `limit`; returns how to get it, and how many pages found no
        room. Lock held."""
        table = self.table
        slots = table.slot_of[layer, wanted].astype(np.int64)
        new, mapped = wanted[(slots < 0) & table.stored[layer, wanted]], slots[slots >= 0]
        held = table.held[layer, mapped]
        table.held[layer, mapped] = True  # one wanted page must not make room for another
        taken = table.take(layer, new[:limit], FETCHING, hold)
        table.held[layer, mapped] = held | hold
        fetches = [Fetch(layer, new[: len(taken)], taken, parts)] if len(taken) else []
        mapped = mapped[table.state[layer, mapped] == RESIDENT]
        lacking = parts & ~table.have[layer, mapped]
        for need in np.unique(lacking[lacking > 0]).tolist():
            own = mapped[lacking == need][: max(limit - len(taken), 0)]
            table.state[layer, own] = FETCHING
            fetches += [Fetch(layer, table.block_of[layer, own].astype(np.int64), own, need)] if len(own) else []
        for fetch in fetches:
            self._fetch_of[layer, fetch.slots] = fetch
        return fetches, len(new) - len(taken)

    def enqueue(self, fetches: list[Fetch]) -> list[Fetch]:
        """Hands fetches to the background thread in pieces, which are returned. Lock held."""
        pieces = []
        for fetch in fetches:
            for start in range(0, len(fetch.blocks), FETCH_PAGES):
                part = slice(start, start + FETCH_PAGES)
                pieces.append(Fetch(fetch.layer, fetch.blocks[part], fetch.slots[part], fetch.parts))
                self._fetch_of[fetch.layer, fetch.slots[part]] = pieces[-1]
        self.queue.extend(pieces)
        self.stats.prefetched += sum(len(piece.blocks) for piece in pieces)
        self.stats.queue_peak = max(self.stats.queue_peak, self.queued())
        self.lock.notify_all()
        return pieces

    def queued(self) -> int:
        """Pages that wait for the fetch thread. Lock held."""
        return sum(len(fetch.blocks) for fetch in self.queue)

    def cancel(self, fetch: Fetch) -> None:
        """Takes back a fetch that wasn't begun and that nobody waits for. Lock held."""
        if fetch.state == QUEUED and not self.table.held[fetch.layer, fetch.slots].any():
            self.queue.remove(fetch)
            self._end(fetch, np.zeros(len(fetch.slots), bool))

    def fetch(self, layer: int, wanted: Ints, parts: int) -> dict[int, PageFault]:
        """Returns when all parts of distinct pages are there, or with the faults, by block, of those that won't be."""
        end = time.monotonic() + self.timeout
        while True:
            with self.lock:
                if faults := self._void(layer, wanted):
                    return faults
                own, short = self.request(layer, wanted, parts, len(wanted), hold=True)
                asked = len(own)
                others = self._under_way(layer, wanted, own)
                if not own and not others and not short:
                    return {}
                if not own and not others:
                    self.await_room(layer, short, end)
                    continue
            for fetch in own:
                self._run(fetch)
                faults |= {block: why for block, why in fetch.faults.items() if block in wanted}
            faults |= self._await_others(others, wanted, end)
            if faults or not (others or short or len(own) > asked):  # what was taken over may be a part
                return faults

    def await_room(self, layer: int, count: int, end: float) -> None:
        """Returns after something changed that may make room for `count` pages. Raises PoolFull if nothing will. Lock
        held."""
        table = self.table
        if self.fence is not None and table.in_use(layer).any() and self.fence():
            return
        if table.moving(layer):
            self.urgent[layer] = True
            self.lock.notify_all()
            if self.lock.wait(max(0.0, end - time.monotonic())):
                return
            raise PoolFull(
                f"hot pool, layer {layer}: no page was written back in {self.timeout:.0f} s, {self._use(layer)}"
            )
        lost = table.unwritable(layer)[:count]
        if not len(lost):
            raise PoolFull(f"hot pool, layer {layer}: no slot can be freed, {self._use(layer)}")
        self.stats.lost += len(lost)
        table.drop(layer, lost)

    def forget(self, layer: int, blocks: Ints) -> None:
        """The pages are void wherever they are. Lock held."""
        self.table.forget(layer, blocks)
        if self._refused:
            for block in blocks.tolist():
                self._refused.pop((layer, block), None)

    def refill(self, layer: int, blocks: Ints, end: float) -> Ints:
        """Those of distinct blocks that have a slot get new content there; returns the others. Lock held."""
        while True:
            slots = self.table.slot_of[layer, blocks]
            own = slots[slots >= 0].astype(np.int64)
            if not (self.table.cleaning[layer, own] | (self.table.state[layer, own] == FETCHING)).any():
                break
            if not self.lock.wait(max(0.0, end - time.monotonic())):
                raise PoolFull(f"hot pool, layer {layer}: a page was not moved in {self.timeout:.0f} s")
        self.table.refill(layer, own)
        for block in blocks[slots >= 0].tolist() if self._refused else ():
            self._refused.pop((layer, block), None)
        return blocks[slots < 0]

    def refusals(self) -> dict[int, PageFault]:
        """The dirty pages that the store refused, numbered. Lock held."""
        layers, slots = np.nonzero(self.table.dirty)
        pages = zip(layers.tolist(), self.table.block_of[layers, slots].tolist(), strict=True)
        return {i: PageIOError(*page, self._refused.get(page, "not written")) for i, page in enumerate(pages)}

    def note_stall(self, name: str, layer: int, start: float) -> None:
        """Counts the time since `start` as waiting."""
        now = time.perf_counter()
        with self.lock:
            self.stats.stall_seconds += now - start
        if self.trace:
            self.trace.add(name, start, now, "stall", layer=layer)

    def close(self) -> None:
        """Stops the threads; what they are doing is finished, what waits is not begun."""
        with self.lock:
            self._closing = True
            self.lock.notify_all()
        for thread in self._threads:
            thread.join(self.timeout)

    def _void(self, layer: int, wanted: Ints) -> dict[int, PageFault]:
        slots = self.table.slot_of[layer, wanted]
        if (self.table.state[layer, slots[slots >= 0]] == FILLING).any():
            raise ValueError(f"layer {layer}: a page was asked for that is allocated and not committed")
        void = wanted[(slots < 0) & ~self.table.stored[layer, wanted]].tolist()
        why = "it was never written, or its content was forgotten"
        return {block: PageMissing(layer, block, self._refused.get((layer, block), why)) for block in void}

    def _under_way(self, layer: int, wanted: Ints, own: list[Fetch]) -> list[Fetch]:
        """Fetches of wanted pages that run on the other thread; those that still wait join `own`."""
        slots = self.table.slot_of[layer, wanted]
        slots = slots[slots >= 0]
        coming = self._fetch_of[layer, slots[self.table.state[layer, slots] == FETCHING]]
        others = []
        for fetch in dict.fromkeys(coming.tolist()):
            if fetch in own:
                continue
            if fetch.state == QUEUED:
                self.queue.remove(fetch)
                own.append(fetch)
            else:
                others.append(fetch)
        for fetch in own:
            fetch.state = RUNNING
        return others

    def _await_others(self, others: list[Fetch], wanted: Ints, end: float) -> dict[int, PageFault]:
        """Waits for the fetch thread. What failed there is tried again by the caller; only lateness is final."""
        faults: dict[int, PageFault] = {}
        with self.lock:
            for fetch in others:
                while fetch.state != DONE and (left := end - time.monotonic()) > 0:
                    self.lock.wait(left)
                if fetch.state != DONE:
                    why = f"it didn't arrive in {self.timeout:.0f} s"
                    late = np.intersect1d(fetch.blocks, wanted).tolist()
                    faults |= {block: PageTimeout(fetch.layer, block, why) for block in late}
        return faults

    def _run(self, fetch: Fetch) -> None:
        """Reads pages into their slots; whatever goes wrong ends up in `fetch.faults`."""
        start = time.perf_counter()
        with self.lock:  # what was forgotten since needs no reading
            live = np.flatnonzero(self.table.state[fetch.layer, fetch.slots] != ORPHAN)
        blocks = fetch.blocks[live]
        faults = self._attempt(
            lambda: self.slots[fetch.layer].load(
                self.store, self.spec.pages(fetch.layer, blocks), fetch.slots[live], fetch.parts
            ),
            fetch.layer,
            blocks,
        )
        good = np.ones(len(fetch.blocks), bool)
        good[live[list(faults)]] = False
        moved = (len(live) - len(faults)) * self.spec.width(fetch.parts)
        with self.lock:
            valid = self.table.state[fetch.layer, fetch.slots] != ORPHAN  # faults of void pages are nobody's
            fetch.faults = {int(blocks[i]): why for i, why in faults.items() if valid[live[i]]}
            self._count(fetch.faults)
            self.stats.fetched_bytes += moved
            self._end(fetch, good)
        if self.trace:
            self.trace.add("fetch", start, time.perf_counter(), self.store.name, moved, fetch.layer)

    def _end(self, fetch: Fetch, good: npt.NDArray[np.bool_]) -> None:
        self._fetch_of[fetch.layer, fetch.slots] = None
        self.table.fetched(fetch.layer, fetch.slots, fetch.parts, good)
        fetch.state = DONE
        self.lock.notify_all()

    def _fetch_loop(self) -> None:
        while True:
            with self.lock:
                while not self.queue and not self._closing:
                    self.lock.wait()
                if self._closing:
                    return
                fetch = self.queue.popleft()
                fetch.state = RUNNING
            self._run(fetch)

    def _write_loop(self) -> None:
        while True:
            with self.lock:
                while (layer := self._layer_to_write()) < 0 and not self._closing:
                    self.lock.wait()
                if self._closing:
                    return
                slots = self.table.start_cleaning(layer, WRITE_PAGES)
                blocks = self.table.block_of[layer, slots].astype(np.int64)
            self._write(layer, slots, blocks)

    def _layer_to_write(self) -> int:
        """The layer with most to write among those that are urgent, else among those over the limit; -1: none."""
        waiting = self.table.num_writable()
        self.urgent &= waiting > 0
        if not self.urgent.any():
            layer = int(waiting.argmax())
            return layer if waiting[layer] > self.dirty_limit else -1
        return int(np.where(self.urgent, waiting, -1).argmax())

    def _write(self, layer: int, slots: Ints, blocks: Ints) -> None:
        start, ready = time.perf_counter(), self.ready[layer]

        def save() -> None:
            if ready is not None:
                ready()
            self.slots[layer].save(self.store, self.spec.pages(layer, blocks), slots)

        faults = self._attempt(save, layer, blocks)
        good = np.ones(len(slots), bool)
        good[list(faults)] = False
        moved = (len(slots) - len(faults)) * self.spec.page_bytes
        with self.lock:
            for i, why in faults.items():
                if self.table.state[layer, slots[i]] != ORPHAN:
                    self._refused[layer, int(blocks[i])] = f"lost: {why.why}"
            self._count(faults)
            self.stats.written_bytes += moved
            self.table.cleaned(layer, slots, good)
            self.lock.notify_all()
        if self.trace:
            self.trace.add("write back", start, time.perf_counter(), self.store.name, moved, layer)

    def _attempt(self, call: Callable[[], None], layer: int, blocks: Ints) -> dict[int, PageFault]:
        """Faults by position. An error of another kind is every page's: a background thread must not end by it."""
        try:
            if len(blocks):
                call()
        except TierFault as fault:
            return fault.faults
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            return {i: PageIOError(layer, block, why) for i, block in enumerate(blocks.tolist())}
        return {}

    def _count(self, faults: dict[int, PageFault]) -> None:
        corrupt = sum(isinstance(why, PageCorrupt) for why in faults.values())
        missing = sum(isinstance(why, PageMissing) for why in faults.values())
        self.stats.corrupt += corrupt
        self.stats.io_errors += len(faults) - corrupt - missing

    def _use(self, layer: int) -> str:
        table = self.table
        counts = ((table.held, "held by the step"), (table.dirty, "not in the store"))
        return ", ".join(f"{int(flags[layer].sum())} {what}" for flags, what in counts) + f" of {table.num_slots} slots"
