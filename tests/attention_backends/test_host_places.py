"""Blocks between pinned host memory and disk, where kernels run behind the CPU: the device is a queue of what steps
read and write, done when their events pass, as late as can be. What it reads must be what was sealed last.
"""

import threading
from collections import deque

import numpy as np
import pytest
import torch

from tests.offload.faulty import FaultyTier
from vllm_ktx.attention_backends import host_places
from vllm_ktx.attention_backends.device_step import Passed
from vllm_ktx.attention_backends.host_places import HostPlaces
from vllm_ktx.offload import PageSpec
from vllm_ktx.tiering import TierPlan

BYTES = 4096 + 512


class Device:
    """Runs steps in order, each when somebody waits for its event or `run` is called."""

    def __init__(self, memory):
        self.memory, self.queue, self.done, self.launched = memory, deque(), 0, 0
        self.wrong = 0  # pages that were not what was sealed
        self.lock = threading.Lock()  # the thread that writes to disk waits for events too

    def launch(self, reads, writes):
        """`reads`: (place, content); `writes` alike."""
        self.queue.append((reads, writes))
        self.launched += 1

    def run(self, until):
        with self.lock:
            while self.done < until:
                reads, writes = self.queue.popleft()
                for place, content in reads:
                    self.wrong += not (self.memory[place] == content).all()
                for place, content in writes:
                    self.memory[place] = content
                self.done += 1

    def event(self):
        return Event(self)


class Event:
    def __init__(self, device):
        self.device, self.after = device, None

    def record(self):
        self.after = self.device.launched

    def query(self):
        return self.device.done >= self.after

    def synchronize(self):
        self.device.run(self.after)


def make(tmp_path, places, blocks, monkeypatch=None, eviction="lru"):
    memory = torch.zeros(places, BYTES, dtype=torch.uint8)
    device = Device(memory)
    plan = TierPlan(2.0, 0, 1, tmp_path, eviction, 2, True, True)
    below = HostPlaces(plan, PageSpec(blocks, 1, BYTES), memory, device.event)
    faulty = below.pool._moves.store = FaultyTier(below.pool._moves.store)
    return below, device, faulty


def run(below, device, truth, reads, seals, version, begun=()):
    """A step; returns what was lost."""
    arrays = [np.array(sorted(x), np.int32) for x in (reads, seals, begun)]
    lost = below.begin_step(*arrays)
    table = below.table
    device.launch(
        [(int(table[b]), truth[b]) for b in reads if b not in lost],
        [(int(table[b]), version) for b in seals if b not in lost],
    )
    for block in begun:
        truth.pop(block, None)
    for block in seals:
        truth[block] = version
    for block in lost:
        truth.pop(block, None)
    below.pool.check_integrity()
    return lost


@pytest.mark.parametrize("eviction", ["lru", "clock", "attention"])
@pytest.mark.parametrize("seed", range(3))
def test_a_device_that_runs_late_reads_what_was_sealed(tmp_path, seed, eviction):
    """Requests come, read, rewrite, are preempted in the middle of a step, over 3 times as many blocks as places."""
    rng, places, blocks = np.random.default_rng(seed), 12, 36
    below, device, _ = make(tmp_path, places, blocks, eviction=eviction)
    truth = {}
    for step in range(1, 400):
        if step > 2:
            device.run(max(device.done, int(rng.integers(step - 3, step))))  # at most two steps behind
        known = list(truth)
        count = min(len(known), int(rng.integers(0, 7)))
        reads = set(rng.choice(known, count, replace=False).tolist()) if count else set()
        fresh = set(rng.choice(blocks, int(rng.integers(0, 4)), replace=False).tolist()) - reads
        again = set(list(reads)[: int(rng.integers(0, 2))])  # reopened, and sealed at the end of the step
        begun = set(rng.choice(blocks, int(rng.integers(0, 3)), replace=False).tolist()) - reads - fresh
        assert not run(below, device, truth, reads, fresh | again, step % 251 + 1, begun)
    stats = below.take_stats()
    assert stats.evictions > 100 and stats.fetched_bytes > 100 * BYTES and stats.written_bytes > 0
    assert not below.take_faults()
    device.run(device.launched)
    assert not device.wrong
    below.close()


