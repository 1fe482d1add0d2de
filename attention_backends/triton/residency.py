"""Kernels that decide, on the device, which pages have a slot there: look up, make room, fetch, publish.

The home of every sealed page is host memory that the device can address (pinned, UVA), at the block's row or, where
`home` int32 `[num_blocks]` is given, at the row that it names; slots on the device are a cache
of it. As in vLLM's HiSparse the page table, the misses and the replacement stay on the device, so a step may lie in a
CUDA graph; otherwise than there slots belong to all rows, a block has one copy whoever reads it, pages are written
through (no slot is ever dirty, so eviction is free), and a page without a slot is read where it lies.

Replacement is a clock whose hand passes over ages: the slots unused for long are taken first (`AGES`), and never one
whose page is asked for in the same round. Pages that prefill reads come in aged and take aged slots alone, so a long
prompt passes through without driving out what decode works on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pages import home_of
from .units import candidates, step_jit

DECODE = tl.constexpr(16)  # a row of more fresh tokens is a prompt
AGED = tl.constexpr(16)  # steps without use after which a page may make room for a prompt's
# Of `clock`, int32 [8]:
ROUND = tl.constexpr(0)  # number of the round: `wanted` of a block that this round asks for
NOW = tl.constexpr(1)  # number of the step
HAND = tl.constexpr(2)  # slot that is looked at next
MISSED = tl.constexpr(3)  # misses of this round: of decode, of prompts
FOUND = tl.constexpr(5)  # slots that the last round filled
# Of `counts`, int64 [3], distinct pages of each round: they had a slot, were fetched, are read in host memory.
HITS, FETCHED, IN_PLACE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@step_jit
def look_up(
    cu_q, context, table, open_slot, units, totals, chosen, lengths, slot_of, wanted, used, misses, clock, counts,
    table_stride, chosen_stride, first_unit, window, sink_pages, min_pages, num_slots,
    BLOCKS: tl.constexpr, CHOSEN: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Notes the use of N pages of a unit's list, and those that have no slot, each block once a round.

    Grid (units, lists, N-th parts): list 0 holds the pages that are read in any case, list 1 + h (`CHOSEN`) those that
    kv head h chose. `BLOCKS`: units are block units. Misses of decode go to `misses[0]`, of prompts to `misses[1]`.
    """
    unit, which, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if first_unit + unit >= tl.load(totals + (1 if BLOCKS else 0)):
        return
    row = tl.load(units + 2 * (first_unit + unit))
    query = tl.load(units + 2 * (first_unit + unit) + 1)
    length = tl.load(context + row)
    first, last = candidates(length, query, window, sink_pages, min_pages, L)
    count = (length + L.page - 1) // L.page - (last - first)
    i = part * N + tl.arange(0, N)
    pages = tl.where(i >= first, i + last - first, i)
    if CHOSEN:
        if which > 0:
            at = unit * L.heads + which - 1
            count = tl.load(lengths + at)
            pages = tl.load(chosen + at.to(tl.int64) * chosen_stride + i, mask=i < count, other=0)
    if part * N >= count:
        return
    block = tl.load(table + row.to(tl.int64) * table_stride + pages, mask=i < count, other=0)
    sealed = (i < count) & (tl.load(open_slot + block, mask=i < count, other=0) < 0)
    now = tl.load(clock + ROUND)
    asked = sealed & (tl.atomic_xchg(wanted + block, now, mask=sealed, sem="relaxed") != now)  # by this program alone
    slot = tl.load(slot_of + block, mask=sealed, other=-1)
    tl.atomic_add(counts + HITS, tl.sum((asked & (slot >= 0)).to(tl.int64)), sem="relaxed")
    prompt = (tl.load(cu_q + row + 1) - tl.load(cu_q + row) > DECODE).to(tl.int32)
    tl.store(used + slot, tl.load(clock + NOW), mask=slot >= tl.where(prompt > 0, num_slots, 0))
    missed = (asked & (slot < 0)).to(tl.int32)
    place = tl.atomic_add(clock + MISSED + prompt, tl.sum(missed), sem="relaxed") + tl.cumsum(missed, 0) - 1
    tl.store(misses + prompt * num_slots + place, block, mask=(missed > 0) & (place < num_slots))


