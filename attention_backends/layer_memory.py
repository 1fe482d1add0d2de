"""The memory of one layer: vLLM's tensor carved into payloads and headers, open pages beside it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..kv_quant import KVCacheQuantizer, PageLayout
from ..metrics import STATS
from ..offload import TierFault
from .kernels import Kernels
from .tiered import LayerPages

if TYPE_CHECKING:
    from .metadata import KTXMetadata
    from .triton.device_pages import DevicePages

logger = logging.getLogger("vllm.ktx")


def carve(
    kv_cache: torch.Tensor, layout: PageLayout, with_planes: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`payload` uint8 `[num_slots, payload_bytes]`, `headers` `[num_blocks, header_bytes]` and, if asked for, `planes`
    `[num_blocks, scoring_bytes]`, views of vLLM's tensor of one layer, `[num_blocks, ...]`."""
    if not kv_cache.is_contiguous():
        raise RuntimeError("KTX needs each layer's KV cache as one run: unset VLLM_KV_CACHE_LAYOUT")
    blocks = kv_cache.shape[0]
    flat = kv_cache.view(-1).view(torch.uint8)
    slots = layout.num_slots(blocks, len(flat), with_planes)
    plane_bytes = with_planes * layout.scoring_bytes

    def part(start: int, rows: int, row_bytes: int) -> torch.Tensor:
        return flat[start : start + rows * row_bytes].view(rows, row_bytes)

    first = slots * layout.payload_bytes
    headers = part(first + blocks * plane_bytes, blocks, layout.header_bytes)
    planes = part(first, blocks, plane_bytes) if with_planes else None
    return part(0, slots, layout.payload_bytes), headers, planes


def make_open_pages(layout: PageLayout, capacity: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """In host memory lazily touched by the operating system: a slot that is never used costs none."""
    shape = (capacity, 2, layout.num_kv_heads, layout.page_size, layout.head_dim)
    return torch.empty(shape, dtype=dtype, device=device)


@dataclass
class LayerMemory:
    """One layer's pages: `payload` and `headers` as `carve` makes them; `open_pages` `[capacity, 2, kv_heads,
    page_size, head_dim]` in the model's dtype; `pages`: where those are that `payload` has no slot for, if not all
    have.
    """

    storage: tuple[int, int]
    payload: torch.Tensor
    headers: torch.Tensor
    open_pages: torch.Tensor
    pages: LayerPages | DevicePages | None

    @classmethod
    def make(
        cls,
        kv_cache: torch.Tensor,
        layout: PageLayout,
        capacity: int,
        dtype: torch.dtype,
        pages: LayerPages | DevicePages | None,
        reserved: torch.Tensor | None = None,
    ) -> LayerMemory:
        """`reserved`: open pages made before, used if there are enough of them."""
        payload, headers, _ = carve(kv_cache, layout, getattr(pages, "planes", None) is not None)
        if reserved is None or len(reserved) < capacity:
            reserved = make_open_pages(layout, capacity, dtype, kv_cache.device)
        return cls((kv_cache.data_ptr(), kv_cache.shape[0]), payload, headers, reserved, pages)

    @property
    def paged(self) -> dict[str, Any]:
        """What the attention kernels need to find pages in slots."""
        return {} if self.pages is None else {"payload_slot": self.pages.slot_table, "residency": self.pages}

    def settle(self, kernels: Kernels, meta: KTXMetadata) -> None:
        """The part of the step's plan that needs no fresh tokens, and so may come before a graph is replayed."""
        if meta.evict is not None:
            self._evict(kernels, meta, *meta.evict)
        if meta.reopen is not None:
            self._reopen(kernels, meta, *meta.reopen)

    def apply(self, kernels: Kernels, meta: KTXMetadata, key: torch.Tensor, value: torch.Tensor) -> None:
        """Carries out the step's plan, in the plan's order."""
        self.settle(kernels, meta)
        if meta.append is not None:
            kernels.append(meta.layout, key, value, *meta.append, self.open_pages)
        if meta.seal_fresh is not None:
            first, block = meta.seal_fresh
            self._seal(kernels, meta, key, value, first * key.stride(0), block, key.stride(0), key.stride(1))
        if meta.seal_open is not None:
            self._seal_slots(kernels, meta, *meta.seal_open)

    def lose(self, meta: KTXMetadata, fault: TierFault) -> bool:
        """Pages that can't be had: their blocks are void, and the rows that read them go without their context. Returns
        whether there was such a row."""
        assert meta.tiers is not None
        blocks = {page.block for page in fault.faults.values()}
        logger.error("KTX: %s; the requests that read it are computed again", fault)
        STATS.tier_faults += len(blocks)
        meta.tiers.note_faults(blocks)
        return meta.drop_context(blocks)

    def _seal(
        self,
        kernels: Any,
        meta: KTXMetadata,
        key: torch.Tensor,
        value: torch.Tensor,
        source: torch.Tensor,
        block: torch.Tensor,
        *strides: int,
    ) -> None:
        if self.pages is None:
            kernels.seal(meta.layout, key, value, source, block, self.headers, self.payload, None, *strides)
        else:
            self.pages.seal(kernels, meta.layout, key, value, source, block, self.headers, *strides)

    def _seal_slots(self, kernels: Kernels, meta: KTXMetadata, slot: torch.Tensor, block: torch.Tensor) -> None:
        size, dim = meta.layout.page_size, meta.layout.head_dim
        keys, values = self.open_pages[:, 0], self.open_pages[:, 1]
        self._seal(kernels, meta, keys, values, slot * self.open_pages.stride(0), block, dim, size * dim)

    def _evict(
        self, kernels: Kernels, meta: KTXMetadata, slot: torch.Tensor, block: torch.Tensor, fill: torch.Tensor
    ) -> None:
        # What lies behind the last valid token must not widen the page's scales.
        token = torch.arange(meta.layout.page_size, device=slot.device)
        token = torch.minimum(token, fill[:, None] - 1)[:, None, None, :, None]
        pages = self.open_pages.index_select(0, slot)
        self.open_pages.index_copy_(0, slot, pages.gather(3, token.expand(pages.shape)))
        self._seal_slots(kernels, meta, slot, block)

    def _reopen(self, kernels: Any, meta: KTXMetadata, slot: torch.Tensor, block: torch.Tensor) -> None:
        if not isinstance(self.pages, LayerPages):
            payload = self.payload.index_select(0, block) if self.pages is None else self.pages.read(kernels, block)
            self._unseal(meta, payload, slot)
            return
        for at, page in enumerate(block.tolist()):  # a slot of the device is the page's until the next is asked for
            where = slot[at : at + 1]
            self.open_pages[where] = 0
            if page in meta.lost:  # in an earlier layer
                continue
            try:
                at_slot = self.pages.slot_of(page)
                self._unseal(meta, self.payload[at_slot : at_slot + 1], where)
            except TierFault as fault:
                self.lose(meta, fault)

    def _unseal(self, meta: KTXMetadata, payload: torch.Tensor, slot: torch.Tensor) -> None:
        """`payload` uint8 `[n, payload_bytes]` -> open pages `slot` int64 `[n]`."""
        sides = KVCacheQuantizer(meta.layout).unseal(payload, self.open_pages.dtype)
        for side, tensor in enumerate(sides):
            self.open_pages[:, side].index_copy_(0, slot, tensor.to(self.open_pages.dtype))
