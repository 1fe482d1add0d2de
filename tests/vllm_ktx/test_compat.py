"""Each workaround for vLLM is still needed: when one of these fails, delete the piece of _compat.py it names."""

import inspect
from types import SimpleNamespace

import vllm
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_ktx import _compat, register


def test_version_range(monkeypatch):
    assert _compat.vllm_version_problem() is None
    for version in ("0.31.2", "0.34.0", "1.0"):
        monkeypatch.setattr(vllm, "__version__", version)
        problem = _compat.vllm_version_problem()
        assert version in problem and "0.32 <= vLLM < 0.34" in problem and "\n" not in problem


def test_ktx_is_no_member_until_registered_so_unpickling_needs_the_reducer():
    source = inspect.getsource(inspect.getmodule(AttentionBackendEnum))
    assert "KTX" not in source
    import pickle

    register()
    assert pickle.loads(pickle.dumps(AttentionBackendEnum["KTX"])) is AttentionBackendEnum["KTX"]
    assert pickle.loads(pickle.dumps(AttentionBackendEnum["TRITON_ATTN"])) is AttentionBackendEnum["TRITON_ATTN"]


def test_cpu_platform_still_ignores_other_backends():
    original = inspect.unwrap(CpuPlatform.get_attn_backend_cls.__func__)
    assert "Cannot use %s backend on CPU" in inspect.getsource(original)


def test_customize_spec_still_gets_no_configuration():
    from vllm.v1.attention.backend import AttentionBackend

    assert list(inspect.signature(AttentionBackend.customize_spec).parameters) == ["spec"]


def test_vllm_still_asks_the_hook_about_every_request_and_takes_fewer_tokens():
    """Where LengthGroupedScheduler's limits act: on running and on waiting requests, before memory is allocated."""
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.schedule)
    running, waiting = source.split("# Next, schedule the WAITING requests.")
    for part in (running, waiting):
        asked = part.index("num_new_tokens = self._reserve_prefill_lookahead(")
        assert asked < part.index("if num_new_tokens == 0:", asked) < part.index("allocate_slots(", asked)
    assert "if not request_queue or input_budget" in waiting, "a falsy queue ends the round of admissions"


def test_a_layers_spec_is_still_customized_without_its_name():
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert "layer_name" not in inspect.getsource(inspect.unwrap(Attention.get_kv_cache_spec))
    source = inspect.getsource(GPUModelRunner.get_kv_cache_spec)
    assert source.index("attn_module.get_kv_cache_spec(") < source.index("customize_attention_spec(")


def test_lost_blocks_still_travel_to_the_scheduler_as_a_connectors_do():
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample = inspect.getsource(inspect.unwrap(GPUModelRunner.sample_tokens))
    assert "kv_connector_output = self.kv_connector_output" in sample
    update = inspect.getsource(Scheduler.update_from_output)
    assert "self._handle_invalid_blocks(" in update and "set(self.grammar_compile_error_reqs)" in update
    assert "self.recompute_kv_load_failures = True" in inspect.getsource(Scheduler.__init__)


def test_running_requests_hold_no_more_blocks_than_allowed():
    """vLLM's own manager and pool: 20 blocks, of which 8 may be in use, the null block among them."""
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(20, enable_caching=True, hash_block_size=64)
    took = []

    def allocate_slots(count):
        if count > pool.get_num_free_blocks():
            return None
        took.append(pool.get_new_blocks(count))
        return took[-1]

    manager = SimpleNamespace(block_pool=pool, allocate_slots=allocate_slots)
    _compat.limit_blocks_in_use(manager, 8)
    assert manager.allocate_slots(8) is None and len(manager.allocate_slots(5)) == 5
    assert manager.allocate_slots(3) is None and len(manager.allocate_slots(2)) == 2
    assert pool.get_num_free_blocks() == 12, "others see what is free"
    pool.free_blocks(took[0])
    assert len(manager.allocate_slots(5)) == 5 and manager.allocate_slots(1) is None


def test_v2s_block_ids_are_still_on_the_host_when_staged_only():
    from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    assert "self.block_tables[i].stage_write(req_index, start, block_ids)" in inspect.getsource(
        BlockTables.append_block_ids
    )
    assert "self.cpu" not in inspect.getsource(StagedWriteTensor), "vLLM keeps them itself"
    step = inspect.getsource(build_attn_metadata)
    assert "block_table = block_tables[i]" in step and "req_idx=req_idx" in step
    runner = inspect.getsource(GPUModelRunner.prepare_attn) + inspect.getsource(GPUModelRunner.prepare_dummy_attn)
    assert "gather_block_tables(" in runner and "get_dummy_block_tables(" in runner
