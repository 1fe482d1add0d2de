"""The metadata of a step and the builder that plans it, for one KV cache group.

Planning is the host's, also where a device holds the block tables: it reads copies that vLLM's runner made on their way
there (`_compat.host_table`), never the device. The same plan goes to all layers of the group.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from .. import _compat
from ..config import KtxConfig
from ..kv_quant import PageLayout
from ..metrics import ON_DEVICE, STATS, TRACES
from ..offload import OpenPages, StepPlan, Trace
from ..plan import log_memory_plan
from ..plugin import ktx_config
from ..tiering import engine_plan
from .audit import Audit
from .device_step import Accounts, DeviceSlots, room, send
from .layer_memory import carve
from .selection import SparseSettings
from .self_check import check_once
from .tiered import Tiers
from .triton.geometry import table_width

if TYPE_CHECKING:
    from .device_tiers import DeviceTiers

logger = logging.getLogger("vllm.ktx")

AUDITED_LAYERS = 4  # an audited step recomputes every fourth layer, another one each time


@functools.cache
def layer_index(name: str) -> int:
    """The number of a layer from its name (`model.layers.7.self_attn.attn` -> 7)."""
    numbers = [part for part in name.split(".") if part.isdigit()]
    return int(numbers[0]) if numbers else 0


def page_layout(
    spec: AttentionSpec, config: KtxConfig, cache_dtype: str, model_dtype: torch.dtype, layer_name: str | None
) -> PageLayout:
    """The layout of `spec`'s pages in the named layer (None: the default format's)."""
    fmt = config.kv_format(cache_dtype, None if layer_name is None else layer_index(layer_name))
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
    empty. `max_query_len`, `accounts`: where the step was planned from host copies of a device's tables. `replayed`:
    kernels in a CUDA graph read the same tensors, at the same addresses, in every step of so many rows.
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
    replayed: bool = False
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

    Without `ktx.cudagraph: full` attention runs between the CUDA graphs of the other layers' parts. With it, steps of
    one token a row are replayed whole: what their plan says goes to where the captured kernels read it.
    """

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        if ktx_config(vllm_config).cudagraph != "full":
            return AttentionCGSupport.NEVER
        mode = vllm_config.compilation_config.cudagraph_mode
        if mode is None or mode.decode_mode() != CUDAGraphMode.FULL:
            logger.warning(
                "KTX: ktx.cudagraph='full' does nothing with vLLM's cudagraph_mode %s (--enforce-eager?)", mode
            )
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        config = ktx_config(vllm_config)
        # vLLM makes a builder for each page size, so all its layers have one format.
        dtypes = vllm_config.cache_config.cache_dtype, vllm_config.model_config.dtype
        (self.layout,) = {page_layout(kv_cache_spec, config, *dtypes, name) for name in layer_names}
        self.sparse = config.sparse_settings(self.layout.fmt, self.layout.page_size, layer_index(layer_names[0]))
        layers = vllm_config.compilation_config.static_forward_context
        first = next(
            (name for name, layer in layers.items() if isinstance(getattr(layer, "impl", None), AttentionImpl)), ""
        )
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
        self._captured: dict[int, tuple[int, torch.Tensor | None]] = {}  # rows of graphs: the table's address, arrays
        if device.type == "cuda" if config.self_check is None else config.self_check:
            self._check_kernels(layers[layer_names[0]].impl)

    def _check_kernels(self, impl: Any) -> None:
        """Raises KernelError if they are wrong on this device."""
        paged = self.tier_plan.overcommit > 1 and impl.kernels.name == "triton"
        setup = (impl.kernels, self.layout, impl.num_heads, impl.model_dtype, self.device)
        found, seconds = check_once(*setup, self.sparse, impl.softcap, paged)
        errors = ", ".join(f"{name} {error:.1e}" for name, error in found.items())
        logger.info("KTX: its %s kernels agree with the reference (%s; %.1f s)", impl.kernels.name, errors, seconds)

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
            self._captured.clear()
            if self.tier_plan.overcommit > 1:
                self._open_tiers(context, num_blocks)
        return self._open_pages

    def _open_tiers(self, context: dict[str, Any], num_blocks: int) -> None:
        self._close_tiers()
        names = sorted(self.layer_names, key=layer_index)
        carved = [carve(context[name].kv_cache, self.layout, self.tier_plan.planes) for name in names]
        memory, planes = [payload for payload, _, _ in carved], [planes for _, _, planes in carved]
        ranks = self.vllm_config.parallel_config.world_size
        plan = self.tier_plan
        tiers: Tiers | DeviceTiers
        if context[names[0]].impl.kernels.name == "triton":
            from .device_tiers import DeviceTiers

            self.device_tiers = tiers = DeviceTiers(plan, self.layout, num_blocks, memory, planes, ranks)
        else:
            self.tiers = tiers = Tiers(plan, self.layout, num_blocks, memory, self.trace, ranks)
        self._close_tiers = weakref.finalize(self, tiers.close)  # threads and file go with the engine
        for warning in tiers.warnings:
            logger.warning("KTX: %s", warning)
        for name, pages in zip(names, tiers.layers, strict=True):
            context[name].impl.pages = pages

    def take_faults(self) -> set[int]:
        """Blocks whose content was lost since the last call; vLLM's scheduler must have them computed again."""
        tiers = self.tiers or self.device_tiers
        return set() if tiers is None else tiers.take_faults()

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> KTXMetadata:
        """A step without requests, whose kernels will find any later step of so many rows, of a token each, in the same
        places."""
        rows, table = common_attn_metadata.num_reqs, common_attn_metadata.block_table_tensor
        self.bind()
        self._captured[rows] = table.data_ptr(), self._captured.get(rows, (0, None))[1]
        return self.build(0, common_attn_metadata)

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
        if self.tier_plan.overcommit > 1:
            begun = pages.block_of[plan.append[plan.append[:, 2] == 0, 1]]
            begun = begun[begun >= 0]  # blocks that held something else before
        if self.tiers is not None:
            STATS.record_tiers(self.tiers.begin_step(table[:, 0].tobytes(), begun))
        if self.device_tiers is not None:
            STATS.record_tiers(self.device_tiers.take_stats())
            lost = self.device_tiers.begin_step(plan, context, table, pages.sealed_fill, begun)
            if lost is not None:
                context = np.where(lost, 0, context)  # vLLM computes these rows again
        if self.counts_steps and not (host_table is not None and host_table.dummy):
            STATS.record_step(cu_q, context, pages.take_stats())
        rows = len(context)
        replayed = rows in self._captured and common.num_actual_tokens == rows and int(np.diff(cu_q).max()) <= 1
        if replayed:  # which rows choose is found on the device
            sparse, audit, context_pages = self.sparse, None, -(-context.astype(np.int64) // self.layout.page_size)
        else:
            sparse, audit, context_pages = self._sparse_step(cu_q, context)
        arrays = {"cu_q": (cu_q,), "context": (context,), "context_pages": (context_pages,), **_plan_columns(plan)}
        if self.device_tiers is not None and (places := self.device_tiers.changes()) is not None:
            arrays["places"] = places
        if host_table is None:
            parts: dict[str, Any] = {name: tuple(map(torch.from_numpy, columns)) for name, columns in arrays.items()}
            parts |= {"block_table": device_table, "open_slot": torch.from_numpy(pages.slot_of)}
        else:
            parts = self._send_step(common, pages, arrays, context, sparse is not None, replayed)
        if (moved := parts.pop("places", None)) is not None and self.device_tiers is not None:
            self.device_tiers.apply(*moved)
        parts |= {name: parts[name][0] for name in ("cu_q", "context", "context_pages")}
        parts |= {name: parts[name] or None for name in _COLUMNS}
        meta = KTXMetadata(
            num_tokens=common.num_actual_tokens,
            open_capacity=pages.capacity,
            layout=self.layout,
            tiers=self.tiers,
            sparse=sparse,
            audit=audit,
            replayed=replayed,
            **parts,
        )
        if replayed:
            self._settle(meta)
            STATS.attention_calls += 0 if table.dummy else len(self.layer_names)
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

    def _settle(self, meta: KTXMetadata) -> None:
        """What a graph doesn't hold of a step: pages evicted and reopened, seldom and in any number."""
        context = self.vllm_config.compilation_config.static_forward_context
        if meta.evict is not None or meta.reopen is not None:
            for name in self.layer_names:
                context[name].impl.settle(context[name].kv_cache, meta)
        meta.evict = meta.reopen = None

    def warm_up(self, width: int) -> None:
        """Compiles all that these layers' steps can launch, with block tables of up to `width` pages: Triton would do
        it when a step first launches it, for seconds in the middle of serving."""
        from .triton.warmup import warm_up

        impls = [self.vllm_config.compilation_config.static_forward_context[name].impl for name in self.layer_names]
        sparse, tokens = self._sparse_layers and self.sparse, self.vllm_config.scheduler_config.max_num_batched_tokens
        start, count = time.perf_counter(), 0
        logger.info("KTX: compiling kernels for format %s and up to %d pages", self.layout.fmt.name, width)
        for impl in {(impl.num_heads, impl.softcap): impl for impl in impls}.values():
            count += warm_up(
                impl.kernels, self.layout, impl.num_heads, impl.model_dtype, width, tokens, sparse or None,
                impl.softcap, self.audit.rate > 0, impl.pages,
            )  # fmt: skip
        logger.info("KTX: %d kernels are ready, after %.1f s", count, time.perf_counter() - start)

    def _send_step(
        self,
        common: CommonAttentionMetadata,
        pages: OpenPages,
        arrays: dict[str, tuple],
        context: Any,
        sparse: bool,
        replayed: bool,
    ) -> dict[str, Any]:
        """The step's arrays as tensors on the device, and what else its metadata has there."""
        device = common.block_table_tensor.device
        if self._device_slots is None:
            self._device_slots = DeviceSlots(len(pages.slot_of), device)
            self._accounts = Accounts(self._sparse_layers, self.layout.num_kv_heads, device)
            ON_DEVICE.add(self._accounts)
            if device.type == "cuda":
                self.warm_up(common.block_table_tensor.shape[1])
        assert self._accounts is not None
        arrays = {**arrays, "changed": self._device_slots.changes(pages.slot_of)}
        lasting = None
        if replayed:
            arrays, lasting = self._lasting(arrays, common)
        sent = iter(send([column for columns in arrays.values() for column in columns], device, lasting))
        parts: dict[str, Any] = {name: tuple(next(sent) for _ in columns) for name, columns in arrays.items()}
        self._device_slots.apply(*parts.pop("changed"))
        self._accounts.begin_step(parts["context_pages"][0] if sparse else None, replayed)
        used, most = -(-int(context.max(initial=1)) // self.layout.page_size), common.block_table_tensor.shape[1]
        width = most if replayed else table_width(used, most)
        parts["block_table"] = common.block_table_tensor[: len(context), :width]
        parts |= {"open_slot": self._device_slots.tensor, "accounts": self._accounts}
        return {**parts, "max_query_len": 1 if replayed else common.max_query_len}

    def _lasting(
        self, arrays: dict[str, tuple], common: CommonAttentionMetadata
    ) -> tuple[dict[str, tuple], torch.Tensor]:
        """The arrays of a step of one token a row, those that captured kernels read first and as long as in any such
        step, and the memory where those kernels read them."""
        rows, table = common.num_reqs, common.block_table_tensor
        address, memory = self._captured[rows]
        if address != table.data_ptr():
            raise RuntimeError(f"KTX: vLLM's block table of {rows} rows isn't where it was when its graph was captured")
        first = {"cu_q": arrays["cu_q"], "context": arrays["context"]}
        for name in ("append", "seal_open"):
            columns = arrays[name] or tuple(np.empty(0, kind) for kind in _COLUMNS[name])
            if len(columns[0]) > rows or arrays["seal_fresh"]:
                raise RuntimeError(f"KTX: a step of {rows} tokens has {len(columns[0])} entries of {name}")
            first[name] = tuple(np.pad(column, (0, rows - len(column)), constant_values=-1) for column in columns)
        if memory is None:
            size = room([column for columns in first.values() for column in columns])[-1]
            memory = torch.empty(size, dtype=torch.uint8, device=table.device)
            self._captured[rows] = address, memory
        return {**first, **{name: columns for name, columns in arrays.items() if name not in first}}, memory


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
