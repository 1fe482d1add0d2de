"""`DevicePages`: one layer's pages beyond the device's memory, and the launches that keep its page table.

Owns the table and the counters; the slots, host memory and scoring planes are given. Never looks at what the device
holds: a step with it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from vllm_ktx.kv_quant import PageLayout

from .residency import fetch_pages, find_slots, look_up, publish_pages, read_pages

if TYPE_CHECKING:
    from .launch import TritonKernels

WORD = 8
COPY_WORDS = 2048  # of one program: 64 bytes a thread
FETCHERS = 128  # programs that fetch: enough bytes in flight for any PCIe
LOOK_UP = 256  # pages that one program looks up
FREE = -(1 << 30)  # `used` of a slot that nothing was in


class DevicePages:
    """What `TritonKernels.attention` takes as `residency`; new pages go through `seal`.

    slots: uint8 `[num_slots, >= payload_bytes]` on the device. host: uint8 `[num_blocks, payload_bytes]` that the
    device can address, the home of all sealed pages. planes: uint8 `[num_blocks, scoring_bytes]` on the device, the
    first bytes of all pages, or None: they are read from `host`. counts: int64 `[3]` on the device, zero, to which each
    round adds its distinct pages that had a slot, were fetched, are read in host memory; None: an own one. home: int32
    `[num_blocks]` on the device, for a `host` of other rows: the one that is a block's home for now; -1: none, and no
    step reads the block.

    `slot_table` int32 `[num_blocks]`: the slot of a block, or -1. The number of slots changes speed alone, never a
    result. Raises ValueError for tensors that don't fit.
    """

    def __init__(
        self,
        layout: PageLayout,
        slots: torch.Tensor,
        host: torch.Tensor,
        planes: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        home: torch.Tensor | None = None,
    ) -> None:
        for name, rows, size in (("slots", slots, layout.payload_bytes), ("host", host, layout.payload_bytes),
                                 ("planes", planes, layout.scoring_bytes)):  # fmt: skip
            if rows is None:
                continue
            if not len(rows) or rows.shape[1] < size or rows.stride(1) != 1 or rows.stride(0) % WORD:
                raise ValueError(f"{name}: found {tuple(rows.shape)}, strides {rows.stride()}; needed at least one row "
                                 f"of {size} bytes, rows a multiple of {WORD} bytes apart")  # fmt: skip
        self.slots, self.host, self.planes, self.home = slots, host, planes, home
        self.words, self.plane_words = layout.payload_bytes // WORD, layout.scoring_bytes // WORD
        num_slots, num_blocks = len(slots), len(host if home is None else home)

        def table(size: int, value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((size,), value, dtype=dtype, device=slots.device)

        self.slot_table, self.wanted = table(num_blocks, -1), table(num_blocks, -1)
        self.block_of, self.used = table(num_slots, -1), table(num_slots, FREE)
        self.misses, self.fetched, self.clock = table(2 * num_slots, 0), table(num_slots, 0), table(8, 0)
        self.counts = table(3, 0, torch.int64) if counts is None else counts

    @staticmethod
    def table_bytes(num_blocks: int, num_slots: int) -> int:
        """Device memory that a layer's table takes."""
        return 4 * (2 * num_blocks + 5 * num_slots + 8) + 24

    @property
    def scoring(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows that begin with what scoring by codes reads, and each block's row (None: its number)."""
        return (self.host, self.home) if self.planes is None else (self.planes, None)

    def forget(self) -> None:
        """Empties all slots."""
        self.slot_table.fill_(-1)
        self.block_of.fill_(-1)
        self.used.fill_(FREE)

    def seal(
        self,
        kernels: TritonKernels,
        layout: PageLayout,
        k: torch.Tensor,
        v: torch.Tensor,
        src_offsets: torch.Tensor,
        blocks: torch.Tensor,
        headers: torch.Tensor,
        *strides: int,
    ) -> None:
        """As `TritonKernels.seal`, into the pages' places in host memory, and in a slot where they have one. Pages get
        no slot for being new: the first step that reads them fetches them."""
        if not len(blocks):
            return
        # By way of the device: sealing writes single bytes, and those should not cross the bus one by one. Zeros: gaps
        # between sections would carry what the memory held before.
        staged = torch.zeros(len(blocks), WORD * self.words, dtype=torch.uint8, device=self.slots.device)
        rows = torch.arange(len(blocks), dtype=torch.int32, device=self.slots.device)
        kernels.seal(layout, k, v, src_offsets, blocks, headers, staged, rows, *strides)
        has_planes = self.planes is not None
        kernels.launch(publish_pages, (len(blocks), -(-self.words // COPY_WORDS)),
            staged, blocks, self.slot_table, self.host, self.home, self.slots, self.planes, self.words,
            self.plane_words, staged.stride(0), self.host.stride(0), self.slots.stride(0), self.scoring[0].stride(0),
            HAS_PLANES=has_planes, N=COPY_WORDS, num_warps=8,
        )  # fmt: skip

    def read(self, kernels: TritonKernels, blocks: torch.Tensor) -> torch.Tensor:
        """The payloads of sealed pages, uint8 `[n, payload_bytes]` on the device; `blocks` int64 `[n]` there."""
        pages = torch.empty(len(blocks), WORD * self.words, dtype=torch.uint8, device=self.slots.device)
        kernels.launch(read_pages, (len(blocks), -(-self.words // COPY_WORDS)),
            blocks, self.host, self.home, pages, self.words, self.host.stride(0), pages.stride(0), N=COPY_WORDS,
            num_warps=8,
        )  # fmt: skip
        return pages

    def begin(self) -> None:
        """As `LayerPages`; nothing to do: the device decides in the layer's own kernels."""

    def end(self, start: float, votes: torch.Tensor | None = None) -> None:
        """Likewise."""

    def begin_round(
        self,
        launch: Callable[..., None],
        grid: tuple[int, int, int],
        step: tuple[torch.Tensor, ...],
        numbers: tuple[int, ...],
        tick: int,
        **constants: Any,
    ) -> None:
        """A round: the pages that units are about to read get slots, as far as there are any.

        grid: units, lists of a unit, most pages of a list. `step`, `numbers`, `constants`: what `look_up` takes of the
        step. tick: 1 in the first round of a step, else 0.
        """
        launch(look_up, (*grid[:2], -(-grid[2] // LOOK_UP)),
            *step, self.slot_table, self.wanted, self.used, self.misses, self.clock, self.counts, *numbers,
            len(self.slots), N=LOOK_UP, **constants,
        )  # fmt: skip
        launch(find_slots, (1,),
            self.slot_table, self.block_of, self.wanted, self.used, self.misses, self.fetched, self.clock, self.counts,
            len(self.slots), tick, N=1024, maxnreg=255,  # one program: registers are there
        )  # fmt: skip
        self.fetch(launch)

    def fetch(self, launch: Callable[..., None]) -> None:
        """The pages that the last round found slots for."""
        launch(fetch_pages, (FETCHERS,),
            self.block_of, self.fetched, self.clock, self.host, self.home, self.slots, self.words,
            self.host.stride(0), self.slots.stride(0), PARTS=-(-self.words // COPY_WORDS), N=COPY_WORDS, num_warps=8,
        )  # fmt: skip
