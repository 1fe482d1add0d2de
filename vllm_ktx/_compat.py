"""Everything that leans on a private or unstable name of vLLM, in one place, for the range of versions it was read on.

Each piece says which upstream behaviour makes it necessary; `tests/vllm_ktx/test_compat.py` fails when one no longer
is.
"""

from __future__ import annotations

import copyreg
import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

VLLM_RANGE = ((0, 32), (0, 34))  # first supported minor, first unsupported one
BACKEND_NAME = "KTX"
BACKEND_PATH = "vllm_ktx.attention_backends.ktx.KTXBackend"


def vllm_version_problem() -> str | None:
    """None if the installed vLLM is in range, else one line that says what is wrong and what to do."""
    import vllm

    low, high = VLLM_RANGE
    want = f"{low[0]}.{low[1]} <= vLLM < {high[0]}.{high[1]}"
    try:
        found = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])
    except ValueError:
        return f"vLLM-KTX needs {want}; this vLLM calls itself {vllm.__version__!r}. KTX is not registered."
    if low <= found < high:
        return None
    return f"vLLM-KTX needs {want}; found {vllm.__version__}. KTX is not registered: install a vLLM in that range."


def register_backend_member() -> None:
    """Adds KTX to vLLM's enum of attention backends, and makes the member unpickle in spawned processes.

    A spawned engine process unpickles its VllmConfig before it loads plugins, when the enum has no such member yet;
    the reducer registers it first.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(BACKEND_NAME, BACKEND_PATH)
    plain = AttentionBackendEnum.__reduce_ex__

    def reduce_member(member: Any) -> tuple:
        if member.name == BACKEND_NAME:
            return _unpickle_member, (member.name,)
        return plain(member, 2)

    copyreg.pickle(AttentionBackendEnum, reduce_member)  # type: ignore[arg-type]


def _unpickle_member(name: str) -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from . import register

    register()
    return AttentionBackendEnum[name]


def customize_specs_by_layer() -> None:
    """Lets a backend with `customize_layer_spec(spec, layer_name)` shape each layer's cache by its name. Idempotent.

    vLLM asks a layer for its spec and hands that to `AttentionBackend.customize_spec`, which never learns the name.
    """
    from vllm.model_executor.layers.attention import Attention

    original = Attention.get_kv_cache_spec
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec, customize = original(self, vllm_config), getattr(self.attn_backend, "customize_layer_spec", None)
        return spec if customize is None or spec is None else customize(spec, self.layer_name)

    Attention.get_kv_cache_spec = get_kv_cache_spec  # type: ignore[method-assign]


def selects_ktx(vllm_config: Any) -> bool:
    """Whether this engine's attention backend is KTX."""
    backend = vllm_config.attention_config.backend
    return backend is not None and backend.name == BACKEND_NAME


