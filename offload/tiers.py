"""Places for pages below the device: the contract of a tier, and the tier in host memory.

A tier holds one page for every (block, layer), at an address that follows from the two: no allocator, it can't run out
while vLLM has blocks, and a freed block costs nothing. Addresses run layer by layer, because traffic does: a layer
fetches and seals many blocks at once, vLLM hands out neighbouring ids to a prompt, and neighbours become one transfer.

A page has one or two parts, the first of which (what a 2-bit scoring step reads) can be fetched alone.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .errors import CapacityError, PageMissing, TierFault

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
SCORING = 1  # bit masks of parts
REST = 2


@dataclass(frozen=True)
class PageSpec:
    """The pages of a store: how many, how large, where they are cut.

    scoring_bytes: length of the prefix that can be fetched alone (`PageLayout.scoring_bytes`); 0: pages are whole.
    """

    num_blocks: int
    num_layers: int
    page_bytes: int
    scoring_bytes: int = 0

    def __post_init__(self) -> None:
        if min(self.num_blocks, self.num_layers, self.page_bytes) < 1:
            raise ValueError(f"{self}: blocks, layers and bytes must be at least 1")
        if not 0 <= self.scoring_bytes < self.page_bytes:
            raise ValueError(f"{self}: scoring_bytes must be from 0 to less than page_bytes")

    @cached_property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """First byte and end of each part."""
        cut = self.scoring_bytes
        return ((0, cut), (cut, self.page_bytes)) if cut else ((0, self.page_bytes),)

    @property
    def all_parts(self) -> int:
        return (1 << len(self.parts)) - 1

    @property
    def num_pages(self) -> int:
        return self.num_blocks * self.num_layers

    @property
    def total_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    def pages(self, layer: int, blocks: npt.ArrayLike) -> Ints:
        """Addresses of a layer's pages. Raises IndexError for a block or layer that isn't there."""
        found = np.asarray(blocks, dtype=np.int64).reshape(-1)
        if not 0 <= layer < self.num_layers or (len(found) and not 0 <= found.min() <= found.max() < self.num_blocks):
            raise IndexError(f"layer {layer}, blocks {found}: there are {self.num_layers} and {self.num_blocks}")
        return layer * self.num_blocks + found

    def name(self, page: int) -> tuple[int, int]:
        """Layer and block of an address."""
        return divmod(page, self.num_blocks)

    def wanted(self, parts: int) -> list[int]:
        """The numbers of the parts in a mask; parts that these pages don't have count as the whole page."""
        return [part for part in range(len(self.parts)) if parts >> part & 1] if len(self.parts) > 1 else [0]

    def width(self, parts: int) -> int:
        """Bytes of a page's parts in a mask."""
        return sum(self.parts[part][1] - self.parts[part][0] for part in self.wanted(parts))


class Tier(ABC):
    """Holds pages by address.

    - `write` then `read` gives back the same bytes; a read of a page that was never written is a `PageMissing`.
    - Both return when done, and raise `TierFault` (never anything else for a page's sake) if some pages failed. What a
      failed write leaves can't be read.
    - Any thread may call, and calls run side by side, except that the caller never has a write and another call on
      the same page in flight at once.
    """

    name: str
    spec: PageSpec

    @abstractmethod
    def read(self, pages: Ints, out: Bytes, rows: Ints, parts: int = SCORING | REST) -> None:
        """Fills `out[rows[i]]` with the parts of page `pages[i]`, each at its place in the page; other bytes stay.

        `pages` `[n]`: addresses. `out` `[any, >= page_bytes]`: rows may be strided, bytes in a row not. A failed
        page's row holds anything.
        """

    @abstractmethod
    def write(self, pages: Ints, source: Bytes, rows: Ints) -> None:
        """Stores `source[rows[i]]` as page `pages[i]`, whole. The same page must not be named twice."""

    def close(self) -> None:  # noqa: B027  # most tiers have nothing to do
        """Frees what the tier holds. No other call may follow."""


class HostTier(Tier):
    """Pages in anonymous host memory, which the system provides as pages are written.

    `memory` uint8 `[num_pages, page_bytes]`: use this instead (pinned, say). Raises CapacityError if there is none.
    """

    name = "host"

    def __init__(self, spec: PageSpec, memory: Bytes | None = None) -> None:
        self.spec = spec
        self._memory = allocate_host(spec.num_pages, spec.page_bytes) if memory is None else memory
        self._known = np.zeros(spec.num_pages, bool)

    def read(self, pages: Ints, out: Bytes, rows: Ints, parts: int = SCORING | REST) -> None:
        known = self._known[pages]
        good, to = (pages, rows) if known.all() else (pages[known], rows[known])
        for part in self.spec.wanted(parts):
            low, high = self.spec.parts[part]
            out[to, low:high] = self._memory[good, low:high]
        if len(good) < len(pages):
            raise missing(self.spec, pages, np.flatnonzero(~known))

    def write(self, pages: Ints, source: Bytes, rows: Ints) -> None:
        self._memory[pages] = source[rows, : self.spec.page_bytes]
        self._known[pages] = True


def missing(spec: PageSpec, pages: Ints, positions: Ints) -> TierFault:
    """The fault of reading pages that were never written."""
    why = "it was never written"
    return TierFault({int(i): PageMissing(*spec.name(int(pages[i])), why) for i in positions})


def allocate_host(rows: int, row_bytes: int) -> Bytes:
    """uint8 `[rows, row_bytes]`, 4096-aligned, zero, not counted as used until touched. Raises CapacityError."""
    if not rows:
        return np.zeros((0, row_bytes), np.uint8)
    try:
        memory = mmap.mmap(-1, rows * row_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise CapacityError(
            f"host tier: {rows * row_bytes / 2**30:.2f} GiB of memory can't be allocated ({error}): lower ktx.host_gib"
        ) from error
    return np.frombuffer(memory, np.uint8).reshape(rows, row_bytes)
