"""What can go wrong with a page: one exception a page, and one for a batch that carries them all.

An operation on many pages finishes those it can and raises `TierFault` at its end: partial success is never silent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class PageFault(RuntimeError):
    """One page can't be had. `layer` and `block` name it; the message says why."""

    def __init__(self, layer: int, block: int, why: str) -> None:
        super().__init__(layer, block, why)
        self.layer, self.block, self.why = layer, block, why

    def __str__(self) -> str:
        return f"page of block {self.block}, layer {self.layer}: {self.why}"


class PageMissing(PageFault):
    """The page was never written, or its content was forgotten."""


class PageCorrupt(PageFault):
    """The page came back with bytes that don't match its checksum."""


class PageIOError(PageFault):
    """The operating system refused the transfer, or moved fewer bytes than asked; `errno` is 0 for a short one."""

    def __init__(self, layer: int, block: int, why: str, errno: int = 0) -> None:
        super().__init__(layer, block, why)
        self.errno = errno


class PageTimeout(PageFault):
    """The transfer wasn't finished in the time allowed."""


class TierFault(RuntimeError):
    """Some pages of a batch failed; the others are done.

    `faults`: position in the batch -> why. A batch that names a page twice may report either position.
    """

    def __init__(self, faults: Mapping[int, PageFault]) -> None:
        self.faults = dict(faults)
        first = next(iter(self.faults.values()))
        more = f" (and {len(self.faults) - 1} more pages)" if len(self.faults) > 1 else ""
        super().__init__(f"{first}{more}")


class CapacityError(RuntimeError):
    """A tier can't be made as large as asked; the message names the setting and the number needed."""


class PoolFull(RuntimeError):
    """The hot pool has no slot for a page that must be resident now; the message says what holds them."""

    def pages(self, layer: int, blocks: Iterable[int]) -> list[PageFault]:
        """The same as a fault of each page."""
        return [PageTimeout(layer, int(block), str(self)) for block in blocks]