def test_a_place_is_nobody_elses_until_the_step_that_reads_it_is_done(tmp_path):
    below, device, _ = make(tmp_path, 4, 12)
    truth = {}
    run(below, device, truth, [], [1, 2, 3, 4], 7)
    run(below, device, truth, [1, 2, 3, 4], [], 0)
    assert device.done <= 1, "nothing waits while there is room, but what writes to disk for the first step"
    run(below, device, truth, [], [5], 9, begun=[1])  # 1 is free, but its place is still read
    assert device.done >= 2, "the step that reads it was waited for"
    device.run(device.launched)
    assert not device.wrong
    assert below.table[1] < 0 and (below.pool._moves.table.busy > 0).any()
    below.close()


def test_what_comes_back_from_disk_is_checked_and_told_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(host_places.logger, "propagate", True)
    below, device, faulty = make(tmp_path, 4, 12)
    truth = {}
    run(below, device, truth, [], [1, 2], 7)
    run(below, device, truth, [], [3, 4, 5], 8)
    below.pool.flush()
    faulty.bad_reads = {1, 2}
    gone = [block for block in (1, 2) if below.table[block] < 0]
    assert gone, "one of them had to make room"
    assert run(below, device, truth, [1, 2, 3], [], 0) == set(gone)
    assert below.take_faults() == set(gone) and "computed again" in caplog.text
    assert run(below, device, truth, [*gone], [], 0) == set(gone), "a step that was planned before"
    assert not below.take_faults()
    run(below, device, truth, [], gone, 9)  # computed again, into the same blocks
    faulty.bad_reads = set()
    assert not run(below, device, truth, gone, [], 0)
    device.run(device.launched)
    assert not device.wrong
    below.close()


def test_a_disk_that_refuses_writes_costs_the_blocks_that_must_leave(tmp_path):
    below, device, faulty = make(tmp_path, 4, 12)
    truth = {}
    faulty.bad_writes = set(range(12))
    for block in range(1, 10):
        assert not run(below, device, truth, [], [block], block)
    there = [block for block in range(1, 10) if below.table[block] >= 0]
    assert len(there) == 4
    lost = run(below, device, truth, [there[0], 1], [], 0)
    assert lost == {1} and below.take_faults() == {1} and below.take_stats().lost >= 4
    device.run(device.launched)
    assert not device.wrong
    below.close()


def test_more_than_host_memory_holds_leaves_the_last_rows_without(tmp_path):
    below, device, _ = make(tmp_path, 8, 24)
    truth = {}
    for start in (1, 5, 9):
        run(below, device, truth, [], range(start, start + 4), start)
    lost = run(below, device, truth, range(1, 13), [], 0)
    assert lost == {9, 10, 11, 12}, "as much as fits is served"
    lost = below.begin_step(np.arange(1, 8, dtype=np.int32), np.arange(13, 17), np.empty(0, np.int32))
    assert lost and lost <= {13, 14, 15, 16}, "new pages that find no place"
    device.run(device.launched)
    assert not device.wrong
    below.close()


def test_a_lost_block_of_several_ranks_stops_the_engine(tmp_path):
    memory = torch.zeros(4, BYTES, dtype=torch.uint8)
    plan = TierPlan(2.0, 0, 1, tmp_path, "lru", 2, True, True)
    below = HostPlaces(plan, PageSpec(8, 1, BYTES), memory, Passed, alone=False)
    with pytest.raises(RuntimeError, match=r"blocks \[3\] are lost on one of several ranks"):
        below.begin_step(np.array([3], np.int32), np.empty(0, np.int32), np.empty(0, np.int32))
    below.close()
