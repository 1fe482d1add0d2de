"""The KTX backend as vLLM sees it: backend, metadata builder and implementation for dense (MHA / GQA) decoder models.

vLLM hands out block ids; the builder plans per step which pages are appended to, sealed or reopened (`OpenPages`),
and every layer carries the plan out on its own memory and attends. Planning is the host's, also where a device holds
the block tables: it reads copies that vLLM's runner made on their way there (`_compat.host_table`), never the device.
One layer's KV tensor, which vLLM allocates and accounts, is carved into payloads, of all pages or (`Tiers`) of those in
use, followed by all pages' headers. Open pages live beside it, in the model's dtype.

The only upward import is `vllm_ktx`'s settings and counters; kernels and page formats know nothing of vLLM.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from .. import _compat
from ..config import DEFAULT_PAGE_SIZE, FORMAT_OF_CACHE_DTYPE, KtxConfig
from ..kv_quant import KVFormat, PageLayout, hadamard
from ..metrics import ON_DEVICE, STATS, TRACES
from ..offload import OpenPages, StepPlan, TierFault, Trace
from ..plan import log_memory_plan
from ..plugin import MIN_CAPABILITY, ktx_config
from ..tiering import engine_plan
from .audit import Audit
from .device_step import Accounts, DeviceSlots, send
from .kernels import Heads, Kernels, kernels_for, prefill_kernels
from .layer_memory import LayerMemory, carve, make_open_pages
from .selection import SparseSettings
from .tiered import LayerPages, Tiers

if TYPE_CHECKING:
    from .device_tiers import DeviceTiers
    from .triton.device_pages import DevicePages

logger = logging.getLogger("vllm.ktx")


@dataclass(frozen=True)
class _Seen:
    """What the newest engine's layers were built with: `customize_spec` is called without any configuration."""

    config: KtxConfig
    cache_dtype: str
    model_dtype: torch.dtype
    overcommit: float

    def layout(self, spec: AttentionSpec, layer_name: str | None) -> PageLayout:
        """The layout of `spec`'s pages in the named layer (None: the default format's)."""
        fmt = self.config.kv_format(self.cache_dtype, None if layer_name is None else layer_index(layer_name))
        return page_layout(spec, fmt, self.model_dtype)


_seen: _Seen | None = None
WORKSPACE_BYTES = 256 << 20  # what attention's kernels hold on a device at once, about
MIN_WIDTH = 16  # of a block table on a device, pages
AUDITED_LAYERS = 4  # an audited step recomputes every fourth layer, another one each time


class KTXBackend(AttentionBackend):
    """Paged, quantized attention for decoder models; select it with `--attention-backend ktx`."""

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list] = ["auto", "float16", "bfloat16", *FORMAT_OF_CACHE_DTYPE]

    @staticmethod
    def get_name() -> str:
        return "KTX"

    @staticmethod
    def get_impl_cls() -> type[KTXImpl]:
        return KTXImpl

    @staticmethod
    def get_builder_cls() -> type[KTXMetadataBuilder]:
        return KTXMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(32)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return DEFAULT_PAGE_SIZE  # asked on CUDA, after the layers were made, where the user gave none

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 16 == 0 and 16 <= head_size <= 512

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability | None) -> bool:
        return capability is None or capability.to_int() >= MIN_CAPABILITY

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # steps are planned on the host

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # One layer's pages are one run of memory: it is carved into payloads and headers.
        return (KVCacheLayout.LBNHC,)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False  # a connector would move pages without their open copies

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return cls.customize_layer_spec(spec, None)

    @classmethod
    def customize_layer_spec(cls, spec: AttentionSpec, layer_name: str | None) -> AttentionSpec:
        """One opaque run of `page_bytes` a block, so that vLLM's profiling, admission and logs count real bytes.

        Layers of other formats have other page sizes: vLLM keeps them in one KV cache group, with a region and a
        metadata builder for each size.
        """
        if spec.state_content_bytes is not None:
            return spec
        assert _seen is not None, "vLLM asked for KTX's page size before it built a KTX layer"
        if spec.head_size_v != spec.head_size:
            raise ValueError(
                f"Attention backend KTX can't serve this model: its values have head size {spec.head_size_v}, its keys "
                f"{spec.head_size}."
            )
        layout = _seen.layout(spec, layer_name)
        page_bytes = layout.page_bytes if _seen.overcommit == 1 else layout.tiered_page_bytes(_seen.overcommit)
        return dataclasses.replace(
            spec,
            num_head_slots=1,
            tokens_per_state=1,
            state_content_bytes=page_bytes // spec.block_size,
            dtype=torch.uint8,
        )


