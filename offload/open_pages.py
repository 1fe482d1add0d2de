"""Which pages are open (in the model's dtype), and what a scheduler step does to pages: append, seal, reopen.

A page is filled token by token in an *open slot* and quantized once, when it is full and behind the rewrite horizon
(speculative decoding may overwrite the tail). The newest `residual_pages` sealed pages of a row keep their open copy.
`OpenPages` owns the map block -> open slot and plans a step for all layers at once, from block tables and lengths only:
it knows blocks, never requests, so prefix-cached, forked, preempted and aborted ones need no special case.

    dirty slot   its page lives nowhere else; evicting it seals what is there (a partial page is reopened when its row
                 comes back: precision of that page suffers once more, nothing is lost)
    clean slot   its page is sealed too; dropping the slot costs nothing

New content is a write to offset 0 of a block; what the block held before is forgotten then, not when it was freed,
because vLLM may still hit a freed block's hash. Never touches tensors of keys and values, and never imports vLLM.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
NULL_BLOCK = 0  # vLLM's padding block: dummy rows point here, nothing real is ever in it


class PageLost(RuntimeError):
    """A row's older tokens are neither open nor sealed: attention would read garbage, so the step must not run."""


@dataclass
class StepPlan:
    """What one step does to pages, in this order, alike in every layer.

    1. `evict`: seal open slot -> payload (the first `fill` tokens are valid)     [n, 3]: slot, block, fill
    2. `reopen`: payload -> open slot                                             [n, 2]: slot, block
    3. `append`: fresh row -> open slot at an offset                              [n, 3]: token, slot, offset
    4. `seal_fresh`: page_size fresh rows -> payload                              [n, 2]: first token, block
    5. `seal_open`: full open slot -> payload                                     [n, 2]: slot, block
    """

    evict: Int32s
    reopen: Int32s
    append: Int32s
    seal_fresh: Int32s
    seal_open: Int32s


@dataclass
class OpenPageStats:
    """Counts since they were last taken; pages unless said otherwise."""

    appended_tokens: int = 0
    sealed: int = 0
    sealed_fresh: int = 0
    evicted_clean: int = 0
    evicted_partial: int = 0
    reopened: int = 0


@dataclass
class _Draft:
    evict: list[tuple[int, int, int]] = field(default_factory=list)
    reopen: list[tuple[int, int]] = field(default_factory=list)
    append: list[Int32s] = field(default_factory=list)
    seal_fresh: list[tuple[int, int]] = field(default_factory=list)
    seal_open: list[tuple[int, int]] = field(default_factory=list)

    def finish(self) -> StepPlan:
        def rows(items: list, width: int) -> Int32s:
            return np.array(items, dtype=np.int32).reshape(len(items), width)

        append = np.concatenate(self.append) if self.append else np.zeros((0, 3), np.int32)
        return StepPlan(
            rows(self.evict, 3), rows(self.reopen, 2), append, rows(self.seal_fresh, 2), rows(self.seal_open, 2)
        )


