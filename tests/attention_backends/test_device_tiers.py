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

LAYOUT = PageLayout(parse_format("k4v4"), 32, 1, 32)
BLOCKS, LAYERS = 12, 2
BYTES = BLOCKS * LAYERS * LAYOUT.payload_bytes
PLAN = TierPlan(4.0, BYTES, 0, None, "clock", 2, True)


def make(plan=PLAN, **changes):
    memory = [torch.zeros(3, LAYOUT.payload_bytes, dtype=torch.uint8) for _ in range(LAYERS)]
    return DeviceTiers(plan, LAYOUT, **{"num_blocks": BLOCKS, "memory": memory, **changes})


@pytest.mark.parametrize("room", [0, BLOCKS * LAYERS * LAYOUT.scoring_bytes])
def test_every_block_has_a_home_and_planes_are_on_the_device_if_all_fit(room):
    tiers = make(plane_bytes=room)
    assert len(tiers.layers) == LAYERS and [x.split(":")[0] for x in tiers.warnings] == [
        "pages are scored by codes in host memory, over the bus"
    ] * (not room)
    for pages in tiers.layers:
        assert pages.host.shape == (BLOCKS, LAYOUT.payload_bytes)
        assert pages.scoring is (pages.planes if room else pages.host) and (pages.planes is None) == (not room)
    tiers.close()


def test_what_can_not_be_is_refused_by_name():
    with pytest.raises(ValueError, match="ktx.disk_gib=1: on a GPU"):
        make(replace(PLAN, disk_bytes=1 << 30))
    with pytest.raises(CapacityError, match="hold 11 of 12 blocks"):
        make(replace(PLAN, host_bytes=BYTES - 1))
    with pytest.raises(CapacityError, match="lower ktx.host_gib"):
        make(replace(PLAN, host_bytes=1 << 50))
    assert "by age alone" in make(replace(PLAN, eviction="attention")).warnings[0]


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