def page_layout(spec: AttentionSpec, fmt: KVFormat, model_dtype: torch.dtype) -> PageLayout:
    """The layout of one of `spec`'s pages."""
    return PageLayout(fmt, spec.block_size, spec.num_kv_heads, spec.head_size, model_dtype.itemsize)


def draft_tokens(vllm_config: VllmConfig) -> int:
    """Most drafts in one row's step."""
    speculative = vllm_config.speculative_config
    return 0 if speculative is None else int(speculative.num_speculative_tokens or 0)


def open_capacity(vllm_config: VllmConfig, layout: PageLayout, num_blocks: int = 1 << 30) -> int:
    """Open slots that any step of this engine can do with."""
    scheduler = vllm_config.scheduler_config
    rows = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    per_row = OpenPages.slots_per_row(layout.page_size, layout.fmt.residual_pages, draft_tokens(vllm_config))
    return min(rows * per_row + 1, num_blocks)


@dataclass
class KTXMetadata(AttentionMetadata):
    """One step of one KV cache group; the same for all its layers. Tensors on the layers' device, int32 unless said
    otherwise.

    `cu_q` `[rows + 1]`, `context` `[rows]`, `block_table` `[rows, max_pages]`, `open_slot` `[num_blocks]`. `sparse`:
    None too where no row of the step is long enough to leave a page out; `context_pages` `[tokens]` (int64) is then
    empty. `max_query_len`, `accounts`: where the step was planned from host copies of a device's tables.
    """

    num_tokens: int
    cu_q: torch.Tensor
    context: torch.Tensor
    block_table: torch.Tensor
    open_slot: torch.Tensor
    open_capacity: int
    layout: PageLayout
    sparse: SparseSettings | None
    context_pages: torch.Tensor
    audit: int | None  # which of every AUDITED_LAYERS layers are recomputed densely; None: this step isn't audited
    evict: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # slot (int64), block, valid tokens
    reopen: tuple[torch.Tensor, torch.Tensor] | None  # slot, block (int64)
    append: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # token, slot, offset
    seal_fresh: tuple[torch.Tensor, torch.Tensor] | None  # first token (int64), block
    seal_open: tuple[torch.Tensor, torch.Tensor] | None  # slot (int64), block
    tiers: Tiers | None = None  # where not all pages are resident
    max_query_len: int | None = None
    accounts: Accounts | None = None
    lost: set[int] = field(default_factory=set)  # blocks that couldn't be had in this step

    def count_votes(self, chosen: torch.Tensor) -> torch.Tensor:
        """int64 `[num_blocks]`: how often each block is in the lists of `chosen` int32 `[tokens, kv_heads, any]`: page
        numbers, -1 behind the last; of rows whose first entry is -1 nothing else is read."""
        token, head = (chosen[..., 0] >= 0).nonzero(as_tuple=True)
        pages = chosen[token, head].long()
        row = torch.searchsorted(self.cu_q[1:], token.int(), right=True)
        blocks = self.block_table[row[:, None], pages.clamp(min=0)][pages >= 0]
        return torch.bincount(blocks.long(), minlength=len(self.open_slot))

    def drop_context(self, blocks: set[int]) -> bool:
        """Rows that read one of `blocks` are computed without their context from now on: vLLM computes them again.
        Returns whether there was one that still had its context."""
        self.lost |= blocks
        pages = -(-self.context.long() // self.layout.page_size)
        lost = torch.isin(self.block_table, torch.tensor(sorted(blocks), dtype=self.block_table.dtype))
        rows = (lost & (torch.arange(self.block_table.shape[1]) < pages[:, None])).any(1)
        self.context = torch.where(rows, 0, self.context)
        return bool(rows.any())


class KTXMetadataBuilder(AttentionMetadataBuilder[KTXMetadata]):
    """Plans each step on the host from block tables and lengths.

    A plan isn't part of a CUDA graph, so attention runs between the graphs of the other layers' parts.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        config = ktx_config(vllm_config)
        # vLLM makes a builder for each page size, so all its layers have one format.
        seen = _Seen(config, vllm_config.cache_config.cache_dtype, vllm_config.model_config.dtype, 1.0)
        (self.layout,) = {seen.layout(kv_cache_spec, name) for name in layer_names}
        self.sparse = config.sparse_settings(self.layout.fmt, self.layout.page_size, layer_index(layer_names[0]))
        layers = vllm_config.compilation_config.static_forward_context
        first = next((name for name, layer in layers.items() if isinstance(getattr(layer, "impl", None), KTXImpl)), "")
        self.counts_steps = first in layer_names  # one builder of the engine's does
        self.audit = Audit(config.audit_rate)
        self.tier_plan = engine_plan(vllm_config, config, self.layout)
        self.trace = Trace() if config.trace else None
        if self.trace is not None:
            TRACES.add(self.trace)
        self.tiers: Tiers | None = None
        self.device_tiers: DeviceTiers | None = None
        self._close_tiers: Callable[[], Any] = lambda: None
        self._open_pages: OpenPages | None = None
        self._bound = (0, 0)  # address and blocks of the cache
        STATS.publish()
        log_memory_plan(
            vllm_config,
            self.layout,
            len(layer_names),
            open_capacity(vllm_config, self.layout),
            self.sparse,
            self.tier_plan,
        )
        for name in layer_names:
            layers[name].impl.unbind()  # a profiling cache of before
        self._sparse_layers = [i for i in map(layer_index, layer_names) if i >= config.dense_layers]
        self._device_slots: DeviceSlots | None = None
        self._accounts: Accounts | None = None

    def bind(self) -> OpenPages:
        """The map of open pages and the tiers, made anew when vLLM binds another cache (a profiling cache comes first
        on CUDA). Raises CapacityError if the tiers can't be had."""
        context = self.vllm_config.compilation_config.static_forward_context
        first = context[self.layer_names[0]].kv_cache
        num_blocks = first.shape[0]
        if self._open_pages is None or self._bound != (first.data_ptr(), num_blocks):
            self._bound = first.data_ptr(), num_blocks
            size, residual = self.layout.page_size, self.layout.fmt.residual_pages
            capacity = open_capacity(self.vllm_config, self.layout, num_blocks)
            self._open_pages = OpenPages(num_blocks, capacity, size, residual, draft_tokens(self.vllm_config))
            self._device_slots = None
            if self.tier_plan.overcommit > 1:
                self._open_tiers(context, num_blocks)
        return self._open_pages

    def _open_tiers(self, context: dict[str, Any], num_blocks: int) -> None:
        self._close_tiers()
        names = sorted(self.layer_names, key=layer_index)
        memory = [carve(context[name].kv_cache, self.layout)[0] for name in names]
        ranks = self.vllm_config.parallel_config.world_size
        plan = self.tier_plan
        tiers: Tiers | DeviceTiers
        if context[names[0]].impl.kernels.name == "triton":
            from .device_tiers import DeviceTiers

            self.device_tiers = tiers = DeviceTiers(plan, self.layout, num_blocks, memory, ranks=ranks)
        else:
            self.tiers = tiers = Tiers(plan, self.layout, num_blocks, memory, self.trace, ranks)
        self._close_tiers = weakref.finalize(self, tiers.close)  # threads and file go with the engine
        for warning in tiers.warnings:
            logger.warning("KTX: %s", warning)
        for name, pages in zip(names, tiers.layers, strict=True):
            context[name].impl.pages = pages

    def take_faults(self) -> set[int]:
        """Blocks whose content was lost since the last call; vLLM's scheduler must have them computed again."""
        return set() if self.tiers is None else self.tiers.take_faults()

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> KTXMetadata:
        common = common_attn_metadata
        pages = self.bind()
        device_table, host_table = common.block_table_tensor, _compat.host_table(common)
        cu_q = common.query_start_loc_cpu.to(torch.int32).numpy()
        table: Any  # numpy's, or what is indexed as such
        if host_table is not None:
            lengths, table = common.seq_lens_cpu_upper_bound, host_table  # exact but for drafts of an unfinished step
        elif device_table.device.type == "cpu":
            lengths, table = common.seq_lens, device_table.numpy()
        else:
            raise RuntimeError("KTX has no host copy of this step's block table: vLLM's V2 model runner didn't make it")
        context = lengths.numpy()[: len(cu_q) - 1].astype(np.int32) - np.diff(cu_q)
        prefilling = None if common.is_prefilling is None else common.is_prefilling.numpy()
        plan = pages.plan(cu_q, context, table, prefilling)
        if self.tiers is not None:
            begun = pages.block_of[plan.append[plan.append[:, 2] == 0, 1]]  # blocks that held something else before
            STATS.record_tiers(self.tiers.begin_step(table[:, 0].tobytes(), begun[begun >= 0]))
        if self.device_tiers is not None:
            STATS.record_tiers(self.device_tiers.take_stats())
        if self.counts_steps and not (host_table is not None and host_table.dummy):
            STATS.record_step(cu_q, context, pages.take_stats())
        sparse, audit, context_pages = self._sparse_step(cu_q, context)
        arrays = {"cu_q": (cu_q,), "context": (context,), "context_pages": (context_pages,), **_plan_columns(plan)}
        if host_table is None:
            parts: dict[str, Any] = {name: tuple(map(torch.from_numpy, columns)) for name, columns in arrays.items()}
            parts |= {"block_table": device_table, "open_slot": torch.from_numpy(pages.slot_of)}
        else:
            parts = self._send_step(common, pages, arrays, context, sparse is not None)
        parts |= {name: parts[name][0] for name in ("cu_q", "context", "context_pages")}
        parts |= {name: parts[name] or None for name in _COLUMNS}
        meta = KTXMetadata(
            num_tokens=common.num_actual_tokens,
            open_capacity=pages.capacity,
            layout=self.layout,
            tiers=self.tiers,
            sparse=sparse,
            audit=audit,
            **parts,
        )
        if self.tiers is not None and (unplaced := self.tiers.take_unplaced()):
            self.tiers.note_faults(unplaced)
            meta.drop_context(unplaced)
        return meta

    def _sparse_step(self, cu_q: Any, context: Any) -> tuple[SparseSettings | None, int | None, Any]:
        """The step's sparse attention, audit and pages by token: none where every row reads all its pages anyway."""
        sparse, size = self.sparse, self.layout.page_size
        longest = int((context + np.diff(cu_q)).max()) if len(context) else 0
        first, last = (0, 0) if sparse is None else sparse.candidates(longest, longest, size)
        if first == last:
            return None, None, np.empty(0, np.int64)
        pages = np.repeat(-(-context.astype(np.int64) // size), np.diff(cu_q))
        layers = self.vllm_config.model_config.get_total_num_hidden_layers()
        return sparse, self.audit.next_turn(min(AUDITED_LAYERS, layers)), pages

    def _send_step(
        self, common: CommonAttentionMetadata, pages: OpenPages, arrays: dict[str, tuple], context: Any, sparse: bool
    ) -> dict[str, Any]:
        """The step's arrays as tensors on the device, and what else its metadata has there."""
        device = common.block_table_tensor.device
        if self._device_slots is None:
            self._device_slots = DeviceSlots(len(pages.slot_of), device)
            self._accounts = Accounts(self._sparse_layers, self.layout.num_kv_heads, device)
            ON_DEVICE.add(self._accounts)
        assert self._accounts is not None
        arrays = {**arrays, "changed": self._device_slots.changes(pages.slot_of)}
        sent = iter(send([column for columns in arrays.values() for column in columns], device))
        parts: dict[str, Any] = {name: tuple(next(sent) for _ in columns) for name, columns in arrays.items()}
        self._device_slots.apply(*parts.pop("changed"))
        self._accounts.begin_step(parts["context_pages"][0] if sparse else None)
        # Kernels' grids follow from the table's width: a power of two makes few of them.
        used = -(-int(context.max(initial=1)) // self.layout.page_size)
        width = max(MIN_WIDTH, 1 << (used - 1).bit_length())
        parts["block_table"] = common.block_table_tensor[: len(context), :width]
        parts |= {"open_slot": self._device_slots.tensor, "accounts": self._accounts}
        return {**parts, "max_query_len": common.max_query_len}


# Columns of each part of a plan, as the kernels take them.
_COLUMNS = {
    "evict": (np.int64, np.int32, np.int32),
    "reopen": (np.int64, np.int64),
    "append": (np.int32, np.int32, np.int32),
    "seal_fresh": (np.int64, np.int32),
    "seal_open": (np.int64, np.int32),
}


def _plan_columns(plan: StepPlan) -> dict[str, tuple[Any, ...]]:
    """The plan's arrays by column; empty for what a step has nothing of."""
    parts = ((name, getattr(plan, name), kinds) for name, kinds in _COLUMNS.items())
    return {name: tuple(rows[:, i].astype(kind) for i, kind in enumerate(kinds)) if len(rows) else ()
            for name, rows, kinds in parts}  # fmt: skip


class KTXImpl(AttentionImpl[KTXMetadata]):
    """One layer's attention: carries the step's plan out on this layer's pages, then attends."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        global _seen
        _refuse(alibi_slopes, sliding_window, attn_type, kv_sharing_target_layer_name, sinks)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = float(logits_soft_cap or 0.0)
        self.vllm_config = vllm_config = get_current_vllm_config()
        config = ktx_config(vllm_config)
        if vllm_config.use_v2_model_runner:
            _compat.mirror_block_tables()  # before it makes them
        self.dense_layers = config.dense_layers
        self.model_dtype = vllm_config.model_config.dtype
        fmt, page_size = config.kv_format(vllm_config.cache_config.cache_dtype), vllm_config.cache_config.block_size
        self.layout = layout = PageLayout(fmt, page_size, self.num_kv_heads, head_size, self.model_dtype.itemsize)
        overcommit = engine_plan(vllm_config, config, layout).overcommit
        _seen = _Seen(config, vllm_config.cache_config.cache_dtype, self.model_dtype, overcommit)
        heads = Heads(self.model_dtype, head_size, num_heads // self.num_kv_heads, self.softcap)
        self.kernels: Kernels = prefill_kernels(config.prefill_kernel, kernels_for(config.kernels, fmt), heads)
        if overcommit > 1 and not self.kernels.pages:
            raise ValueError(
                f"ktx.overcommit needs the native kernels, and these are {self.kernels.name}: set ktx.overcommit to 1, "
                "use the format's own scales, or install a C++ compiler and reinstall vllm-ktx"
            )
        if overcommit > 1 and self.kernels.name != "triton":
            _compat.wrap_model_runner()  # before it makes the cache
        self.pages: LayerPages | DevicePages | None = None
        self._memory: LayerMemory | None = None
        self._reserved: torch.Tensor | None = None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: KTXMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`query` `[tokens, heads, head_size]`, `key`, `value` `[tokens, kv_heads, head_size]`; writes `output`."""
        if attn_metadata is None:  # vLLM measures memory with dummy tokens before there is a cache
            if query.device.type != "cpu":
                self._reserve(layer_index(layer.layer_name), query.device)
            return output
        meta, tokens = attn_metadata, attn_metadata.num_tokens
        memory = self._bind(kv_cache, meta)
        query, key, value = query[:tokens], key[:tokens], value[:tokens]
        if meta.layout.fmt.k_rotate:  # scores are the same; pages, headers and scorers see rotated keys only
            query, key = (hadamard.rotate(x.float()).to(x.dtype) for x in (query, key))
        if key.stride() != value.stride():  # the kernels take one set of strides for both
            key, value = key.contiguous(), value.contiguous()
        start = time.perf_counter()
        if self.pages is not None:
            self.pages.begin()
        memory.apply(self.kernels, meta, key, value)
        out = output.view(-1, self.num_heads, self.head_size)[:tokens]

        def attend(to: torch.Tensor, **more: Any) -> None:
            where = (meta.cu_q, meta.context, meta.block_table, meta.open_slot, memory.payload, memory.open_pages)
            more |= memory.paged
            if meta.max_query_len is not None and self.kernels.name == "triton":
                more["max_query_len"] = meta.max_query_len
            self.kernels.attention(meta.layout, query, key, value, to, *where, self.scale, softcap=self.softcap, **more)

        index, votes = layer_index(layer.layer_name), None
        while True:
            try:
                if meta.sparse is None or index < self.dense_layers:
                    attend(out)
                else:
                    votes = self._attend_sparse(attend, out, memory, meta, index)
                break
            except TierFault as fault:  # costs the rows that need the page; the others are computed as ever
                if not memory.lose(meta, fault):
                    raise
        if self.pages is not None:
            self.pages.end(start, votes)
        STATS.attention_calls += 1
        return output

    def _attend_sparse(
        self, attend: Any, out: torch.Tensor, memory: LayerMemory, meta: KTXMetadata, index: int
    ) -> torch.Tensor | None:
        """Attends the selected pages into `out`, and accounts for what was left out. Returns how often each block was
        chosen, if eviction goes by it."""
        shape = (meta.num_tokens, self.num_kv_heads)
        if meta.accounts is not None:
            counters = meta.accounts.of_layer(index)
        else:
            kinds = {"dropped": torch.float32, "pages_read": torch.int32, "depth": torch.float32}
            counters = {name: torch.empty(shape, dtype=kind) for name, kind in kinds.items()}
        audited = meta.audit is not None and index % AUDITED_LAYERS == meta.audit
        lse = torch.empty(meta.num_tokens, self.num_heads, device=out.device) if audited else None
        chosen = None
        sparse = meta.sparse
        if sparse is not None and meta.tiers is not None and meta.tiers.weighs:
            pages = int(meta.context_pages.max())
            most = math.ceil(sparse.global_ratio * pages) if sparse.global_ratio else sparse.top_k or sparse.cap
            chosen = torch.empty((*shape, max(1, min(pages, most))), dtype=torch.int32)
            chosen[..., 0] = -1  # a prefill block fills one row of 64: the others aren't touched
        attend(out, lse=lse, headers=memory.headers, sparse=meta.sparse, chosen=chosen, **counters)
        if meta.accounts is None:
            STATS.record_sparse(index, context_pages=meta.context_pages, **counters)
        if lse is not None:
            dense, dense_lse = torch.empty_like(out), torch.empty_like(lse)
            attend(dense, lse=dense_lse)
            record = STATS.record_audit if meta.accounts is None else meta.accounts.audit
            record(out, lse, dense, dense_lse, counters["dropped"])
        return None if chosen is None else meta.count_votes(chosen)

    def _bind(self, kv_cache: torch.Tensor, meta: KTXMetadata) -> LayerMemory:
        memory = self._memory
        if memory is None or memory.storage != (kv_cache.data_ptr(), kv_cache.shape[0]):
            sizes = (meta.layout, meta.open_capacity, self.model_dtype)
            memory = self._memory = LayerMemory.make(kv_cache, *sizes, self.pages, self._reserved)
        return memory

    def unbind(self) -> None:
        """Lets go of the cache that the layer was bound to, if it was."""
        self._memory = None

    def _reserve(self, index: int, device: torch.device) -> None:
        """Takes the memory that vLLM, which is measuring, must not give to the cache: open pages, which stay, and the
        kernels' workspace."""
        if self._reserved is None:
            fmt = ktx_config(self.vllm_config).kv_format(self.vllm_config.cache_config.cache_dtype, index)
            layout = dataclasses.replace(self.layout, fmt=fmt)
            capacity = open_capacity(self.vllm_config, layout)
            self._reserved = make_open_pages(layout, capacity, self.model_dtype, device)
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@functools.cache
def layer_index(name: str) -> int:
    """The number of a layer from its name (`model.layers.7.self_attn.attn` -> 7)."""
    numbers = [part for part in name.split(".") if part.isdigit()]
    return int(numbers[0]) if numbers else 0


def _refuse(
    alibi_slopes: Any, sliding_window: int | None, attn_type: str, kv_sharing_target: str | None, sinks: Any
) -> None:
    reasons = []
    if alibi_slopes is not None:
        reasons.append("ALiBi position biases")
    if sliding_window is not None:
        reasons.append(f"a sliding window of {sliding_window} tokens in some layers")
    if attn_type != AttentionType.DECODER:
        reasons.append(f"{attn_type} attention")
    if kv_sharing_target is not None:
        reasons.append("layers that share another layer's KV cache")
    if sinks is not None:
        reasons.append("learned attention sinks")
    if reasons:
        raise ValueError(f"Attention backend KTX can't serve this model: it has {' and '.join(reasons)}.")
