"""The memory plans: what docs/memory-plans.md says is what the code's sizes give."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from benchmarks import memory_plans
from benchmarks.memory_plans import MODELS, Plan
from vllm_ktx.config import KtxConfig
from vllm_ktx.tiering import plan_tiers

LLAMA = MODELS["meta-llama/Llama-3.1-8B-Instruct"]


def test_the_document_is_up_to_date():
    path = Path(__file__).parents[2] / "docs" / "memory-plans.md"
    assert path.read_text() == memory_plans.document() + "\n", "run python -m benchmarks.memory_plans > docs/..."


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 8.03),
        ("Qwen/Qwen2.5-7B-Instruct-1M", 7.62),
        ("Qwen/Qwen2.5-14B-Instruct-1M", 14.77),
        ("Qwen/Qwen3-8B", 8.19),
    ],
)
def test_parameters_are_those_that_the_models_publish(name, billions):
    assert MODELS[name].weights(16) / 2e9 == pytest.approx(billions, abs=0.006)


def test_llama_with_128k_tokens_takes_18_gb_with_a_hot_pool():
    assert Plan(LLAMA, 16, 131072).tiered <= 18e9


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("context", memory_plans.OVERCOMMIT)
@pytest.mark.parametrize("model", MODELS.values(), ids=lambda m: m.name)
def test_ktx_makes_of_a_command_what_the_table_says(model, context, bits):
    plan = Plan(model, bits, context)
    config, layers, device = KtxConfig(format=plan.fmt, host_gib=plan.host_gib), model.layers, plan.cache_bytes
    found = plan_tiers(config, plan.layout, layers, 1, device, on_gpu=True, max_model_len=context)
    blocks = device // layers // plan.layout.tiered_page_bytes(found.overcommit, found.planes)
    slots = plan.layout.num_slots(blocks, device // layers, found.planes)
    assert found.planes == (plan.scored <= memory_plans.USABLE) and blocks > plan.pages
    assert slots >= plan.pages // memory_plans.OVERCOMMIT[context]
    assert device <= 1.2 * (plan.headers + plan.hot + found.planes * plan.planes), "a GiB of host memory more at most"


def test_a_decode_step_reads_a_twentieth_of_bf16_up_to_a_number_of_chosen_pages():
    dense = 131072 * 2 * 8 * 128 * 2
    assert dense / sum(memory_plans.bytes_of_a_step(51)) >= 20
    assert dense / sum(memory_plans.bytes_of_a_step(128)) < 20


def test_the_workspace_is_bounded_by_waves_and_grows_with_what_a_step_needs():
    from vllm_ktx.attention_backends.triton import aot, launch

    chunk, longer = Plan(LLAMA, 16, 131072), Plan(LLAMA, 16, 1 << 20)
    assert 0.9 * launch.WAVE_BYTES < chunk.workspace < 1.1 * launch.WAVE_BYTES < longer.workspace
    sparse = memory_plans.SparseSettings()
    decode = aot.workspace(chunk.layout, LLAMA.q_heads, torch.bfloat16, sparse, 1, chunk.pages)
    scores = 4 * LLAMA.q_heads * chunk.pages  # log-masses of one query, held twice, and their variances or shares
    assert 2 * scores < decode < chunk.workspace / 20
