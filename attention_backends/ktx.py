"""The KTX backend as vLLM sees it: backend and implementation for dense (MHA / GQA) decoder models.

vLLM hands out block ids; the builder (`metadata.py`) plans per step which pages are appended to, sealed or reopened
(`OpenPages`), and every layer carries the plan out on its own memory and attends. One layer's KV tensor, which vLLM
allocates and accounts, is carved into payloads, of all pages or (`Tiers`, `DeviceTiers`) of those in use, followed by
all pages' headers. Open pages live beside it, in the model's dtype.

The only upward import is `vllm_ktx`'s settings and counters; kernels and page formats know nothing of vLLM.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from .. import _compat
from ..config import DEFAULT_PAGE_SIZE, FORMAT_OF_CACHE_DTYPE, KtxConfig
from ..kv_quant import PageLayout, hadamard
from ..metrics import STATS
from ..offload import TierFault
from ..plugin import MIN_CAPABILITY, ktx_config
from ..tiering import engine_plan
from .kernels import Heads, Kernels, kernels_for, prefill_kernels
from .layer_memory import LayerMemory, make_open_pages
from .metadata import AUDITED_LAYERS, KTXMetadata, KTXMetadataBuilder, layer_index, open_capacity, page_layout
from .tiered import LayerPages

if TYPE_CHECKING:
    from .triton.device_pages import DevicePages

logger = logging.getLogger("vllm.ktx")


@dataclass(frozen=True)
class _Seen:
    """What the newest engine's layers were built with: `customize_spec` is called without any configuration."""

    config: KtxConfig
    cache_dtype: str
    model_dtype: torch.dtype
    overcommit: float
    planes: bool


_seen: _Seen | None = None
WORKSPACE_BYTES = 256 << 20  # what attention's kernels hold on a device at once, about


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
        layout = page_layout(spec, _seen.config, _seen.cache_dtype, _seen.model_dtype, layer_name)
        page_bytes = layout.page_bytes
        if _seen.overcommit > 1:
            page_bytes = layout.tiered_page_bytes(_seen.overcommit, _seen.planes)
        return dataclasses.replace(
            spec,
            num_head_slots=1,
            tokens_per_state=1,
            state_content_bytes=page_bytes // spec.block_size,
            dtype=torch.uint8,
        )


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
        plan = engine_plan(vllm_config, config, layout)
        overcommit = plan.overcommit
        _seen = _Seen(config, vllm_config.cache_config.cache_dtype, self.model_dtype, overcommit, plan.planes)
        heads = Heads(self.model_dtype, head_size, num_heads // self.num_kv_heads, self.softcap)
        self.kernels: Kernels = prefill_kernels(config.prefill_kernel, kernels_for(config.kernels, fmt), heads)
        if overcommit > 1 and not self.kernels.pages:
            raise ValueError(
                f"ktx.overcommit needs the native kernels, and these are {self.kernels.name}: set ktx.overcommit to 1, "
                "use the format's own scales, or install a C++ compiler and reinstall vllm-ktx"
            )
        if overcommit > 1:
            _compat.wrap_model_runner(vllm_config.use_v2_model_runner)  # before it makes the cache
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
        STATS.attention_calls += not meta.replayed
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

    def settle(self, kv_cache: torch.Tensor, meta: KTXMetadata) -> None:
        """What `forward` does first, for a step whose `forward` is replayed from a graph."""
        self._bind(kv_cache, meta).settle(self.kernels, meta)

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