def wrap_platform(before_defaults: Any, after_defaults: Any) -> None:
    """Runs `before_defaults(vllm_config)` and `after_defaults(vllm_config)` around the platform's own configuration
    hook, and makes the CPU platform take KTX, for engines that select KTX. Others see no difference. Idempotent.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if getattr(platform, "_ktx_wrapped", False):
        return
    original_check = platform.check_and_update_config

    @functools.wraps(original_check)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        # vLLM rebuilds configs for sub-models without a model of their own; only a real engine's is ours.
        ours = vllm_config.model_config is not None and selects_ktx(vllm_config)
        if ours:
            before_defaults(vllm_config)
        original_check(vllm_config)
        if ours:
            after_defaults(vllm_config)

    platform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[method-assign, assignment]
    if current_platform.is_cpu():
        _wrap_cpu_backend_choice(platform)
    platform._ktx_wrapped = True  # type: ignore[attr-defined]


def _wrap_cpu_backend_choice(platform: Any) -> None:
    """The CPU platform ignores every backend but its own (it only logs "Cannot use ..."); CUDA validates by itself."""
    original = platform.get_attn_backend_cls

    @functools.wraps(original)
    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if selected_backend is None or selected_backend.name != BACKEND_NAME:
            return original(selected_backend, attn_selector_config, num_heads)
        backend = selected_backend.get_class()
        reasons = backend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(f"Attention backend KTX can't serve this model: {'; '.join(reasons)}.")
        return selected_backend.get_path()

    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def wrap_model_runner(v2: bool) -> None:
    """Lets the builders of this process's model runners open their tiers once the cache is there, so that what can't
    work fails at start-up, and hand lost blocks to the scheduler, as a KV connector does (`invalid_block_ids`): it
    computes those requests again. Idempotent.
    """
    from vllm.v1.outputs import KVConnectorOutput

    runner_class: Any
    if v2:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as runner_class
    else:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner as runner_class
    if getattr(runner_class, "_ktx_wrapped", False):
        return
    initialize, sample = runner_class.initialize_kv_cache, runner_class.sample_tokens

    def builders(runner: Any, what: str) -> list[Any]:
        groups = [group for groups in runner.attn_groups for group in groups]
        return [builder for group in groups for builder in group.metadata_builders if hasattr(builder, what)]

    @functools.wraps(initialize)
    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        for builder in builders(self, "bind"):
            builder.bind()

    @functools.wraps(sample)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        lost = {block for builder in builders(self, "take_faults") for block in builder.take_faults()}
        if lost and not v2:  # makes its output of this
            self.kv_connector_output = self.kv_connector_output or KVConnectorOutput()
            self.kv_connector_output.invalid_block_ids |= lost
        output = sample(self, *args, **kwargs)
        if lost and v2:
            step = getattr(output, "model_runner_output", output)  # of one that is on its way
            step.kv_connector_output = step.kv_connector_output or KVConnectorOutput()
            step.kv_connector_output.invalid_block_ids |= lost
        return output

    runner_class.initialize_kv_cache = initialize_kv_cache
    runner_class.sample_tokens = sample_tokens
    runner_class._ktx_wrapped = True


def limit_blocks_in_use(manager: Any, most: int) -> None:
    """Lets the requests that hold blocks, of `manager` (vLLM's KVCacheManager), hold `most` together, the null block
    among them: as if the pool had no others. What no request holds, and the prefix cache may still hit, is not counted.
    """
    pool, allocate = manager.block_pool, manager.allocate_slots
    count = pool.get_num_free_blocks
    beyond = pool.num_gpu_blocks - most

    @functools.wraps(allocate)
    def allocate_slots(*args: Any, **kwargs: Any) -> Any:
        pool.get_num_free_blocks = lambda: count() - beyond
        try:
            return allocate(*args, **kwargs)
        finally:
            pool.get_num_free_blocks = count  # others ask too, to know what is in use

    manager.allocate_slots = allocate_slots


class HostTable:
    """Block ids of a step's rows in host memory: `[row]` gives a row, `[rows, pages]` entries, as of a table
    `[rows, max_pages]`. `ids` int32 `[requests, max_pages]`; row i is `ids[index[i]]`. Copies no row that isn't asked
    for. `dummy`: the step has no requests."""

    def __init__(self, ids: npt.NDArray[np.int32], index: npt.NDArray[np.intp], dummy: bool = False) -> None:
        self._ids, self._index, self.dummy = ids, index, dummy

    def __getitem__(self, at: Any) -> npt.NDArray[np.int32]:
        rows, *pages = at if isinstance(at, tuple) else (at,)
        return self._ids[(self._index[rows], *pages)]


def mirror_block_tables() -> None:
    """Keeps block ids of vLLM's V2 model runner in host memory too: it stages them there, and then has them on the
    device only, from where a step can't read them without waiting for the last one. Idempotent.

    The tables that a step gets carry the copy along, for `host_table`: that of dummy steps holds block 0 only.
    """
    from vllm.v1.worker.gpu.block_table import BlockTables

    if hasattr(BlockTables.__init__, "__wrapped__"):
        return
    init, gather, dummy = BlockTables.__init__, BlockTables.gather_block_tables, BlockTables.get_dummy_block_tables

    def mirror(table: Any) -> None:
        table.ktx_host, table.ktx_null = (np.zeros(table.gpu.shape, np.int32) for _ in range(2))
        stage = table.stage_write

        def stage_write(index: int, start: int, ids: Any) -> None:
            stage(index, start, ids)
            table.ktx_host[index, start : start + len(ids)] = ids

        table.stage_write = stage_write

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for table in self.block_tables:
            mirror(table)

    def carry(name: str, step_tables: Any, tables: Any) -> Any:
        for ours, table in zip(step_tables, tables, strict=True):
            ours.ktx_host, ours.ktx_dummy = getattr(table, name), name == "ktx_null"
        return step_tables

    @functools.wraps(gather)
    def gather_block_tables(self: Any, *args: Any, **kwargs: Any) -> Any:
        return carry("ktx_host", gather(self, *args, **kwargs), self.block_tables)

    @functools.wraps(dummy)
    def get_dummy_block_tables(self: Any, *args: Any, **kwargs: Any) -> Any:
        return carry("ktx_null", dummy(self, *args, **kwargs), self.block_tables)

    BlockTables.__init__ = __init__  # type: ignore[method-assign]
    BlockTables.gather_block_tables = gather_block_tables  # type: ignore[method-assign]
    BlockTables.get_dummy_block_tables = get_dummy_block_tables  # type: ignore[method-assign]


def host_table(common: Any) -> HostTable | None:
    """The step's block ids in host memory, of a `CommonAttentionMetadata` of the V2 model runner; None: it has none
    (the V1 runner's table on the CPU can be read as it is)."""
    ids = getattr(common.block_table_tensor, "ktx_host", None)
    dummy = getattr(common.block_table_tensor, "ktx_dummy", False)
    return None if ids is None else HostTable(ids, common.req_idx, dummy)


def upload(data: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """`data` on the device; the host doesn't wait (CUDA: through pinned memory)."""
    from vllm.utils.torch_utils import async_tensor_h2d

    return async_tensor_h2d(data, device=device)
