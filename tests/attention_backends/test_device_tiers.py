"""A rank's pages above host memory, where there is no GPU: sizes, refusals, counters. What the kernels do with them:
`test_triton_pages.py`.
"""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vllm_ktx.kv_quant import PageLayout, parse_format
from vllm_ktx.offload import CapacityError
from vllm_ktx.tiering import TierPlan

pytest.importorskip("triton")
from vllm_ktx.attention_backends import device_tiers
from vllm_ktx.attention_backends.device_tiers import DeviceTiers, pinned
from vllm_ktx.attention_backends.layer_memory import carve

LAYOUT = PageLayout(parse_format("k4v4"), 32, 1, 32)
BLOCKS, LAYERS = 12, 2
BYTES = BLOCKS * LAYERS * LAYOUT.payload_bytes
PLAN = TierPlan(4.0, BYTES, 0, None, "clock", 2, True)


def make(plan=PLAN, **changes):
    memory = [torch.zeros(3, LAYOUT.payload_bytes, dtype=torch.uint8) for _ in range(LAYERS)]
    return DeviceTiers(plan, LAYOUT, **{"num_blocks": BLOCKS, "memory": memory, "planes": [None] * LAYERS, **changes})


def test_every_block_has_a_home_and_is_scored_there_or_in_the_planes():
    planes = [torch.zeros(BLOCKS, LAYOUT.scoring_bytes, dtype=torch.uint8) for _ in range(LAYERS)]
    for given in ([None] * LAYERS, planes):
        tiers = make(planes=given)
        assert len(tiers.layers) == LAYERS and not tiers.warnings
        for pages, plane in zip(tiers.layers, given, strict=True):
            assert pages.host.shape == (BLOCKS, LAYOUT.payload_bytes)
            assert pages.planes is plane and pages.home is None, "a block's row is its number"
            assert pages.scoring[0] is (pages.host if plane is None else plane) and pages.scoring[1] is None
        tiers.close()


@pytest.mark.parametrize("blocks", [1, 37])
@pytest.mark.parametrize("with_planes", [False, True])
def test_vllms_memory_is_carved_without_overlap(blocks, with_planes):
    page = LAYOUT.tiered_page_bytes(3.5, with_planes)
    memory = torch.zeros(blocks, 1, LAYOUT.page_size, page // LAYOUT.page_size, dtype=torch.uint8)
    payload, headers, planes = carve(memory, LAYOUT, with_planes)
    assert len(payload) >= blocks // 3.5 - 1 and len(headers) == blocks and (planes is not None) == with_planes
    parts = [part for part in (payload, headers, planes) if part is not None]
    for part in parts:
        assert not part.any() and not part.data_ptr() % 8
        part.fill_(1)
    unused = memory.numel() - int(memory.sum())
    assert 0 <= unused < LAYOUT.payload_bytes + blocks * LAYOUT.page_size
    if with_planes:
        assert planes.shape == (blocks, LAYOUT.scoring_bytes)


def test_a_disk_takes_what_host_memory_does_not_hold(tmp_path):
    below = replace(PLAN, host_bytes=BYTES // 2, disk_bytes=BYTES * 2, disk_dir=tmp_path, on_gpu=True)
    tiers = make(below)
    whole = [pages.host for pages in tiers.layers]
    assert [len(pages.home) for pages in tiers.layers] == [BLOCKS] * LAYERS and len(whole[0]) == BLOCKS // 2
    assert whole[1].data_ptr() - whole[0].data_ptr() == LAYOUT.payload_bytes, "a block's layers lie side by side"
    tiers.close()
    tiers = make(replace(below, host_bytes=BYTES))
    assert tiers.places is None and tiers.warnings == ["ktx.disk_gib does nothing: ktx.host_gib holds all pages"]
    tiers.close()
    with pytest.raises(CapacityError, match=r"holds every page if ktx.host_gib \(6 of 12 blocks\) doesn't: raise"):
        make(replace(below, disk_bytes=BYTES - 1))


def test_what_can_not_be_is_refused_by_name():
    with pytest.raises(CapacityError, match="hold 11 of 12 blocks"):
        make(replace(PLAN, host_bytes=BYTES - 1))
    with pytest.raises(CapacityError, match="lower ktx.host_gib"):
        make(replace(PLAN, host_bytes=1 << 50))
    (warning,) = make(replace(PLAN, eviction="attention")).warnings
    assert "by age alone" in warning


def test_counts_are_those_since_the_last_look():
    tiers = make()
    tiers.take_stats()
    tiers.layers[0].counts += torch.tensor([5, 2, 1])
    tiers.layers[1].counts += torch.tensor([1, 1, 0])
    assert tiers.take_stats().hits == 0, "a step late: the copy was asked for before"
    stats = tiers.take_stats()
    assert (stats.hits, stats.misses, stats.fetched_bytes) == (6, 4, 3 * LAYOUT.payload_bytes)
    assert tiers.take_stats().misses == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("error", [0, 2])
def test_memory_is_locked_where_it_is_or_the_refusal_says_what_to_change(monkeypatch, caplog, error):
    """The driver's answers, without one: torch's pinned memory isn't there either."""
    asked = []
    cudart = SimpleNamespace(cudaHostRegister=lambda *args: asked.append(args) or error)
    monkeypatch.setattr(device_tiers.torch.cuda, "cudart", lambda: cudart)
    registered = []
    if error == 0:
        memory = pinned(8, 512, torch.device("cuda"), registered)
        assert asked == [(memory.data_ptr(), 8 * 512, 3)] and registered == [memory]
        return

    def launch_reports_it_again(*size, device):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", launch_reports_it_again)
    monkeypatch.setattr(device_tiers.logger, "propagate", True)
    with caplog.at_level(logging.WARNING), pytest.raises(CapacityError, match="ktx.overcommit to 1"):
        pinned(8, 512, torch.device("cuda"), registered)
    assert "CUDA error 2" in caplog.text and not registered


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_address_pinned_memory():
    registered = []
    memory = pinned(8, 4096, torch.device("cuda"), registered)
    memory.random_(255)
    assert registered and torch.equal(memory.cuda().cpu(), memory)
    device_tiers.unpin(registered)