@step_jit
def find_slots(
    slot_of, block_of, wanted, used, misses, fetched, clock, counts, num_slots, tick, N: tl.constexpr
):  # fmt: skip
    """Gives the round's misses the slots that were unused for longest: grid (1,). Ends the round.

    Filled slots go to `fetched`; misses beyond them keep none. `tick`: 1 in the first round of a step, else 0.
    """
    this, now, hand = tl.load(clock + ROUND), tl.load(clock + NOW), tl.load(clock + HAND)
    found = this * 0
    missed = this * 0
    next_hand = hand
    for prompt in tl.static_range(2):
        asked = tl.load(clock + MISSED + prompt)
        missed += asked
        end = found + tl.minimum(asked, num_slots - found)
        begin = found
        for turn in tl.static_range(2 if prompt else 4):
            start = 0
            while (found < end) & (start < num_slots):
                at = start + tl.arange(0, N)
                inside = at < num_slots
                slot = hand + at
                slot = tl.where(slot < num_slots, slot, slot - num_slots)
                owner = tl.load(block_of + slot, mask=inside, other=-1)
                age = now - tl.load(used + slot, mask=inside, other=now)
                needed = tl.load(wanted + owner, mask=inside & (owner >= 0), other=this - 1) == this
                free = (inside & (age > (1 << (6 - 2 * turn)) - 1) & (needed == 0)).to(tl.int32)  # 63, 15, 3, 0
                place = found + tl.cumsum(free, 0) - 1
                take = (free > 0) & (place < end)
                block = tl.load(misses + prompt * num_slots + place - begin, mask=take, other=0)
                tl.store(slot_of + owner, -1, mask=take & (owner >= 0))
                tl.store(slot_of + block, slot, mask=take)
                tl.store(block_of + slot, block, mask=take)
                tl.store(used + slot, now - prompt * AGED, mask=take)
                tl.store(fetched + place, slot, mask=take)
                found += tl.sum(take.to(tl.int32))
                reach = tl.max(tl.where(take, at + 1, 0))
                next_hand = tl.where(reach > 0, (hand + reach) % num_slots, next_hand)
                start += N
            tl.debug_barrier()
        tl.store(clock + MISSED + prompt, 0)
    tl.store(clock + ROUND, this + 1)
    tl.store(clock + NOW, now + tick)
    tl.store(clock + HAND, next_hand)
    tl.store(clock + FOUND, found)
    tl.atomic_add(counts + FETCHED, found.to(tl.int64), sem="relaxed")
    tl.atomic_add(counts + IN_PLACE, (missed - found).to(tl.int64), sem="relaxed")


@triton.jit
def fetch_pages(
    block_of, fetched, clock, host, home, slots, words, host_stride, slot_stride, PARTS: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Host memory -> the slots that the last round filled, N words of 8 bytes at a time: grid (any,)."""
    for item in tl.range(tl.program_id(0), tl.load(clock + FOUND) * PARTS, tl.num_programs(0)):
        slot = tl.load(fetched + item // PARTS)
        block = tl.load(block_of + slot)
        row = home_of(block, block >= 0, home)
        word = (item % PARTS) * N + tl.arange(0, N)
        source = (host + row.to(tl.int64) * host_stride).to(tl.pointer_type(tl.int64))
        to = (slots + slot.to(tl.int64) * slot_stride).to(tl.pointer_type(tl.int64))
        tl.store(to + word, tl.load(source + word, mask=word < words), mask=word < words)


@triton.jit
def read_pages(blocks, host, home, to, words, host_stride, to_stride, N: tl.constexpr):
    """The pages of `blocks`, from host memory to rows on the device: grid (n, words / N)."""
    i, part = tl.program_id(0), tl.program_id(1)
    word = part * N + tl.arange(0, N)
    block = tl.load(blocks + i)
    source = (host + home_of(block, block >= 0, home).to(tl.int64) * host_stride).to(tl.pointer_type(tl.int64))
    row = (to + i.to(tl.int64) * to_stride).to(tl.pointer_type(tl.int64))
    tl.store(row + word, tl.load(source + word, mask=word < words), mask=word < words)


@triton.jit
def publish_pages(
    staged, blocks, slot_of, host, home, slots, planes, words, plane_words, staged_stride, host_stride, slot_stride,
    plane_stride, HAS_PLANES: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """New pages, `staged[i]` of block `blocks[i]` (negative, or without a row in host memory: skipped), to their home
    in host memory, to their slot if they have one, and their first `plane_words` to the scoring planes: grid (n, words
    / N)."""
    i, part = tl.program_id(0), tl.program_id(1)
    block = tl.load(blocks + i)
    if block < 0:
        return
    row = block
    if home is not None:
        row = tl.load(home + block)
    if row < 0:
        return
    word = part * N + tl.arange(0, N)
    page = (staged + i.to(tl.int64) * staged_stride).to(tl.pointer_type(tl.int64))
    data = tl.load(page + word, mask=word < words)
    at_home = (host + row.to(tl.int64) * host_stride).to(tl.pointer_type(tl.int64))
    tl.store(at_home + word, data, mask=word < words)
    slot = tl.load(slot_of + block)
    if slot >= 0:
        to = (slots + slot.to(tl.int64) * slot_stride).to(tl.pointer_type(tl.int64))
        tl.store(to + word, data, mask=word < words)
    if HAS_PLANES:
        plane = (planes + block.to(tl.int64) * plane_stride).to(tl.pointer_type(tl.int64))
        tl.store(plane + word, data, mask=word < plane_words)
