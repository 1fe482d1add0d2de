"""The hot pool: a randomised model first, then each promise on its own."""

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.offload.cases import KINDS, SPLIT, WHOLE_PAGES, content, make_store
from tests.offload.faulty import FaultyTier
from tests.offload.pool_model import PoolModel
from vllm_ktx.offload import (
    MIN_SLOTS,
    POLICIES,
    SCORING,
    WHOLE,
    HostTier,
    HotPool,
    PageMissing,
    PageSpec,
    PageTimeout,
    PoolFull,
    TierFault,
    Trace,
)
from vllm_ktx.offload.page_table import RESIDENT

SPEC = PageSpec(num_blocks=24, num_layers=2, page_bytes=600, scoring_bytes=200)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(KINDS),
    policy=st.sampled_from(sorted(POLICIES)),
    slots=st.integers(MIN_SLOTS, 30),
    spec=st.sampled_from([SPLIT, WHOLE_PAGES, SPEC]),
    faults=st.booleans(),
)
def test_pool_is_a_dict(tmp_path, seed, kind, policy, slots, spec, faults) -> None:
    model = PoolModel(spec, make_store(kind, spec, tmp_path), slots, policy, np.random.default_rng(seed), faults)
    for i in range(120):
        model.step()
        if i % 20 == 0:
            model.pool.check_integrity()
    model.finish()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_soak(tmp_path) -> None:
    """Ten minutes of the same, on every kind of store."""
    end, seed = time.monotonic() + 600, 0
    while time.monotonic() < end:
        rng = np.random.default_rng(seed)
        kind, policy = KINDS[seed % len(KINDS)], sorted(POLICIES)[seed % len(POLICIES)]
        slots, spec = int(rng.integers(MIN_SLOTS, 60)), (SPLIT, WHOLE_PAGES, SPEC)[seed // 7 % 3]
        model = PoolModel(spec, make_store(kind, spec, tmp_path), slots, policy, rng, bool(rng.integers(2)))
        for _ in range(2000):
            model.step()
        model.finish()
        seed += 1


class Pool:
    """A pool over host memory whose store can be made to fail."""

    def __init__(self, slots: int = 16, **options) -> None:
        self.memory = [torch.zeros(slots, SPEC.page_bytes, dtype=torch.uint8) for _ in range(SPEC.num_layers)]
        self.store = FaultyTier(HostTier(SPEC))
        self.pool = HotPool(SPEC, self.memory, self.store, **{"timeout": 20.0, **options})

    def seal(self, blocks, layer: int = 0, version: int = 0) -> None:
        for start in range(0, len(blocks), self.pool.wave):
            some = np.asarray(blocks[start : start + self.pool.wave])
            slots = torch.from_numpy(self.pool.allocate(layer, some)).long()
            self.memory[layer][slots] = torch.from_numpy(content(SPEC, SPEC.pages(layer, some), version))
            self.pool.commit(layer, some)
            self.pool.release(layer)

    def lookup(self, layer, blocks, parts: int = WHOLE) -> np.ndarray:
        """The slots of pages whose parts are there now, -1 for others."""
        slots = self.pool.slot_table(layer).numpy()[list(blocks)]
        state, have = self.pool.slot_flags(layer)
        return np.where((slots >= 0) & (state[slots] == RESIDENT) & (have[slots] & parts == parts), slots, -1)

    def right(self, blocks, slots, layer: int = 0, version: int = 0) -> bool:
        got = self.memory[layer][torch.from_numpy(slots).long()].numpy()
        return bool((got == content(SPEC, SPEC.pages(layer, blocks), version)).all())


@pytest.fixture
def make():
    made: list[Pool] = []

    def build(slots: int = 16, **options) -> Pool:
        made.append(Pool(slots, **options))
        return made[-1]

    yield build
    for pool in made:
        pool.store.gate.set()
        pool.store.write_gate.set()
        pool.pool.close()
        pool.pool.check_integrity()


def wait_for(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


def test_pages_beyond_the_slots_come_back(make) -> None:
    p = make()
    p.seal(range(24))
    for start in range(0, 24, 4):
        blocks = np.arange(start, start + 4)
        assert p.right(blocks, p.pool.ensure(0, blocks))
        p.pool.release(0)
    stats = p.pool.take_stats()
    assert stats.hits + stats.misses == 24 and stats.misses >= 8
    assert stats.fetched_bytes == stats.misses * SPEC.page_bytes
    assert stats.evictions > 0 and stats.written_bytes > 0 and stats.stall_seconds > 0


def test_a_pool_that_holds_everything_writes_nothing(make) -> None:
    p = make(slots=64, dirty_share=1.0)
    p.seal(range(24))
    for start in range(0, 24, 12):
        p.pool.ensure(0, range(start, start + 12))
    stats = p.pool.take_stats()
    assert (stats.hits, stats.misses, stats.written_bytes, stats.fetched_bytes) == (24, 0, 0, 0)


def test_a_late_page_is_waited_for(make) -> None:
    p = make()
    p.seal(range(24))
    p.pool.flush()
    blocks = np.flatnonzero(p.lookup(0, range(24)) < 0)[:3]
    p.store.gate.clear()
    p.pool.prefetch(0, blocks)
    wait_for(lambda: p.pool.take_stats().queue_depth == 0)
    threading.Timer(0.05, p.store.gate.set).start()
    assert p.right(blocks, p.pool.ensure(0, blocks))
    stats = p.pool.take_stats()
    assert stats.late == 3 and stats.misses == 0 and stats.stall_seconds > 0.01


def test_a_page_that_never_comes_ends_the_wait(make) -> None:
    p = make(timeout=0.1)
    p.seal(range(24))
    p.pool.flush()
    block = np.flatnonzero(p.lookup(0, range(24)) < 0)[:1]
    p.store.gate.clear()
    p.pool.prefetch(0, block)
    wait_for(lambda: p.pool.take_stats().queue_depth == 0)
    with pytest.raises(TierFault, match="didn't arrive") as caught:
        p.pool.ensure(0, block)
    assert isinstance(caught.value.faults[0], PageTimeout)
    p.store.gate.set()
    wait_for(lambda: p.lookup(0, block)[0] >= 0)
    assert p.right(block, p.pool.ensure(0, block))


def test_prefetch_never_waits_and_drops_what_finds_no_room(make) -> None:
    p = make(queue_pages=5)
    p.seal(range(24))
    p.pool.flush()
    missing = np.flatnonzero(p.lookup(0, range(24)) < 0)
    p.store.gate.clear()
    p.pool.prefetch(0, missing)
    stats = p.pool.take_stats()
    assert stats.prefetched == 5 and stats.prefetch_dropped == len(missing) - 5 and stats.queue_peak == 5
    p.store.gate.set()


def test_a_forecast_does_not_push_out_its_own_pages(make) -> None:
    p = make(slots=16)
    p.seal(range(24))
    p.pool.flush()
    there = np.flatnonzero(p.lookup(0, range(24)) >= 0)
    missing = np.flatnonzero(p.lookup(0, range(24)) < 0)
    for start in range(4, 16, 4):  # the first four are now the longest unused
        p.pool.ensure(0, there[start : start + 4])
    p.pool.release(0)
    p.pool.prefetch(0, np.concatenate((there[:4], missing[:4])))
    wait_for(lambda: (p.lookup(0, missing[:4]) >= 0).all())
    assert (p.lookup(0, there[:4]) >= 0).all()


def test_cancel_takes_back_what_was_not_begun(make) -> None:
    p = make()
    p.seal(range(24))
    p.seal(range(24), layer=1)
    p.pool.flush()
    p.store.gate.clear()
    first, second = (np.flatnonzero(p.lookup(layer, range(24)) < 0)[:4] for layer in (0, 1))
    running = p.pool.prefetch(0, first)
    wait_for(lambda: p.pool.take_stats().queue_depth == 0)
    waiting = p.pool.prefetch(1, second)
    p.pool.cancel(running + waiting)
    p.store.gate.set()
    assert p.right(first, p.pool.ensure(0, first))
    assert (p.lookup(1, second) < 0).all() and len(p.store.reads) == 1
    assert p.right(second, p.pool.ensure(1, second), layer=1)


def test_what_waits_in_the_queue_is_taken_over(make) -> None:
    """`ensure` doesn't wait behind other layers' forecasts."""
    p = make()
    p.seal(range(24))
    p.seal(range(24), layer=1)
    p.pool.flush()
    p.store.gate.clear()
    first, second = (np.flatnonzero(p.lookup(layer, range(24)) < 0)[:4] for layer in (0, 1))
    p.pool.prefetch(0, first)
    wait_for(lambda: p.pool.take_stats().queue_depth == 0)
    p.pool.prefetch(1, second)
    threading.Timer(0.05, p.store.gate.set).start()
    assert p.right(second, p.pool.ensure(1, second), layer=1)
    assert p.pool.take_stats().queue_depth == 0


def test_a_scoring_fetch_is_completed_by_a_whole_one(make) -> None:
    p = make()
    p.seal(range(24))
    p.pool.flush()
    blocks = np.flatnonzero(p.lookup(0, range(24)) < 0)[:4]
    p.pool.take_stats()
    slots = p.pool.ensure(0, blocks, SCORING)
    want = content(SPEC, blocks)[:, : SPEC.scoring_bytes]
    assert (p.memory[0][torch.from_numpy(slots).long(), : SPEC.scoring_bytes].numpy() == want).all()
    assert (p.lookup(0, blocks) < 0).all() and (p.lookup(0, blocks, SCORING) == slots).all()
    again = p.pool.ensure(0, blocks)
    assert (again == slots).all() and p.right(blocks, again)
    assert p.pool.take_stats().fetched_bytes == 4 * SPEC.page_bytes


def test_new_content_voids_the_old_everywhere(make) -> None:
    p = make()
    p.seal(range(24), version=1)
    p.pool.flush()
    p.pool.forget([3, 20])
    with pytest.raises(TierFault, match="forgotten") as caught:
        p.pool.ensure(0, [2, 3, 4])
    assert list(caught.value.faults) == [1]
    p.seal([3], version=2)
    assert p.right([3], p.pool.ensure(0, [3]), version=2)


def test_new_content_while_the_old_is_read_and_written(make) -> None:
    p = make(dirty_share=0.0)
    p.store.write_gate.clear()
    p.seal(range(4), version=1)  # their write-back hangs
    p.pool.forget(range(4))
    p.seal(range(4), version=2)
    p.store.write_gate.set()
    p.pool.flush()
    p.seal(range(4, 24))
    p.pool.flush()
    assert (p.lookup(0, range(4)) < 0).all()
    p.store.gate.clear()
    p.pool.prefetch(0, range(4))  # old content on its way ...
    wait_for(lambda: p.pool.take_stats().queue_depth == 0)
    p.pool.forget(range(4))
    p.seal(range(4), version=3)
    p.store.gate.set()
    p.seal(range(4, 24))
    p.pool.flush()
    assert p.right(np.arange(4), p.pool.ensure(0, range(4)), version=3)


def test_a_page_that_can_not_be_read_fails_alone(make) -> None:
    p = make()
    p.seal(range(24))
    p.pool.flush()
    blocks = np.flatnonzero(p.lookup(0, range(24)) < 0)[:4]
    p.store.bad_reads = {int(blocks[1])}
    with pytest.raises(TierFault, match=f"block {blocks[1]}, layer 0: injected") as caught:
        p.pool.ensure(0, blocks)
    assert list(caught.value.faults) == [1]
    others = blocks[[0, 2, 3]]
    assert (p.lookup(0, others) >= 0).all() and p.right(others, p.pool.ensure(0, others))
    assert p.pool.take_stats().io_errors == 1
    p.store.bad_reads = set()
    assert p.right(blocks, p.pool.ensure(0, blocks))


def test_a_background_thread_survives_anything(make) -> None:
    p = make()
    p.seal(range(24))
    p.pool.flush()
    blocks = np.flatnonzero(p.lookup(0, range(24)) < 0)[:4]
    p.store.crash = RuntimeError("a bug")
    p.pool.prefetch(0, blocks)
    wait_for(lambda: p.pool.take_stats().io_errors == 4)
    with pytest.raises(TierFault, match="RuntimeError: a bug"):
        p.pool.ensure(0, blocks)
    p.store.crash = None
    assert p.right(blocks, p.pool.ensure(0, blocks))


def test_pages_that_can_not_be_written_stay_as_long_as_there_is_room(make) -> None:
    p = make(slots=16)
    p.store.bad_writes = {0, 1}
    p.seal(range(14))
    with pytest.raises(TierFault, match="injected"):
        p.pool.flush()
    assert p.right(np.arange(2), p.pool.ensure(0, range(2)))
    p.pool.release(0)
    p.store.bad_writes = set(range(48))  # the disk is full now
    p.seal(range(4, 24), version=1)
    stats = p.pool.take_stats()
    assert stats.lost > 0 and stats.io_errors > 0
    lost = np.flatnonzero((p.pool._table.slot_of[0] < 0) & ~p.pool._table.stored[0])
    assert len(lost) == stats.lost
    with pytest.raises(TierFault, match="lost: injected") as caught:
        p.pool.ensure(0, lost[:1])
    assert isinstance(caught.value.faults[0], PageMissing)


def test_slots_that_are_all_in_use_are_said_to_be(make) -> None:
    p = make(slots=16)
    p.seal(range(24))
    p.pool.flush()
    for start in range(0, 16, 4):
        p.pool.ensure(0, range(start, start + 4))
    with pytest.raises(PoolFull, match="16 held by the step, 0 not in the store of 16 slots"):
        p.pool.ensure(0, range(16, 20))
    with pytest.raises(PoolFull, match="no slot can be freed"):
        p.pool.allocate(0, range(16, 20))
    p.pool.release(0)
    assert (p.pool.ensure(0, range(20, 24)) >= 0).all()


def test_write_back_that_hangs_ends_the_wait(make) -> None:
    p = make(slots=8, timeout=0.1)
    p.store.write_gate.clear()
    with pytest.raises(PoolFull, match="no page was written back"):
        p.seal(range(24))
    p.pool.release(0)
    p.store.write_gate.set()
    p.seal(range(24))


def test_writes_wait_for_the_compute_that_made_the_page(make) -> None:
    p, order = make(dirty_share=0.0), []
    event = threading.Event()
    p.pool.allocate(0, [5])

    def ready() -> None:
        event.wait(20)
        order.append("computed")

    p.pool.commit(0, [5], ready)
    p.pool.release(0)
    assert p.pool.take_stats().written_bytes == 0
    event.set()
    p.pool.flush()
    assert order == ["computed"] and p.pool.take_stats().written_bytes == SPEC.page_bytes


@pytest.mark.parametrize("call", ["ensure", "allocate"])
def test_more_than_a_wave_is_refused(make, call) -> None:
    p = make(slots=16)
    with pytest.raises(ValueError, match=f"{call} of 5 pages at once, a wave has at most 4"):
        getattr(p.pool, call)(0, range(5))


def test_too_few_slots_are_refused() -> None:
    memory = [torch.zeros(3, SPEC.page_bytes, dtype=torch.uint8)] * 2
    with pytest.raises(ValueError, match=r"at least 4: lower ktx.overcommit"):
        HotPool(SPEC, memory, HostTier(SPEC))
    with pytest.raises(ValueError, match="needed uint8"):
        HotPool(SPEC, [torch.zeros(8, 10)] * 2, HostTier(SPEC))


def test_transfers_show_in_the_trace(make) -> None:
    trace = Trace()
    p = make(trace=trace)
    p.seal(range(24))
    p.pool.flush()
    p.pool.ensure(0, np.flatnonzero(p.lookup(0, range(24)) < 0)[:4])
    spans = {span.name: span for span in trace.spans()}
    assert spans["fetch"].bytes == 4 * SPEC.page_bytes and spans["write back"].thread == "ktx-write-back"
    assert all(event["dur"] >= 0 for event in trace.chrome()["traceEvents"] if event["ph"] == "X")


def test_bookkeeping_is_quick() -> None:
    """Under a millisecond for a hundred pages, by a wide margin; the best of many, as the machine is shared."""
    spec = PageSpec(8192, 2, 64)
    memory = [torch.zeros(4096, 64, dtype=torch.uint8) for _ in range(2)]
    pool = HotPool(spec, memory, HostTier(spec))
    blocks = np.random.default_rng(0).permutation(8192)[:1000]
    pool.allocate(0, blocks)
    pool.commit(0, blocks)
    pool.release(0)
    times = []
    for _ in range(30):
        start = time.perf_counter()
        pool.ensure(0, blocks)
        pool.prefetch(0, blocks)
        pool.release(0)
        times.append(time.perf_counter() - start)
    pool.close()
    assert min(times) < 2e-3, "a thousand pages"
