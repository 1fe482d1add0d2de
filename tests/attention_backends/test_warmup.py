"""Serving compiles nothing: what its steps launch, warm-up has launched before, by Triton's own keys (constants, types,
numbers that are 1 or divisible by 16, alignment of pointers). No GPU: keys are asked for, nothing is compiled.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.attention_backends import test_device_step
from tests.attention_backends.test_device_step import META, SPARSE, Layers, engine_config  # noqa: F401
from vllm_ktx import metrics
from vllm_ktx.attention_backends import ktx
from vllm_ktx.attention_backends.device_tiers import DeviceTiers
from vllm_ktx.attention_backends.selection import SparseSettings
from vllm_ktx.kv_quant import PageLayout, parse_format
from vllm_ktx.offload import PoolStats

pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget
from triton.runtime import jit

from vllm_ktx.attention_backends.triton import warmup
from vllm_ktx.attention_backends.triton.launch import TritonKernels, compile_only
from vllm_ktx.attention_backends.triton.xformers_prefill import XformersPrefill

DEVICE = 1 << 20  # that Triton has compiled nothing for


@pytest.fixture
def compiled(monkeypatch):
    """Names of kernels in the order in which Triton compiles them, as it would on an H100."""
    card = SimpleNamespace(
        get_current_device=lambda: DEVICE, get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )  # fmt: skip
    names, kernels = [], set()

    def compile_once(kernel, key, signature, device, *_):
        names.append(kernel.__name__)
        kernels.add(kernel)
        found = kernel.device_caches[device][0][key] = SimpleNamespace(key=key)
        return found

    monkeypatch.setattr(jit, "driver", SimpleNamespace(active=card))
    monkeypatch.setattr(jit.JITFunction, "_do_compile", compile_once)
    yield names
    for kernel in kernels:
        del kernel.device_caches[DEVICE]
    metrics.ON_DEVICE.clear()  # what these counted can't be read


WIDE = SPARSE | {"max_pages": 128}
# Fills tables of 16, 32 and all 60 columns; whole pages, chunks of several splits, evicted and reopened pages.
STEPS = [
    {"a": 20}, {"a": 1}, {"a": 1003, "b": 70}, {"b": 1, "a": 1}, {"a": 1, "b": 2}, {"a": 40}, {"a": 1090, "b": 1},
    {"a": 1, "b": 1}, *({row: 3} for row in "cdefg"), {"b": 1}, {"c": 1, "a": 1},
]  # fmt: skip
TIERED = {"overcommit": 2.0, "host_gib": 1.0, "audit_rate": 0.0}


@pytest.mark.parametrize(
    ("settings", "xformers"),
    [
        (WIDE, False),
        (WIDE | {"audit_rate": 0.0, "scoring": "header", "dense_layers": 1}, True),
        (WIDE | {"select": "global_ratio", "global_ratio": 0.3, "max_pages": None}, False),
        ({"format": "k8v8", "attention": "dense"}, False),
        ({"format": "none"}, False),
        (WIDE | TIERED | {"format": "k4v4"}, False),
        ({"format": "k4v4", "attention": "dense"} | TIERED, False),
        (WIDE | {"audit_rate": 0.0, "cudagraph": "full"}, False),
        (WIDE | TIERED | {"cudagraph": "full", "scoring": "codes"}, False),
    ],
)
@torch.inference_mode()
def test_serving_compiles_nothing(engine_config, compiled, monkeypatch, settings, xformers):  # noqa: F811
    prefill = XformersPrefill(warmup.shapes_only()) if xformers else None
    kernels = TritonKernels(launch=compile_only, prefill=prefill)
    monkeypatch.setattr(ktx, "kernels_for", lambda *args: kernels)
    monkeypatch.setattr(ktx, "prefill_kernels", lambda *args: kernels)
    monkeypatch.setattr(DeviceTiers, "take_stats", lambda tiers: PoolStats())  # which reads them
    monkeypatch.setattr(test_device_step, "BLOCKS", 60)
    layers = Layers(engine_config, META, settings)
    layers.builder.bind()
    layers.builder.warm_up(layers.host.shape[1])
    ready = len(compiled)
    assert ready > 5
    seen = {"width": set(), "sparse": set()}
    for rows in (1, 2) if settings.get("cudagraph") == "full" else ():
        common = layers.batch(np.zeros_like(layers.host), np.arange(rows), [0] * rows, [1] * rows)
        layers.attend(layers.builder.build_for_cudagraph_capture(common), layers.inputs(rows))
    for step in STEPS:
        common = layers.common(step)
        meta = layers.builder.build(0, common)
        layers.attend(meta, layers.inputs(common.num_actual_tokens))
        seen["width"].add(meta.block_table.shape[1])
        seen["sparse"].add(meta.sparse is not None)
    assert compiled[ready:] == [], "compiled while serving"
    assert seen["width"] == {16, 32, 60}
    assert seen["sparse"] == ({False} if layers.builder.sparse is None else {False, True})


def test_few_kernels_are_compiled(compiled):
    """Numbers that differ between steps make no more of them, nor do wide tables."""
    layout = PageLayout(parse_format("k4v4"), 64, 8, 128)
    for width, count in ((2048, 24), (16384, 27)):  # a choice among 32 or 16 leading splits; merging 32 to 1024
        found = warmup.warm_up(TritonKernels(), layout, 32, torch.bfloat16, width, 8192, SparseSettings())
        assert found == count == len(compiled), sorted(compiled)
