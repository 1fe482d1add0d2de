"""The memory plan's arithmetic, and the counters' path to Prometheus."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from vllm_ktx.attention_backends.audit import Audit
from vllm_ktx.attention_backends.selection import SparseSettings
from vllm_ktx.config import KtxConfig
from vllm_ktx.kv_quant import PageLayout, parse_format
from vllm_ktx.metrics import KtxStats
from vllm_ktx.offload.open_pages import OpenPageStats
from vllm_ktx.plan import memory_plan
from vllm_ktx.tiering import plan_tiers


def test_plan_states_bytes_and_capacity():
    layout = PageLayout(parse_format("k4v4"), 64, 8, 128)
    rows = dict(memory_plan(layout, 32, 1000, 10, 131072, SparseSettings()))
    assert rows["format"] == "k4v4 (keys per_channel, values per_token + Hadamard), 32 layers"
    assert "64,000 tokens" in rows["device"]
    assert f"{layout.page_bytes:,} B a layer" in rows["page"]
    assert rows["attention"].startswith("sparse: sinks 64, window 4096, then by cascade: coverage 0.95")
    assert "dense" in dict(memory_plan(layout, 32, None, 10, 131072, None))["attention"]
    assert rows["bytes a token"].endswith("(3.55x)")
    assert "below the device" not in rows


def test_plan_says_when_host_memory_and_disk_are_not_needed():
    layout = PageLayout(parse_format("k4v4"), 64, 8, 128)
    tiers = plan_tiers(KtxConfig(host_gib=1), layout, 32, 1, 8 << 30)
    rows = dict(memory_plan(layout, 32, 1000, 10, 131072, SparseSettings(), tiers))
    assert rows["below the device"] == "nothing: overcommit is 1, the device holds every page"


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 30])
def test_every_audited_step_has_layers_to_audit(layers):
    from vllm_ktx.attention_backends.metadata import AUDITED_LAYERS, KTXMetadataBuilder

    model = SimpleNamespace(get_total_num_hidden_layers=lambda: layers)
    layout, sparse = PageLayout(parse_format("k4v4"), 64, 8, 128), SparseSettings(window=256, min_pages=1)
    builder = SimpleNamespace(
        sparse=sparse, layout=layout, audit=Audit(1.0), vllm_config=SimpleNamespace(model_config=model)
    )
    cu_q, context = np.array([0, 1]), np.array([8000])
    turns = [KTXMetadataBuilder._sparse_step(builder, cu_q, context)[1] for _ in range(8)]
    audited = [[i for i in range(layers) if i % AUDITED_LAYERS == turn] for turn in turns]
    assert all(audited) and {i for some in audited for i in some} == set(range(layers))


def test_counters_reach_prometheus_by_layer():
    stats = KtxStats()
    registry = CollectorRegistry()  # the process's own may have the counters of an engine already
    stats.publish(registry)
    stats.record_step(np.array([0, 1, 5]), np.array([100, 0]), OpenPageStats(appended_tokens=5, sealed=2))
    pages_read = torch.tensor([[3, 3], [9, 9]], dtype=torch.int32)
    depth = torch.tensor([[0.5, 1.0], [0.0, 0.0]])
    stats.record_sparse(7, torch.full((2, 2), 0.25), pages_read, torch.tensor([9, 9]), depth)
    stats.record_step(np.array([0, 1]), np.array([101]), OpenPageStats())
    assert (stats.decode_tokens, stats.prefill_tokens, stats.steps, stats.sealed) == (2, 4, 2, 2)
    assert stats.sparse_rows == 2 and stats.sparse_pages_context == 18 and stats.dropped_mass == 0.5
    assert registry.get_sample_value("vllm_ktx:sealed_total") == 2
    assert registry.get_sample_value("vllm_ktx:dropped_mass_total", {"layer": "7"}) == 0.5
    assert registry.get_sample_value("vllm_ktx:probed_share_total", {"layer": "7"}) == 1.5 == stats.probed_share


def test_audit_compares_with_dense():
    stats = KtxStats()
    out, lse = torch.ones(3, 4, 8), torch.full((3, 4), -0.1)
    stats.record_audit(out, lse, out * 1.1, torch.zeros(3, 4), torch.full((3, 2), 0.1))
    assert stats.audited_rows == 12
    assert abs(stats.audited_recall / 12 - np.exp(-0.1)) < 1e-6
    assert abs(stats.audited_claim / 12 - 0.9) < 1e-6
    assert abs(stats.audited_error / 12 - 0.1 / 1.1) < 1e-6
