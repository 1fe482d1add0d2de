"""OpenPages against a symbolic memory: pages hold token ids, a plan is carried out on them, and every row must read
back exactly its own tokens. Rows start, grow by chunks, decode, draft and reject, share prefixes, are freed, come back.
"""

import random

import numpy as np
import pytest

from tests.offload.scheduler_model import PAGE, Scheduler
from vllm_ktx.offload import OpenPages, PageLost

SEEDS = 200


class Memory:
    """Open slots and payloads as arrays of token ids (-1: nothing)."""

    def __init__(self, num_blocks: int, capacity: int) -> None:
        self.open = np.full((capacity, PAGE), -1)
        self.payload = np.full((num_blocks, PAGE), -1)
        self.seals = 0

    def apply(self, plan, fresh: np.ndarray) -> None:
        for slot, block, fill in plan.evict:
            self.payload[block, :fill] = self.open[slot, :fill]
        for slot, block in plan.reopen:
            self.open[slot] = self.payload[block]
        for token, slot, offset in plan.append:
            self.open[slot, offset] = fresh[token]
        for first, block in plan.seal_fresh:
            self.payload[block] = fresh[first : first + PAGE]
        for slot, block in plan.seal_open:
            self.payload[block] = self.open[slot]
        self.seals += len(plan.seal_fresh) + len(plan.seal_open)

    def read(self, pages: OpenPages, table: np.ndarray, context: int) -> np.ndarray:
        blocks = table[: -(-context // PAGE)]
        rows = [self.open[pages.slot_of[b]] if pages.slot_of[b] >= 0 else self.payload[b] for b in blocks]
        return np.concatenate(rows)[:context] if len(rows) else np.zeros(0, int)


class Engine:
    """The smallest scheduler that can hurt: block allocation with reuse, prefix sharing, rows left out of steps."""

    def __init__(self, num_blocks=40, rows=3, residual=0, speculative=0, capacity=None):
        per_row = OpenPages.slots_per_row(PAGE, residual, speculative)
        self.pages = OpenPages(num_blocks, capacity or rows * per_row, PAGE, residual, speculative)
        self.memory = Memory(num_blocks, self.pages.capacity)
        self.free = list(range(1, num_blocks))
        self.rows: list[dict | None] = [None] * rows
        self.next_token = 1000
        self.max_pages = num_blocks

    def start(self, row: int, prefix_of: int | None = None, prefix_pages: int = 0) -> None:
        self.stop(row)
        state = {"tokens": [], "blocks": [], "shared": 0, "prompt": True}
        donor = self.rows[prefix_of] if prefix_of is not None and prefix_of != row else None
        if donor is not None:  # only full, certain pages can be hit
            n = min(prefix_pages, len(donor["tokens"]) // PAGE)
            state |= {"tokens": donor["tokens"][: n * PAGE], "blocks": donor["blocks"][:n], "shared": n}
        self.rows[row] = state

    def stop(self, row: int) -> None:
        state = self.rows[row]
        if state is None:
            return
        shared_elsewhere = {b for i, r in enumerate(self.rows) if r and i != row for b in r["blocks"]}
        self.free += [b for b in state["blocks"] if b not in shared_elsewhere]
        self.rows[row] = None

    def step(self, counts: dict[int, int], drafts: dict[int, int] | None = None) -> None:
        drafts = drafts or {}
        active = [(r, n) for r, n in counts.items() if self.rows[r] is not None and n > 0]
        fresh, cu, context, tables, prefilling = [], [0], [], [], []
        for r, n in active:
            state = self.rows[r]
            need = -(-(len(state["tokens"]) + n + drafts.get(r, 0)) // PAGE)
            if need > len(state["blocks"]) + len(self.free):
                n = 0
            else:
                while len(state["blocks"]) < need:
                    state["blocks"].append(self.free.pop(0))
            new = list(range(self.next_token, self.next_token + n + (drafts.get(r, 0) if n else 0)))
            self.next_token += len(new)
            fresh += new
            cu.append(len(fresh))
            context.append(len(state["tokens"]))
            tables.append(state["blocks"] + [0] * (self.max_pages - len(state["blocks"])))
            prefilling.append(drafts.get(r, 0) == 0 and n > 1)
            state["expect"], state["new"] = list(state["tokens"]), new[:n]
        if not active:
            return
        as32 = lambda x: np.array(x, dtype=np.int32)  # noqa: E731
        table = as32(tables)
        plan = self.pages.plan(as32(cu), as32(context), table, np.array(prefilling))
        self.memory.apply(plan, as32(fresh))
        self.pages.check_integrity()
        for i, (r, _) in enumerate(active):
            got = self.memory.read(self.pages, table[i], context[i])
            assert got.tolist() == self.rows[r]["expect"], f"row {r} reads other tokens than it wrote"
            self.rows[r]["tokens"] += self.rows[r]["new"]


@pytest.mark.parametrize("residual", [0, 1, 2])
@pytest.mark.parametrize("chunk", [1, 5, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 200])
def test_prefill_then_decode(residual, chunk):
    engine = Engine(residual=residual)
    engine.start(0)
    for _ in range(-(-300 // chunk)):
        engine.step({0: chunk})
    for _ in range(2 * PAGE + 3):
        engine.step({0: 1})
    state = engine.rows[0]
    sealed = engine.pages.sealed_fill[state["blocks"][: len(state["tokens"]) // PAGE]]
    assert (sealed[: len(sealed)] == PAGE).all()
    assert engine.memory.seals == len(state["tokens"]) // PAGE, "each page is quantized exactly once"
    open_now = (engine.pages.slot_of >= 0).sum()
    assert open_now <= OpenPages.slots_per_row(PAGE, residual, 0)


def test_rejected_drafts_are_rewritten_and_never_sealed():
    engine = Engine(residual=0, speculative=5)
    engine.start(0)
    engine.step({0: 2 * PAGE - 2})
    for _ in range(40):
        engine.step({0: 1}, drafts={0: 5})  # all five rejected every time: the tail is rewritten across page ends
    assert engine.memory.seals == len(engine.rows[0]["tokens"]) // PAGE


def test_prefix_hit_in_the_same_step_reads_pages_just_written():
    engine = Engine()
    engine.start(0)
    engine.step({0: 3 * PAGE + 7})
    engine.start(1, prefix_of=0, prefix_pages=3)
    engine.step({0: 1, 1: 10})
    engine.step({1: 1, 0: 1})


def test_tiny_capacity_reopens_and_loses_nothing():
    engine = Engine(rows=4, capacity=2)
    for row in range(4):
        engine.start(row)
        engine.step({row: 10})
    for _ in range(3):
        for row in range(4):
            engine.step({row: 1})
    assert engine.pages.take_stats().reopened > 0


@pytest.mark.parametrize("residual", [0, 1, 2, 4])
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("chunk", [PAGE - 1, PAGE, 2 * PAGE + 3, 5 * PAGE])
def test_slots_per_row_are_enough_for_rows_in_mid_prefill(residual, rows, chunk):
    engine = Engine(num_blocks=200, rows=rows, residual=residual)
    for row in range(rows):
        engine.start(row)
    for _ in range(6):
        engine.step(dict.fromkeys(range(rows), chunk))
    assert engine.pages.take_stats().evicted_partial == 0


@pytest.mark.parametrize("drafts", [4, PAGE, 2 * PAGE + 6])
def test_slots_per_row_are_enough_for_drafts(drafts):
    engine = Engine(num_blocks=200, rows=2, residual=1, speculative=drafts)
    for row in range(2):
        engine.start(row)
        engine.step({row: PAGE + 5})
    for _ in range(2 * PAGE):
        engine.step({0: 1, 1: 1}, drafts={0: drafts, 1: drafts})


def test_a_block_hit_in_the_step_that_rewrites_it_shows_the_new_content():
    """A drafting row leaves a full page that was never sealed; another row gets its block, a third hits it at once."""
    as32 = lambda x: np.array(x, dtype=np.int32)  # noqa: E731
    pages, memory = OpenPages(8, 8, PAGE, 0, 2 * PAGE), Memory(8, 8)
    first = np.arange(1000, 1000 + PAGE + 1)
    memory.apply(pages.plan(as32([0, PAGE + 1]), as32([0]), as32([[1, 2, 0]]), np.array([False])), first)
    assert pages.dirty[pages.slot_of[1]], "full, but its tokens may still be drafts"
    # Row 0 hits block 1 (written by row 1 in this step) and goes on in block 3; row 1 rewrites block 1.
    fresh = np.concatenate(([5], np.arange(2000, 2000 + PAGE + 3)))
    table = as32([[1, 3, 0], [1, 4, 0]])
    plan = pages.plan(as32([0, 1, 1 + PAGE + 3]), as32([PAGE, 0]), table, np.array([False, True]))
    memory.apply(plan, fresh)
    assert memory.read(pages, table[0], PAGE).tolist() == list(range(2000, 2000 + PAGE))
    assert memory.payload[1].tolist() == list(range(2000, 2000 + PAGE))


def test_too_many_open_rows_in_one_step_is_refused():
    engine = Engine(rows=4, capacity=2)
    for row in range(4):
        engine.start(row)
    with pytest.raises(PageLost, match="slots_per_row"):
        engine.step(dict.fromkeys(range(4), 3))


def test_context_that_was_never_written_is_refused():
    pages = OpenPages(8, 4, PAGE)
    as32 = lambda x: np.array(x, dtype=np.int32)  # noqa: E731
    with pytest.raises(PageLost, match="neither open nor sealed"):
        pages.plan(as32([0, 1]), as32([PAGE]), as32([[3, 4, 0]]))
    with pytest.raises(PageLost, match="expected"):
        pages.plan(as32([0, 1]), as32([5]), as32([[3, 4, 0]]))


def test_dummy_rows_on_the_null_block_touch_nothing():
    pages = OpenPages(8, 4, PAGE)
    as32 = lambda x: np.array(x, dtype=np.int32)  # noqa: E731
    plan = pages.plan(as32([0, 100, 100]), as32([0, 0]), as32([[0] * 8, [0] * 8]))
    assert not len(plan.append) and not len(plan.seal_fresh)
    pages.check_integrity()


def test_any_history_of_a_scheduler():
    """With no more open slots than a step may need: `slots_per_row` for each of its rows."""
    seen = dict.fromkeys(("preempted", "hits", "accepted", "evicted_partial", "reopened"), 0)
    for seed in range(SEEDS):
        rng = random.Random(seed)
        residual, speculative, in_step = rng.randrange(3), rng.choice([0, 0, 3, 40, 70]), rng.choice([1, 2, 4])
        blocks, rows = rng.choice([20, 30, 60]), rng.choice([in_step, 6])
        capacity = min(in_step * OpenPages.slots_per_row(PAGE, residual, speculative), blocks)
        pages, memory = OpenPages(blocks, capacity, PAGE, residual, speculative), Memory(blocks, capacity)
        scheduler = Scheduler(rng, blocks, rows, in_step, speculative)
        for _ in range(120):
            if step := scheduler.schedule():
                run_step(pages, memory, step, blocks)
                scheduler.finish(step)
        counts = {**vars(scheduler), **vars(pages.take_stats())}
        seen = {name: total + counts[name] for name, total in seen.items()}
    assert all(seen.values()), f"too tame: {seen}"


def run_step(pages: OpenPages, memory: Memory, step, width: int) -> None:
    fresh = [(row.tokens + row.drafts)[row.computed : row.computed + count] for row, count in step]
    tables = np.zeros((len(step), width), np.int32)
    for i, (row, _) in enumerate(step):
        tables[i, : len(row.blocks)] = row.blocks
    context = np.array([row.computed for row, _ in step], np.int32)
    cu_q = np.cumsum([0, *map(len, fresh)]).astype(np.int32)
    prefilling = np.array([row.computed < row.prompt for row, _ in step])
    memory.apply(pages.plan(cu_q, context, tables, prefilling), np.concatenate(fresh))
    pages.check_integrity()
    for i, (row, count) in enumerate(step):
        assert memory.read(pages, tables[i], context[i]).tolist() == row.tokens[: row.computed]
        uncertain = row.blocks[len(row.tokens) // PAGE : -(-(row.computed + count) // PAGE)]
        assert (pages.sealed_fill[uncertain] < PAGE).all(), "drafts were sealed"
