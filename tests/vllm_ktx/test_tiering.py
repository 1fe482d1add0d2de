"""Where pages may live, decided from settings alone; and the runtime over a real pool and store."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_ktx.attention_backends import tiered
from vllm_ktx.attention_backends.kernels import MIN_WAVE
from vllm_ktx.attention_backends.tiered import Tiers
from vllm_ktx.config import KtxConfig
from vllm_ktx.kv_quant import PageLayout, parse_format
from vllm_ktx.offload import GIB, CapacityError, TierFault, disk
from vllm_ktx.tiering import page_spec, plan_tiers

LAYOUT = PageLayout(parse_format("k4v4"), 64, 8, 128)  # Llama-3.1-8B
LAYERS = 32
PAGE_BYTES = LAYERS * LAYOUT.page_bytes
PAGE_GIB = PAGE_BYTES / GIB


def plan(device_gib=None, blocks=None, ranks=1, layout=LAYOUT, on_gpu=False, longest=0, **settings):
    device = None if device_gib is None else int(device_gib * GIB)
    return plan_tiers(KtxConfig(**settings), layout, LAYERS, ranks, device, blocks, on_gpu, longest)


def held(found, device_gib, layout=LAYOUT):
    """Blocks that vLLM will make, and slots a layer."""
    layer = int(device_gib * GIB) // LAYERS
    blocks = layer // layout.tiered_page_bytes(found.overcommit, found.planes)
    return blocks, layout.num_slots(blocks, layer, found.planes)


def test_everything_on_the_device_without_tiers():
    assert plan(4).overcommit == 1
    assert plan(4, host_gib=8, overcommit=1).overcommit == 1
    assert plan(40, host_gib=8).overcommit == 1, "the device holds more than the host"


def test_what_auto_asks_for_is_enough_and_a_store_without_use_is_named(caplog):
    assert plan(18 * PAGE_GIB, host_gib=8).overcommit > 1
    caplog.set_level("INFO", "vllm.ktx")
    assert plan(10 * PAGE_GIB, host_gib=5 * PAGE_GIB).overcommit == 1, "less than the device holds: nothing to refuse"
    assert "holds 10 pages a layer, host memory and disk 4: all pages stay on the device" in caplog.text


@pytest.mark.parametrize(("device", "host"), [(2, 8), (4, 12), (1, 6), (3, 64)])
def test_auto_makes_as_many_blocks_as_the_store_holds_and_no_more(device, host):
    found = plan(device, host_gib=host)
    blocks, slots = held(found, device)
    most = found.blocks_held(LAYOUT, LAYERS)
    assert 0.97 * most < blocks <= most
    assert slots >= MIN_WAVE
    spec = page_spec(LAYOUT, LAYERS, blocks)
    assert found.plane_bytes(spec) + spec.total_bytes <= host * GIB, "pages and their scoring planes fit"


def test_auto_leaves_half_of_the_device_to_the_pool(caplog):
    found = plan(1, host_gib=1000)
    blocks, slots = held(found, 1)
    assert blocks < found.blocks_held(LAYOUT, LAYERS)
    assert 0.49 < blocks * LAYOUT.header_bytes * LAYERS / GIB <= 0.5 and slots > MIN_WAVE


def test_a_gpu_keeps_the_scoring_planes_beside_slots_for_what_a_query_reads(caplog):
    reads = 195  # a page of sinks, 66 of the window, 128 chosen
    most = plan(2, host_gib=5, on_gpu=True)
    assert most.planes and held(most, 2)[1] >= reads
    blocks = 5 * GIB // (LAYERS * LAYOUT.payload_bytes)
    enough = LAYERS * (blocks * (LAYOUT.header_bytes + LAYOUT.scoring_bytes) + reads * LAYOUT.payload_bytes)
    assert plan(enough / GIB, host_gib=5, on_gpu=True).planes
    less = plan((enough - LAYERS) / GIB, host_gib=5, on_gpu=True)
    assert not less.planes and held(less, enough / GIB)[0] > 0.97 * blocks, "as many blocks, and more slots"
    assert f"with --kv-cache-memory-bytes {enough} or more; ktx.scoring='header' reads none" in caplog.text
    assert not plan(2, host_gib=5, on_gpu=True, scoring="header").planes and not plan(2, host_gib=5).planes


@pytest.mark.parametrize(("device", "longest", "fits"), [(None, 0, False), (1.4, 0, False), (2, 131072, True),
                                                         (2, 1 << 20, False), (16, 1 << 20, True)])  # fmt: skip
def test_planes_under_a_given_overcommit_leave_room_for_the_longest_request(device, longest, fits, caplog):
    found = plan(device, host_gib=64, overcommit=8, on_gpu=True, longest=longest)
    assert found.planes == fits and found.overcommit == 8
    assert (not fits) == ("--kv-cache-memory-bytes" in caplog.text)
    if fits:
        blocks, slots = held(found, device)
        assert blocks > longest // 64 and slots >= 195


def test_a_gpus_disk_holds_all_blocks_and_host_memory_one_request():
    disk = {"disk_gib": 40, "disk_dir": "/tmp", "on_gpu": True}
    found = plan(6, host_gib=10, longest=131072, **disk)
    block = LAYERS * LAYOUT.payload_bytes
    assert found.places(LAYOUT, LAYERS) == 10 * GIB // block
    assert found.blocks_held(LAYOUT, LAYERS) == 40 * GIB // block, "not both together"
    assert 0.97 * 40 * GIB // block < held(found, 6)[0] <= 40 * GIB // block
    need = 131072 // 64 + 2
    with pytest.raises(ValueError, match=rf"host_gib=4 holds {4 * GIB // block} pages.*{need} by .*host_gib to 4.38"):
        plan(6, host_gib=4, longest=131072, **disk)
    assert plan(6, host_gib=4.38, longest=131072, **disk).overcommit > 1


def test_ranks_share_and_planes_stay_out_where_there_is_no_room():
    whole, half = plan(4, host_gib=16), plan(2, host_gib=16, ranks=2)
    assert half.host_bytes == whole.host_bytes // 2
    disk = plan(1, disk_gib=30, disk_dir="/tmp")
    assert disk.plane_bytes(page_spec(LAYOUT, LAYERS, 1000)) == 0
    assert plan(1, host_gib=2, scoring="header").plane_bytes(page_spec(LAYOUT, LAYERS, 10)) == 0
    most = plan(1, host_gib=7, disk_gib=30, disk_dir="/tmp")  # the disk could hold more than has planes in 7 GiB
    blocks = most.blocks_held(LAYOUT, LAYERS)
    assert 0.9 < most.plane_bytes(page_spec(LAYOUT, LAYERS, blocks)) / (7 * GIB) <= 1
    assert 0.5 < blocks / disk.blocks_held(LAYOUT, LAYERS) < 1
    few = plan(1, host_gib=1, disk_gib=30, disk_dir="/tmp")
    assert few.blocks_held(LAYOUT, LAYERS) > disk.blocks_held(LAYOUT, LAYERS)
    assert few.plane_bytes(page_spec(LAYOUT, LAYERS, few.blocks_held(LAYOUT, LAYERS))) == 0
    both = plan(1, host_gib=12, disk_gib=30, disk_dir="/tmp")
    blocks = both.blocks_held(LAYOUT, LAYERS)
    assert blocks > disk.blocks_held(LAYOUT, LAYERS)
    assert 0 < both.plane_bytes(page_spec(LAYOUT, LAYERS, blocks)) <= 12 * GIB


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_gib": 8}, "ktx.overcommit='auto' needs the device's share to be known: set --kv-cache-memory-bytes"),
        ({"host_gib": 1e-4, "device_gib": 1}, "hold not one block"),
        ({"host_gib": 8, "overcommit": 20, "device_gib": 0.04}, "leaves .* at least 16 are needed: lower"),
        ({"host_gib": 8, "overcommit": 20, "blocks": 100}, "leaves .* at least 16 are needed: lower"),
        ({"host_gib": 8, "device_gib": 17 * PAGE_GIB}, f"hold 17 pages a layer.*-bytes {18 * PAGE_BYTES} or more, or"),
        ({"host_gib": 8, "device_gib": 3 * PAGE_GIB}, "hold 3 pages a layer, at least 18 are needed"),
    ],
)
def test_what_cannot_work_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        plan(**settings)


SMALL = PageLayout(parse_format("k4v4"), 64, 1, 64, 4)


def tiers(num_slots=20, blocks=60, layers=2, memory=None, **settings):
    found = plan_tiers(KtxConfig(overcommit=3, **{"host_gib": 0.01, **settings}), SMALL, layers, 1, None)
    memory = memory or [torch.zeros(num_slots, SMALL.payload_bytes, dtype=torch.uint8) for _ in range(layers)]
    return Tiers(found, SMALL, blocks, memory), memory


def fill(found, memory, layer, blocks):
    pages = found.layers[layer]
    for part, slots in pages.place(torch.tensor(blocks, dtype=torch.int32)):
        for i, slot in zip(part.tolist(), slots.tolist(), strict=True):
            memory[layer][slot] = (7 * blocks[i] + layer) % 251


@pytest.mark.parametrize("eviction", ["lru", "clock", "attention"])
def test_pages_come_back_wherever_they_went(eviction):
    found, memory = tiers(eviction=eviction)
    try:
        for layer in (0, 1):
            fill(found, memory, layer, list(range(1, 50)))
        found.begin_step(b"a")
        for layer, pages in enumerate(found.layers):
            pages.begin()
            for start in (1, 17, 33):
                blocks = np.arange(start, start + 16, dtype=np.int32)
                pages.fetch(blocks, scoring=False)
                slots = pages.slot_table[torch.from_numpy(blocks).long()].long()
                want = ((7 * torch.from_numpy(blocks).long() + layer) % 251).to(torch.uint8)
                assert (memory[layer][slots] == want[:, None]).all()
            votes = torch.zeros(60, dtype=torch.int64)
            votes[40] = 5
            pages.end(0.0, votes if found.weighs else None)
        stats = found.begin_step(b"a")
        assert stats.misses > 0 and stats.fetched_bytes > 0
        plane = found.layers[1].scoring
        assert plane is not None and (plane[49] == (7 * 49 + 1) % 251).all(), "scoring planes are filled at sealing"
        found.pool.check_integrity()
    finally:
        found.close()


def test_kernels_marks_count_as_hits_and_feed_the_forecast():
    found, memory = tiers()
    try:
        fill(found, memory, 0, list(range(1, 10)))
        pages = found.layers[0]
        found.begin_step(b"a")
        pages.begin()
        pages._touched[pages.slot_table[torch.tensor([3, 5])].numpy()] = 1
        pages.end(0.0)
        assert found.begin_step(b"a").hits == 2
        assert sorted(found.pipeline._last[0].tolist()) == [3, 5]
    finally:
        found.close()


def test_the_same_block_twice_in_a_step_gets_one_slot():
    found, memory = tiers()
    try:
        fill(found, memory, 0, [4, 9, 4])
        assert (found.layers[0].slot_table >= 0).sum() == 2
    finally:
        found.close()


def test_lost_blocks_are_told_once_and_missing_after():
    found, memory = tiers()
    try:
        fill(found, memory, 0, [1, 2, 3])
        found.note_faults({2})
        assert found.take_faults() == {2} and found.take_faults() == set()
        with pytest.raises(TierFault, match="block 2, layer 0"):
            found.layers[0].fetch(np.array([1, 2, 3], np.int32), scoring=False)
    finally:
        found.close()


def test_a_lost_block_of_several_ranks_stops_the_engine():
    found, _ = tiers()
    found._alone = False
    try:
        with pytest.raises(RuntimeError, match=r"blocks \[7\] are lost on one of several ranks"):
            found.note_faults({7})
    finally:
        found.close()


@pytest.mark.parametrize("slots", [4, 15])
def test_too_small_a_pool_is_refused_before_the_first_request(slots):
    with pytest.raises(ValueError, match=rf"leaves {slots} slots .* at least 16 .*--kv-cache-memory-bytes \d+ or more"):
        tiers(slots)
    found, _ = tiers(16)
    found.close()


@pytest.mark.parametrize(("module", "part"), [(tiered, "TieredStore"), (tiered, "HotPool"), (tiered, "LayerPages"),
                                              (disk, "Staging")])  # fmt: skip
def test_a_failed_start_leaves_nothing_open(module, part, monkeypatch, tmp_path):
    def fail(*args, **more):
        raise CapacityError("no room")

    def opened():
        links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]
        ours = [link for link in links if str(tmp_path) in link or "io_uring" in link]
        return len(ours), sum(thread.name.startswith("ktx-") for thread in threading.enumerate())

    before = opened()
    monkeypatch.setattr(module, part, fail)
    with pytest.raises(CapacityError, match="no room") as kept:  # as the traceback does
        tiers(disk_gib=0.01, disk_dir=str(tmp_path))
    assert opened() == before, kept


def test_too_small_a_store_names_the_settings():
    with pytest.raises(CapacityError, match=r"ktx.host_gib=0.001.*raise ktx.disk_gib to .* or ktx.host_gib to"):
        tiers(blocks=1000, host_gib=0.001)
