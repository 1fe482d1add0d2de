"""The policy in vLLM's own Scheduler, which decides what is asked, and when; no engine and no model's weights."""

from unittest.mock import Mock

import pytest
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_ktx.scheduler import LengthGroupedScheduler

BUDGET = 2048


@pytest.fixture(scope="module")
def config(retrieval_small):
    options = {"max_num_batched_tokens": BUDGET, "max_num_seqs": 8, "dtype": "float32", "enable_prefix_caching": False}
    return EngineArgs(str(retrieval_small), max_model_len=131072, enforce_eager=True, **options)


@pytest.fixture
def scheduler(config):
    vllm_config = config.create_engine_config()
    vllm_config.cache_config.num_gpu_blocks = 4096
    group = KVCacheGroupSpec(
        ["layer"], FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=64, dtype=torch.float32)
    )
    return LengthGroupedScheduler(
        vllm_config, KVCacheConfig(4096, [], [group]), structured_output_manager=Mock(), block_size=64
    )


def ask(scheduler, name: str, tokens: int, **params) -> Request:
    request = Request(name, [1] * tokens, SamplingParams(max_tokens=50, **params), None)
    scheduler.add_request(request)
    return request


def step(scheduler) -> dict[str, int]:
    """Runs a step; returns the tokens that each request got."""
    output: SchedulerOutput = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    done = [[1] if not scheduler.requests[n].is_prefill_chunk else [] for n in names]
    scheduler.update_from_output(output, ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, done))
    return output.num_scheduled_tokens


def test_the_first_chunk_of_a_long_prefill_has_its_share_too(scheduler):
    ask(scheduler, "short", 100)
    assert step(scheduler) == {"short": 100}
    ask(scheduler, "long", 60_000)
    assert step(scheduler) == {"short": 1, "long": BUDGET // 2}, "beside decoding requests"
    assert step(scheduler) == {"short": 1, "long": BUDGET // 2}


def test_a_request_that_cannot_start_keeps_no_other_out(scheduler):
    blocked = ask(scheduler, "blocked", 60_000, structured_outputs=StructuredOutputsParams(regex="a"))
    ask(scheduler, "other", 60_000)
    for i in range(29):
        assert step(scheduler) == {"other": BUDGET}, "one long prefill at a time"
        if i == 1:
            blocked.structured_output_request.grammar = Mock()
    assert step(scheduler) == {"other": 60_000 - 29 * BUDGET, "blocked": BUDGET // 4}