class OpenPages:
    """Plans steps over `num_blocks` blocks of `page_size` tokens with `capacity` open slots.

    `capacity` must cover one step: `slots_per_row(...)` for each row of the largest batch. `speculative_tokens` is the
    most draft tokens that one row's step may carry (0 without speculative decoding).
    """

    def __init__(
        self, num_blocks: int, capacity: int, page_size: int, residual_pages: int = 0, speculative_tokens: int = 0
    ) -> None:
        self.page_size, self.residual, self.speculative = page_size, residual_pages, speculative_tokens
        self.capacity = capacity
        self.slot_of = np.full(num_blocks, -1, np.int32)
        self.sealed_fill = np.zeros(num_blocks, np.int32)  # valid tokens in a block's payload
        self.block_of = np.full(capacity, -1, np.int32)
        self.fill = np.zeros(capacity, np.int32)
        self.dirty = np.zeros(capacity, bool)
        self.last_step = np.zeros(capacity, np.int64)
        self.step = 0
        self.stats = OpenPageStats()
        self._free = list(range(capacity))  # a heap: low slots first, so untouched slots never cost memory
        self._release_next: list[tuple[int, int]] = []

    @staticmethod
    def slots_per_row(page_size: int, residual_pages: int, speculative_tokens: int) -> int:
        """Open slots that one row can need in one step: those it comes with and those it leaves with.

        Its residual before and after the step, the page it was filling and the one it fills now, and the pages that
        drafts may reach into, twice as well.
        """
        return 2 * residual_pages + 2 + 2 * -(-speculative_tokens // page_size)

    def plan(
        self,
        cu_q: Int32s,
        context: Int32s,
        block_table: Int32s,
        prefilling: npt.NDArray[np.bool_] | None = None,
    ) -> StepPlan:
        """Plans the step of a batch and updates the map.

        `cu_q` `[rows + 1]`: first fresh token of each row. `context` `[rows]`: tokens before them. `block_table`
        `[rows, max_pages]`. `prefilling` `[rows]`: rows whose fresh tokens are all certain (prompt); without it a row
        of several tokens is taken to end in up to `speculative_tokens` drafts.
        Raises PageLost if a row's context is not there.
        """
        self.step += 1
        draft = _Draft()
        for slot, block in self._release_next:
            if self.block_of[slot] == block and not self.dirty[slot]:
                self._release(slot)
        self._release_next.clear()
        count = np.diff(cu_q)
        rows = np.flatnonzero(count > 0)
        self._protect(rows, context, block_table)
        slow = rows if self.speculative else self._append_plain_decodes(draft, rows, cu_q, count, context, block_table)
        for row in slow.tolist():
            certain = self.speculative == 0 or (prefilling is not None and bool(prefilling[row]))
            self._plan_row(draft, int(cu_q[row]), int(count[row]), int(context[row]), block_table[row], certain)
        for row in slow.tolist():
            self._check_context(row, int(context[row]), block_table[row])
        plan = draft.finish()
        self.stats.appended_tokens += len(plan.append)
        self.stats.sealed += len(plan.seal_open) + len(plan.seal_fresh)
        self.stats.sealed_fresh += len(plan.seal_fresh)
        return plan

    def take_stats(self) -> OpenPageStats:
        """The counts since the last call."""
        stats, self.stats = self.stats, OpenPageStats()
        return stats

    def check_integrity(self) -> None:
        """Raises AssertionError if the map, its inverse and the free list disagree."""
        used = np.flatnonzero(self.block_of >= 0)
        assert (self.slot_of[self.block_of[used]] == used).all(), "slot_of is not the inverse of block_of"
        assert (self.slot_of >= 0).sum() == len(used), "a block points to a slot that is not its own"
        assert sorted(self._free) == np.flatnonzero(self.block_of < 0).tolist(), "free list and used slots overlap"
        clean = used[~self.dirty[used]]
        assert (self.sealed_fill[self.block_of[clean]] == self.page_size).all(), "a clean slot's page is not sealed"
        assert ((self.fill >= 0) & (self.fill <= self.page_size)).all(), "fill out of range"

    def _protect(self, rows: npt.NDArray[np.intp], context: Int32s, block_table: Int32s) -> None:
        """Marks the batch's own open slots as used now, so that no row of this step evicts another's."""
        last = context[rows] // self.page_size
        for back in range(self.residual + 2):
            ok = last - back >= 0
            slots = self.slot_of[block_table[rows[ok], last[ok] - back]]
            self.last_step[slots[slots >= 0]] = self.step

    def _append_plain_decodes(
        self,
        draft: _Draft,
        rows: npt.NDArray[np.intp],
        cu_q: Int32s,
        count: Int32s,
        context: Int32s,
        block_table: Int32s,
    ) -> npt.NDArray[np.intp]:
        """Plans, vectorized, all rows that add one token inside their open page; returns the other rows."""
        offset = context[rows] % self.page_size
        slots = self.slot_of[block_table[rows, context[rows] // self.page_size]]
        inside = (count[rows] == 1) & (slots >= 0) & (offset > 0) & (offset < self.page_size - 1)
        inside &= self.fill[slots] >= offset  # else the slow path says what is missing
        if inside.any():
            chosen = slots[inside]
            draft.append.append(np.stack((cu_q[rows[inside]], chosen, offset[inside]), axis=1).astype(np.int32))
            self.fill[chosen] = offset[inside] + 1
            self.dirty[chosen] = True
            self.sealed_fill[self.block_of[chosen]] = 0
        return rows[~inside]

    def _plan_row(self, draft: _Draft, token: int, count: int, context: int, table: Int32s, certain: bool) -> None:
        size, end = self.page_size, context + count
        horizon = end if certain else context + max(1, count - self.speculative)
        keep_from = horizon // size - self.residual
        self._settle_context(draft, table[: context // size], keep_from)
        for page in range(context // size, -(-end // size)):
            block = int(table[page])
            if block == NULL_BLOCK:
                continue
            low, high = max(context, page * size), min(end, (page + 1) * size)
            if low == page * size and draft.seal_open:
                # A row before this one took the block, hit in the step that rewrites it, for its old content.
                draft.seal_open = [sealed for sealed in draft.seal_open if sealed[1] != block]
            sealable = high == (page + 1) * size and high <= horizon
            first_token = token + low - context
            if sealable and low == page * size and page < keep_from:
                self._forget(block)
                self.sealed_fill[block] = size
                draft.seal_fresh.append((first_token, block))
                continue
            slot = self._open(draft, block, low - page * size)
            offsets = np.arange(low - page * size, high - page * size, dtype=np.int32)
            draft.append.append(
                np.stack((first_token + offsets - offsets[0], np.full_like(offsets, slot), offsets), axis=1)
            )
            self.fill[slot], self.dirty[slot], self.sealed_fill[block] = high - page * size, True, 0
            if sealable:
                self._seal_open(draft, slot, block)
                if page < keep_from:  # this step still reads its older tokens from the slot
                    self._release_next.append((slot, block))

    def _settle_context(self, draft: _Draft, blocks: Int32s, keep_from: int) -> None:
        """Seals full pages that have come behind the horizon; releases those that left the residual."""
        slots = self.slot_of[blocks]
        for page in np.flatnonzero(slots >= 0).tolist():
            slot, block = int(slots[page]), int(blocks[page])
            if block == NULL_BLOCK:
                continue
            if self.dirty[slot] and self.fill[slot] == self.page_size:
                self._seal_open(draft, slot, block)
            if page < keep_from and not self.dirty[slot]:
                self._release_next.append((slot, block))

    def _seal_open(self, draft: _Draft, slot: int, block: int) -> None:
        draft.seal_open.append((slot, block))
        self.dirty[slot] = False
        self.sealed_fill[block] = self.page_size
        self.last_step[slot] = self.step  # it is read at the end of this step: no other page may take the slot before

    def _open(self, draft: _Draft, block: int, offset: int) -> int:
        """The open slot of `block`, whose next token goes to `offset`."""
        slot = int(self.slot_of[block])
        if slot < 0:
            slot = self._allocate(draft)
            self.slot_of[block], self.block_of[slot] = slot, block
            if offset > 0:
                if self.sealed_fill[block] < offset:
                    raise PageLost(
                        f"block {block}: {offset} tokens were expected, {self.sealed_fill[block]} are stored"
                    )
                draft.reopen.append((slot, block))
                self.stats.reopened += 1
        elif offset > 0 and self.fill[slot] < offset:
            raise PageLost(f"block {block}: {offset} tokens were expected, {self.fill[slot]} are open")
        self.last_step[slot] = self.step
        return slot

    def _allocate(self, draft: _Draft) -> int:
        if self._free:
            return heapq.heappop(self._free)
        idle = np.flatnonzero(self.last_step < self.step)
        if not len(idle):
            raise PageLost(
                f"all {self.capacity} open slots are in use by this step: OpenPages needs slots_per_row() for each row"
            )
        # Clean slots first (dropping them is free), then the longest untouched.
        slot = int(idle[np.lexsort((self.last_step[idle], self.dirty[idle]))[0]])
        block = int(self.block_of[slot])
        if self.dirty[slot]:
            draft.evict.append((slot, block, int(self.fill[slot])))
            self.sealed_fill[block] = self.fill[slot]
            self.stats.evicted_partial += 1
        else:
            self.stats.evicted_clean += 1
        self.slot_of[block] = -1
        self.dirty[slot] = False
        return slot

    def _forget(self, block: int) -> None:
        slot = int(self.slot_of[block])
        if slot >= 0:
            self._release(slot)

    def _release(self, slot: int) -> None:
        self.slot_of[self.block_of[slot]] = -1
        self.block_of[slot], self.dirty[slot], self.fill[slot] = -1, False, 0
        heapq.heappush(self._free, slot)

    def _check_context(self, row: int, context: int, table: Int32s) -> None:
        full = context // self.page_size
        blocks = table[:full]
        lost = (self.slot_of[blocks] < 0) & (self.sealed_fill[blocks] < self.page_size) & (blocks != NULL_BLOCK)
        if lost.any():
            page = int(np.flatnonzero(lost)[0])
            raise PageLost(f"row {row}: page {page} (block {int(blocks[page])}) is neither open nor sealed")
