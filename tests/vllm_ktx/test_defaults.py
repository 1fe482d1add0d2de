"""What KTX sets in vLLM's configuration where the user chose nothing: the scheduler, and vLLM's own weight offload."""

from types import SimpleNamespace

import pytest
from vllm.config.offload import OffloadConfig

from vllm_ktx import plugin


def config(ktx: dict, async_scheduling: bool = False, scheduler_cls=None, offload=None) -> SimpleNamespace:
    return SimpleNamespace(
        additional_config={"ktx": ktx},
        cache_config=SimpleNamespace(user_specified_block_size=False, block_size=16),
        model_config=SimpleNamespace(runner_type="generate"),
        scheduler_config=SimpleNamespace(
            scheduler_cls=scheduler_cls, async_scheduling=async_scheduling, enable_chunked_prefill=True
        ),
        offload_config=offload or OffloadConfig(),
    )


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({"ktx": {}}, "vllm_ktx.scheduler.LengthGroupedScheduler"),
        ({"ktx": {}, "async_scheduling": True}, "vllm_ktx.scheduler.AsyncLengthGroupedScheduler"),
        ({"ktx": {"scheduler": "stock"}}, None),
        ({"ktx": {}, "scheduler_cls": "mine.Scheduler"}, "mine.Scheduler"),
    ],
)
def test_scheduler(given, chosen):
    found = config(**given)
    plugin.apply_defaults(found)
    assert found.scheduler_config.scheduler_cls == chosen


def test_prefetched_weights_are_vllms_own_offload():
    found = config({"weights": "prefetch"})
    plugin.apply_defaults(found)
    offload = found.offload_config
    assert (offload.offload_backend, offload.prefetch.offload_group_size) == ("prefetch", 4)
    offload = OffloadConfig(prefetch={"offload_group_size": 2, "offload_num_in_group": 2})
    plugin.apply_defaults(config({"weights": "prefetch"}, offload=offload))
    assert (offload.prefetch.offload_group_size, offload.prefetch.offload_num_in_group) == (2, 2)
    left = config({})
    plugin.apply_defaults(left)
    assert left.offload_config == OffloadConfig(), "resident leaves vLLM's own flags alone"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"weights": "prefetch"}, "ktx.weights='prefetch' copies weights to a GPU"),
        ({"prefill_kernel": "xformers"}, "ktx.prefill_kernel='xformers' runs on CUDA"),
        ({"cudagraph": "full"}, "ktx.cudagraph='full' is for CUDA"),
    ],
)
def test_what_needs_a_gpu_is_refused_on_cpu(setting, reason, retrieval_small):
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(
        str(retrieval_small), attention_backend="KTX", additional_config={"ktx": setting}, max_model_len=2048
    )
    with pytest.raises(ValueError, match=f"{reason}.*leave it out"):
        args.create_engine_config()
