"""The page table of a hot pool: which slot holds which page, in what state. Arrays only: no bytes, threads or locks.

Row `layer` of `slot_of` `[num_layers, num_blocks]` is what kernels take as `payload_slot` (-1: not in the pool). It
changes only in calls of the compute thread; other threads finish transfers, which changes a slot's state.

    FREE      no page
    FETCHING  a transfer into the slot is under way; parts that were there before may be read
    FILLING   given to the compute thread, which is writing a new page
    RESIDENT  the parts in `have` may be read
    ORPHAN    no page, but a transfer to or from it is under way: its content was forgotten meanwhile
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .eviction import make_policy
from .tiers import Ints

FREE, FETCHING, FILLING, RESIDENT, ORPHAN = range(5)
MAX_TRIES = 3  # writes of a page before it counts as unwritable


class PageTable:
    """Slots of every layer: `num_slots` a layer, pages of `num_blocks` blocks; `all_parts` is a whole page's mask.

    `held`: used by the running step, `dirty`: the store has no copy, `cleaning`: being written to it, `tries`: failed
    writes. `busy`: the last step of a device that may use the slot, which has finished `done` of its steps: until then
    the slot is nobody else's, whether it still has a page or not. Methods that take `slots` take distinct ones of one
    layer.
    """

    def __init__(self, num_layers: int, num_blocks: int, num_slots: int, policy: str, all_parts: int) -> None:
        self.num_layers, self.num_blocks, self.num_slots = num_layers, num_blocks, num_slots
        self.all_parts = all_parts
        slots = (num_layers, num_slots)
        self.slot_of = np.full((num_layers, num_blocks), -1, np.int32)
        self.stored = np.zeros((num_layers, num_blocks), bool)  # the store has the page
        self.block_of = np.full(slots, -1, np.int32)
        self.state = np.full(slots, FREE, np.uint8)
        self.have = np.zeros(slots, np.uint8)
        self.held, self.dirty, self.cleaning = (np.zeros(slots, bool) for _ in range(3))
        self.tries = np.zeros(slots, np.uint8)
        self.busy, self.done = np.zeros(slots, np.int64), 0
        self.policies = [make_policy(policy, num_slots) for _ in range(num_layers)]
        self.evictions = 0

    def take(self, layer: int, blocks: Ints, state: int, hold: bool = True) -> Ints:
        """Slots in `state` for the first of `blocks` (none of which has one): as many as can be had, free slots
        first, then by evicting clean pages."""
        found = np.flatnonzero((self.state[layer] == FREE) & ~self.in_use(layer))[: len(blocks)]
        if len(found) < len(blocks):
            chosen = self.policies[layer].victims(len(blocks) - len(found), self._evictable(layer))
            self.drop(layer, chosen)
            self.evictions += len(chosen)
            found = np.concatenate((found, chosen))
        blocks = blocks[: len(found)]
        self.slot_of[layer, blocks] = found
        self.block_of[layer, found] = blocks
        self.state[layer, found] = state
        self.held[layer, found] = hold
        return found

    def drop(self, layer: int, slots: Ints) -> None:
        """Frees slots, whatever is in them; none may be in transfer."""
        self._unmap(layer, slots)
        self.state[layer, slots] = FREE

    def forget(self, layer: int, blocks: Ints) -> None:
        """The content of these pages is void: in the pool, in the store and on its way."""
        self.stored[layer, blocks] = False
        slots = self.slot_of[layer, blocks]
        slots = slots[slots >= 0].astype(np.int64)
        if not len(slots):
            return
        moving = (self.state[layer, slots] == FETCHING) | self.cleaning[layer, slots]
        self.drop(layer, slots[~moving])
        self._unmap(layer, slots[moving])
        self.state[layer, slots[moving]] = ORPHAN

    def fetched(self, layer: int, slots: Ints, parts: int, good: npt.NDArray[np.bool_]) -> None:
        """The transfer into `slots` has ended, well or not (`good` `[n]`)."""
        orphans = self.state[layer, slots] == ORPHAN
        self.state[layer, slots[orphans]] = FREE
        arrived, failed = slots[good & ~orphans], slots[~good & ~orphans]
        fresh = arrived[self.have[layer, arrived] == 0]
        self.have[layer, arrived] |= parts
        self.state[layer, arrived] = RESIDENT
        self.policies[layer].admit(fresh)
        empty = self.have[layer, failed] == 0
        self.state[layer, failed[~empty]] = RESIDENT
        self.drop(layer, failed[empty])

    def refill(self, layer: int, slots: Ints) -> None:
        """The pages in `slots`, none of which may be in transfer, get new content where they are."""
        self.stored[layer, self.block_of[layer, slots]] = False
        self.state[layer, slots], self.have[layer, slots], self.dirty[layer, slots] = FILLING, 0, False
        self.held[layer, slots] = True

    def in_use(self, layer: int) -> npt.NDArray[np.bool_]:
        """`[num_slots]`: slots that a step of the device may use that isn't done."""
        return self.busy[layer] > self.done

    def filled(self, layer: int, slots: Ints) -> None:
        """New pages are complete in `slots`; the store doesn't have them."""
        self.state[layer, slots] = RESIDENT
        self.have[layer, slots] = self.all_parts
        self.dirty[layer, slots] = True
        self.tries[layer, slots] = 0
        self.policies[layer].admit(slots)

    def start_cleaning(self, layer: int, count: int) -> Ints:
        """Up to `count` dirty slots to be written to the store now, the least valuable first."""
        slots = self.policies[layer].victims(count, self._writable(layer))
        self.cleaning[layer, slots] = True
        return slots

    def cleaned(self, layer: int, slots: Ints, good: npt.NDArray[np.bool_]) -> None:
        """The writes of `slots` have ended, well or not (`good` `[n]`)."""
        self.cleaning[layer, slots] = False
        orphans = self.state[layer, slots] == ORPHAN
        self.state[layer, slots[orphans]] = FREE
        done, failed = slots[good & ~orphans], slots[~good & ~orphans]
        self.dirty[layer, done] = False
        self.stored[layer, self.block_of[layer, done]] = True
        self.tries[layer, failed] += 1

    def unwritable(self, layer: int) -> Ints:
        """Dirty slots that the store refused too often, and that nothing uses now."""
        idle = ~self.held[layer] & ~self.cleaning[layer] & self.dirty[layer]
        return np.flatnonzero(idle & (self.tries[layer] >= MAX_TRIES))

    def num_writable(self) -> Ints:
        """`[num_layers]`: dirty pages waiting to be written."""
        return self._writable(slice(None)).sum(axis=1)

    def moving(self, layer: int) -> bool:
        """Whether a transfer or a write that is due will make room in the layer."""
        state = self.state[layer]
        if self.cleaning[layer].any() or self._writable(layer)[~self.held[layer]].any():
            return True
        return bool(((state == ORPHAN) | ((state == FETCHING) & ~self.held[layer])).any())

    def check_integrity(self) -> None:
        """Raises AssertionError if the arrays disagree."""
        layers, slots = np.nonzero(self.block_of >= 0)
        assert (self.slot_of[layers, self.block_of[layers, slots]] == slots).all(), "slot_of isn't block_of's inverse"
        assert (self.slot_of >= 0).sum() == len(slots), "a page points to a slot that is not its own"
        mapped = self.block_of >= 0
        in_use = (self.state == FETCHING) | (self.state == FILLING) | (self.state == RESIDENT)
        assert (mapped == in_use).all(), "a slot's state and its page disagree"
        resident = self.state == RESIDENT
        assert (self.have[resident] > 0).all(), "a resident page has no part"
        assert not (self.have[~mapped].any() or self.held[~mapped].any())
        assert (resident | ~self.dirty).all(), "a slot is dirty and not resident"
        assert (self.have[self.dirty] == self.all_parts).all(), "a dirty page isn't whole"
        assert (self.dirty | ~self.cleaning | (self.state == ORPHAN)).all(), "a clean page is being written"
        layers, slots = np.nonzero(resident & ~self.dirty)
        assert self.stored[layers, self.block_of[layers, slots]].all(), "a clean page isn't in the store"

    def _evictable(self, layer: int) -> npt.NDArray[np.bool_]:
        busy = self.dirty[layer] | self.held[layer] | self.cleaning[layer]
        return (self.state[layer] == RESIDENT) & ~busy & ~self.in_use(layer)

    def _writable(self, layer: int | slice) -> npt.NDArray[np.bool_]:
        return self.dirty[layer] & ~self.cleaning[layer] & (self.tries[layer] < MAX_TRIES)

    def _unmap(self, layer: int, slots: Ints) -> None:
        self.slot_of[layer, self.block_of[layer, slots]] = -1
        self.block_of[layer, slots] = -1
        self.have[layer, slots] = 0
        for flags in (self.held, self.dirty):
            flags[layer, slots] = False
