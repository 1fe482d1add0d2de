"""The settings of sparse attention: one validated, frozen dataclass. Imports neither torch nor vLLM."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Any

SCORINGS = ("header", "cascade", "codes")
SELECTS = ("coverage", "top_k", "global_ratio")
UNLIMITED = 1 << 30  # pages; no context has as many


@dataclass(frozen=True)
class SparseSettings:
    """Which pages of its context a query reads: sinks and window always, of the pages between them a selection.

    window: newest tokens that are always read; a multiple of the page size, at least one page.
    sinks: first tokens that are always read, rounded up to whole pages.
    scoring: how pages are ranked: `header` (int8 mean and deviation), `codes` (top two bits of every key), `cascade`
        (headers first, codes for the best of them, more where headers explain the keys badly).
    select: how many of the ranked pages are read: `coverage`, `top_k` or `global_ratio`.
    coverage: for `coverage`, the share of its softmax mass that every query head must get, in (0, 1]; 1: all pages.
    top_k: for `top_k`, the number of pages.
    global_ratio: for `global_ratio`, the share of the context's pages, in (0, 1].
    min_pages: floor of a `coverage` selection; a query with no more candidates than this reads them all, in every mode.
    max_pages: cap of a `coverage` selection; coverage 1 has none.
    share: part of the candidates whose codes `cascade` reads where headers explain the keys well, in (0, 1].
    """

    window: int = 4096
    sinks: int = 64
    scoring: str = "cascade"
    select: str = "coverage"
    coverage: float = 0.95
    top_k: int | None = None
    global_ratio: float | None = None
    min_pages: int = 8
    max_pages: int = 128
    share: float = 0.35

    def __post_init__(self) -> None:
        _choice("scoring", self.scoring, SCORINGS)
        _choice("select", self.select, SELECTS)
        _count("window", self.window, 1)
        _count("sinks", self.sinks, 0)
        _count("min_pages", self.min_pages, 1)
        _count("max_pages", self.max_pages, 1)
        _fraction("coverage", self.coverage)
        _fraction("share", self.share)
        if self.max_pages < self.min_pages:
            raise ValueError(
                f"ktx.max_pages={self.max_pages} is below ktx.min_pages={self.min_pages}: raise ktx.max_pages to "
                f"{self.min_pages} or lower ktx.min_pages"
            )
        if self.top_k is not None:
            _count("top_k", self.top_k, 1)
        if self.global_ratio is not None:
            _fraction("global_ratio", self.global_ratio)
        for name in ("top_k", "global_ratio"):
            if (self.select == name) != (getattr(self, name) is not None):
                raise ValueError(
                    f"ktx.{name}={getattr(self, name)} with ktx.select={self.select!r}: the two belong together; set "
                    f"ktx.select={name!r} and a value for ktx.{name}, or leave both out"
                )

    def check_page_size(self, page_size: int) -> None:
        """Raises ValueError if the window is not whole pages of `page_size` tokens."""
        if self.window % page_size:
            near = max(page_size, round(self.window / page_size) * page_size)
            raise ValueError(
                f"ktx.window={self.window} is not a multiple of the page size {page_size} (--block-size): use "
                f"{near}, or another --block-size"
            )

    def sink_pages(self, page_size: int) -> int:
        return -(-self.sinks // page_size)

    def most_chosen(self, pages: int) -> int:
        """Most pages that a selection takes in a context of so many."""
        return math.ceil(self.global_ratio * pages) if self.global_ratio is not None else self.top_k or self.cap

    def most_read(self, pages: int, page_size: int) -> int:
        """Most pages that a query reads, for one kv head, of so many: sinks, window and choice."""
        chosen = max(self.most_chosen(pages), self.min_pages)
        return min(pages, self.sink_pages(page_size) + self.window // page_size + 2 + chosen)

    @property
    def cap(self) -> int:
        """Most pages that a `coverage` selection holds, as kernels take it: coverage 1 means all pages."""
        return UNLIMITED if self.coverage >= 1.0 else self.max_pages

    def candidates(self, position: int, context: int, page_size: int) -> tuple[int, int]:
        """The range of pages `[first, last)` that a query at `position` chooses from, of `context` tokens in pages.

        Only whole pages are candidates, so all of them are sealed; the others are always read. The range is empty
        where the query reads everything: there are no more than `min_pages` of them.
        """
        first = self.sink_pages(page_size)
        last = min((position - self.window) // page_size, context // page_size)
        return (first, last) if last - first > self.min_pages else (first, first)


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"ktx.{name}={value!r}: use one of {', '.join(choices)}{hint}")


def _count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= UNLIMITED:
        raise ValueError(f"ktx.{name}={value!r}: use a whole number, {least} or more (up to {UNLIMITED})")


def _fraction(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError(f"ktx.{name}={value!r}: use a number above 0 and up to 1")
