"""`TritonKernels`: seal, append and attention on CUDA tensors, with the contracts of `cpu.native.CpuKernels`.

Owns the launches: grids, padded sizes and workspaces, all of which follow from shapes and settings alone. Nothing is
read back from the device, so a step may be captured in a CUDA graph and replayed with other contents.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm_ktx.kv_quant import PageLayout

from ..selection import SparseSettings
from ..selection.cascade import EXPLAINED, SPREAD
from ..selection.settings import UNLIMITED
from .attend import attend_blocks, attend_split, merge_splits
from .device_pages import DevicePages
from .geometry import MIN_ROWS, Geometry, power_of_two, unserved
from .score import fresh_moments, known_blocks, probe_pages, score_headers
from .seal import append_rows, seal_pages
from .select import choose_pages, rank_headers
from .units import BLOCK, plan_units
from .xformers_prefill import XformersPrefill

if TYPE_CHECKING:
    from ..kernels import Residency

BLOCK_QUERIES = int(BLOCK.value)
SAMPLES = 16  # queries that a block unit asks with, by head: `sparse_pages.SAMPLE_STEP` apart
WAVE_BYTES = 128 << 20  # estimates held at once, of LEAST_BLOCKS blocks at least
LEAST_BLOCKS = 4  # choosing is a program for each block and kv head: fewer would leave most of a card idle
FRESH_SPLIT = 1024  # own tokens of one split
PROBE_PAGES = 16
SCORED_ELEMENTS = 8192  # of one program's queries, by half head_dim: more in float32 is too much shared memory (sm_86)
_geometry = functools.lru_cache(maxsize=256)(Geometry.of)


@dataclass(frozen=True)
class Blocking:
    """Block shapes and warps of the attention kernels: what a tuning run changes."""

    split_pages: int = 8  # of one split of a sparse list
    dense_split_pages: int = 32
    split_warps: int = 4
    split_stages: int = 3
    split_tile: int = 64  # tokens that it multiplies at once
    block_rows: int = 64  # rows (queries x heads) of a prefill program
    block_warps: int = 8
    block_tile: int = 64  # tokens that it multiplies at once
    scan_pages: int = 64  # pages whose headers one program scores

    @classmethod
    def of(cls, shape: Geometry) -> Blocking:
        """What registers hold: half the rows for heads twice as wide, for float32, for scales by groups of channels."""
        if shape.dim <= 128 and not shape.exact:
            tile = 32 if shape.padded else 64  # masks of channels take registers too
            return cls(split_tile=tile, **{"block_rows": 32, "block_tile": 32} if shape.channel_groups else {})
        warps, rows = (16, 16) if shape.channel_groups else (8, 32)
        return cls(split_warps=warps, split_stages=2, block_rows=rows, block_tile=16, scan_pages=16)


Launcher = Callable[..., None]


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Runs `kernel` over `grid`; options are its compile-time constants and Triton's."""
    kernel[grid](*args, **{"enable_fp_fusion": True, **options})


def compile_only(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """Has Triton compile what `launch` would run, and returns that. Tensors may be on torch's `meta` device."""
    return kernel.warmup(*args, grid=grid, **{"enable_fp_fusion": True, **options})


def sealing_warps(elements: int, tokens: int) -> int:
    """Warps that seal a page of so many elements with the fewest spills: at most 64 of them a thread, 32 if there are
    few, 16 if there are many tokens."""
    if tokens > 64 and elements > 8192:
        return 32
    return 4 if elements <= 4096 else max(8, min(32, power_of_two(elements // 2048)))


class TritonKernels:
    """Methods as in `attention_backends/kernels.py`; all tensors on one CUDA device (or the CPU, in the
    interpreter)."""

    name = "triton"
    pages = True  # takes `DevicePages` as residency
    unserved = staticmethod(unserved)

    def __init__(
        self, blocking: Blocking | None = None, launch: Launcher = launch, prefill: XformersPrefill | None = None
    ) -> None:
        """`blocking`: None chooses by head_dim. `launch`: what runs a kernel (`aot.py` records instead). `prefill`:
        what attends blocks of 64 queries over chosen pages, instead of `attend_blocks`."""
        self.blocking, self.launch, self.prefill = blocking, launch, prefill

    def seal(
        self,
        layout: PageLayout,
        k: torch.Tensor,
        v: torch.Tensor,
        src_offsets: torch.Tensor,
        blocks: torch.Tensor,
        headers: torch.Tensor,
        payload: torch.Tensor,
        slots: torch.Tensor | None,
        token_stride: int,
        head_stride: int,
        num_threads: int = 0,
    ) -> None:
        """As `CpuKernels.seal`; entries with a negative block are skipped."""
        if not len(blocks):
            return
        shape = _geometry(layout, layout.num_kv_heads, k.dtype)
        tokens = power_of_two(layout.page_size)
        self.launch(seal_pages, (len(blocks), layout.num_kv_heads),
            k, v, src_offsets, blocks, blocks if slots is None else slots, headers, payload, token_stride, head_stride,
            headers.stride(0), payload.stride(0), TOKENS=tokens, L=shape,
            num_warps=sealing_warps(tokens * 2 * shape.half * (1 + shape.channel_groups), tokens),
            enable_fp_fusion=False,
        )  # fmt: skip

    def append(
        self,
        layout: PageLayout,
        k: torch.Tensor,
        v: torch.Tensor,
        token: torch.Tensor,
        slot: torch.Tensor,
        offset: torch.Tensor,
        open_pages: torch.Tensor,
        num_threads: int = 0,
    ) -> None:
        """As `CpuKernels.append`; entries with a negative slot are skipped."""
        if not len(token):
            return
        _same_strides(k, v)
        self.launch(append_rows, (len(token),),
            k, v, token, slot, offset, open_pages, k.stride(0), k.stride(1), open_pages.stride(0),
            HEADS=power_of_two(layout.num_kv_heads), L=_geometry(layout, layout.num_kv_heads, k.dtype),
        )  # fmt: skip

    def attention(
        self,
        layout: PageLayout,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        out: torch.Tensor,
        cu_q: torch.Tensor,
        context: torch.Tensor,
        block_table: torch.Tensor,
        open_slot: torch.Tensor,
        payload: torch.Tensor,
        open_pages: torch.Tensor,
        scale: float,
        softcap: float = 0.0,
        payload_slot: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        num_threads: int = 0,
        headers: torch.Tensor | None = None,
        sparse: SparseSettings | None = None,
        dropped: torch.Tensor | None = None,
        pages_read: torch.Tensor | None = None,
        chosen: torch.Tensor | None = None,
        depth: torch.Tensor | None = None,
        residency: Residency | DevicePages | None = None,
        max_query_len: int | None = None,
    ) -> None:
        """As `CpuKernels.attention`. `max_query_len`: most tokens of a row, where the caller knows a bound. `depth`:
        float32 `[tokens, num_kv_heads]`, share of the candidates whose plane 0 was read. `residency`: where the pages
        are; its slots and table then take the place of `payload` and `payload_slot`.

        Workspaces come from torch's allocator and take at most about `WAVE_BYTES`.
        """
        if residency is not None:
            if not isinstance(residency, DevicePages):
                raise ValueError(f"residency: found {type(residency).__name__}; the Triton kernels take DevicePages")
            payload, payload_slot = residency.slots, residency.slot_table
        if not len(context) or not len(q):
            return
        if k is not None and v is not None:
            _same_strides(k, v)
        shape = _geometry(layout, q.shape[1], q.dtype)
        _Step(
            self.launch, layout, self.blocking or Blocking.of(shape), shape, q, k, v, out, cu_q, context, block_table,
            open_slot, payload, open_pages, float(scale), float(softcap), payload_slot, lse, headers,
            _checked(layout, sparse, headers), dropped, pages_read, chosen, depth, residency,
            min(len(q), max_query_len or len(q)), self.prefill,
        ).run()  # fmt: skip


def _same_strides(k: torch.Tensor, v: torch.Tensor) -> None:
    if k.stride() != v.stride() or k.stride(-1) != 1 or (k.shape[1] > 1 and k.stride(1) != k.shape[2]):
        raise ValueError(f"k and v: found strides {k.stride()} and {v.stride()}; needed the same, heads contiguous")


def _checked(layout: PageLayout, sparse: SparseSettings | None, headers: torch.Tensor | None) -> SparseSettings | None:
    if sparse is None:
        return None
    if headers is None or not layout.fmt.quantized:
        raise ValueError("sparse attention needs headers, which only a quantized format has")
    sparse.check_page_size(layout.page_size)
    if sparse.scoring != "header" and not layout.fmt.keys_by_channel:
        raise ValueError(
            f"scoring {sparse.scoring!r} reads codes by channel: with key_scale={layout.fmt.k_method!r} use scoring "
            "'header'"
        )
    return sparse


@dataclass
class _Step:
    """One call of `TritonKernels.attention`: its arguments, and what follows from them for all launches."""

    launch: Launcher
    layout: PageLayout
    blocking: Blocking
    L: Geometry
    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    out: torch.Tensor
    cu_q: torch.Tensor
    context: torch.Tensor
    table: torch.Tensor
    open_slot: torch.Tensor
    payload: torch.Tensor
    open_pages: torch.Tensor
    scale: float
    softcap: float
    payload_slot: torch.Tensor | None
    lse: torch.Tensor | None
    headers: torch.Tensor | None
    sparse: SparseSettings | None
    dropped: torch.Tensor | None
    pages_read: torch.Tensor | None
    handed: torch.Tensor | None
    depth: torch.Tensor | None
    residency: DevicePages | None
    max_query: int
    prefill: XformersPrefill | None

    def __post_init__(self) -> None:
        # Coverage 1 leaves nothing out: the dense kernels then, and accounts that say so.
        self.dense = self.sparse is None or (self.sparse.select == "coverage" and self.sparse.coverage >= 1.0)
        self.settings = settings = self.sparse or SparseSettings()
        self.rows, self.tokens, self.pages = len(self.context), len(self.q), self.table.shape[1]
        size = self.layout.page_size
        sinks = 0 if self.dense else settings.sink_pages(size)
        least = UNLIMITED if self.dense else settings.min_pages
        self.limits = (settings.window, sinks, least)
        # Bounds of what any unit may have: pages read in any case, pages chosen.
        self.always = self.pages if self.dense else min(self.pages, sinks + settings.window // size + 2 + least)
        self.cap = 0 if self.dense else min(max(1, self.pages - sinks), settings.most_chosen(self.pages))
        self.pages_stride = -(-self.pages // 16) * 16
        self.host = None if self.residency is None else self.residency.host
        self.home = None if self.residency is None else self.residency.home
        self.host_stride = 0 if self.host is None else self.host.stride(0)
        self.flags = {
            "HAS_SLOTS": self.payload_slot is not None, "HAS_HOST": self.host is not None, "CAP": self.softcap > 0,
            "L": self.L,
        }  # fmt: skip
        self.moments: torch.Tensor | None = None
        # Splits of a token unit: of the row's own tokens, of pages read in any case (together `lead`), of chosen pages.
        self.split_pages = self.blocking.dense_split_pages if self.dense else self.blocking.split_pages
        longest = 1 if self.dense else self.max_query  # a token unit of a dense step is a row of one token
        self.fresh = 0 if self.k is None else -(-longest // FRESH_SPLIT)
        self.lead = self.fresh + -(-self.always // self.split_pages)
        self.splits = self.lead + -(-self.cap // self.split_pages)

    def run(self) -> None:
        self._plan()
        for first in range(0, self.max_tokens, self._wave(1)):
            self._token_wave(first, min(self._wave(1), self.max_tokens - first))
        if self.max_blocks:
            if not self.dense and self.k is not None:
                self.moments = self._new(self.max_blocks, self.L.heads, 2, self.L.dim)
                self.launch(fresh_moments, (self.max_blocks, self.L.heads),
                    self.k, self.moments, self.cu_q, self.blocks, self.totals, self.k.stride(0), L=self.L,
                )  # fmt: skip
            for first in range(0, self.max_blocks, self._wave(SAMPLES)):
                self._block_wave(first, min(self._wave(SAMPLES), self.max_blocks - first))
        for account in (self.dropped, self.depth):
            if self.dense and account is not None:
                account.zero_()
        if self.dense and self.pages_read is not None:
            self._count_all_pages(self.pages_read)

    def _count_all_pages(self, pages_read: torch.Tensor) -> None:
        """`pages_read` of a dense step: each token's row's pages."""
        token = torch.arange(self.tokens, device=self.q.device)
        row = torch.searchsorted(self.cu_q[1:].contiguous(), token, right=True).clamp_(max=self.rows - 1)
        size = self.layout.page_size
        counts = (self.context.index_select(0, row) + (size - 1)) // size
        pages_read.copy_(counts.unsqueeze(1).expand(-1, self.L.heads))

    def _plan(self) -> None:
        """Token units and block units, at most as many as the batch's shape allows."""
        if self.dense:
            self.max_tokens = self.rows if self.max_query == 1 else min(self.rows, self.tokens)
            self.max_blocks = 0 if self.max_query == 1 else min(self.tokens, self.tokens // BLOCK_QUERIES + self.rows)
        else:
            self.max_tokens = min(self.tokens, self.rows * min(BLOCK_QUERIES, self.max_query))
            self.max_blocks = 0 if self.max_query <= BLOCK_QUERIES else self.tokens // BLOCK_QUERIES
        self.units = self._new(2 * self.max_tokens + BLOCK_QUERIES, dtype=torch.int32)
        self.blocks = self._new(2 * self.max_blocks + BLOCK_QUERIES, dtype=torch.int32)
        self.totals = self._new(2, dtype=torch.int32)
        self.launch(plan_units, (self.rows,),
            self.cu_q, self.rows, self.units, self.blocks, self.totals,
            ROWS=256, SPARSE=not self.dense,
        )  # fmt: skip

    def _new(self, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self.q.device)

    def _wave(self, samples: int) -> int:
        """Units whose estimates and splits are held at once."""
        shape, unit = self.L, 1
        if not self.dense:
            unit += 4 * shape.heads * self.pages_stride * (2 * shape.group * samples + shape.group + 2)
        if samples == 1:
            unit += 4 * self.splits * shape.heads * shape.group * (1 + shape.rotate) * shape.dim
        return max(1 if samples == 1 else LEAST_BLOCKS, WAVE_BYTES // unit)

    def _token_wave(self, first: int, units: int) -> None:
        shape, fresh, lead, splits = self.L, self.fresh, self.lead, self.splits
        stats = self._new(units, shape.heads, splits, shape.group, 2)
        sums = self._new(units, shape.heads, splits, shape.group, 1 + shape.rotate, shape.dim)
        choice = (self.units, self.units)  # placeholders where nothing is chosen
        if self.dense:
            self._fetch(self.units, first, units, choice)
        self._attend_splits(first, units, stats, sums, choice, fresh, 0, lead, splits, False)
        if not self.dense:
            choice = self._choose(self.units, first, units, 1, stats, splits, lead)
            self._fetch(self.units, first, units, choice)
            self._attend_splits(first, units, stats, sums, choice, 0, lead, splits - lead, splits, True)
        self.launch(merge_splits, (units, self.q.shape[1]),
            self.out, self.lse, stats, sums, self.cu_q, self.units, self.totals, self.out.stride(0),
            0 if self.lse is None else self.lse.stride(0), first, splits, SPLITS=max(32, power_of_two(splits)),
            HAS_LSE=self.lse is not None, L=shape,
        )  # fmt: skip

    def _fetch(self, unit_list: torch.Tensor, first: int, units: int, choice: tuple[torch.Tensor, ...]) -> None:
        """Slots for what the units are about to read, where not all pages have one."""
        if self.residency is not None:
            tokens = unit_list is self.units
            self.residency.begin_round(
                self.launch, (units, 1 if self.dense else 1 + self.L.heads, max(self.always, self.cap)),
                (self.cu_q, self.context, self.table, self.open_slot, unit_list, self.totals, *choice),
                (self.table.stride(0), self.cap, first, *self.limits), int(tokens and first == 0), BLOCKS=not tokens,
                CHOSEN=not self.dense, L=self.L,
            )  # fmt: skip

    def _attend_splits(
        self, first: int, units: int, stats: torch.Tensor, sums: torch.Tensor, choice: tuple[torch.Tensor, ...],
        fresh: int, base: int, count: int, splits: int, listed: bool,
    ) -> None:  # fmt: skip
        chosen, lengths = choice
        shape = dataclasses.replace(self.L, tile=min(self.L.tile, self.blocking.split_tile))
        self.launch(attend_split, (units, self.L.heads, count),
            self.q, self.k, self.v, stats, sums, self.cu_q, self.context, self.table, self.open_slot, self.payload_slot,
            self.payload, self.host, self.home, self.open_pages, self.units, self.totals, chosen, lengths,
            self.q.stride(0), self._kv_stride(), self.table.stride(0), self.payload.stride(0), self.host_stride,
            self.open_pages.stride(0), self.cap, first,
            *self.limits, fresh, base, splits, self.scale, self.softcap, M=max(MIN_ROWS, self.L.rows),
            SPLIT=self.split_pages, FRESH=FRESH_SPLIT, CHOSEN=listed, HAS_FRESH=fresh > 0, **{**self.flags, "L": shape},
            num_warps=self.blocking.split_warps, num_stages=self.blocking.split_stages,
            maxnreg=self.L.registers(self.blocking.split_warps),
        )  # fmt: skip

    def _kv_stride(self) -> int:
        return 0 if self.k is None else self.k.stride(0)

    def _choose(
        self,
        unit_list: torch.Tensor,
        first: int,
        units: int,
        samples: int,
        stats: torch.Tensor | None,
        splits: int,
        lead: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores, ranks and chooses for a wave of units: lists `[units, heads, cap]` and their lengths."""
        assert self.headers is not None
        shape, settings, stride = self.L, self.settings, self.pages_stride
        asking = shape.group * samples
        mass, variance = (self._new(units, shape.heads, asking, stride) for _ in range(2))
        padded = max(MIN_ROWS, power_of_two(shape.group) * samples)
        parts = max(1, padded * shape.half // SCORED_ELEMENTS)
        padded //= parts
        warps = 4 if samples == 1 else 8
        common = {"SAMPLES": samples, "CAP": self.softcap > 0, "L": shape, "num_warps": warps}
        self.launch(score_headers, (units, shape.heads * parts, -(-self.pages // self.blocking.scan_pages)),
            self.q, self.headers, mass, variance, self.cu_q, self.context, self.table, unit_list, self.totals,
            self.q.stride(0), self.headers.stride(0), self.table.stride(0), stride, first, *self.limits, self.scale,
            self.softcap, M=padded, PAGES=self.blocking.scan_pages, **common,
        )  # fmt: skip
        known = self._new(units, shape.heads, asking)
        if samples > 1:
            self.launch(known_blocks, (units, shape.heads, shape.group),
                self.q, mass, variance, self.moments, known, self.cu_q, self.context, self.table,
                self.open_slot, self.open_pages, unit_list, self.totals, self.q.stride(0), self.table.stride(0),
                self.open_pages.stride(0), stride, first, *self.limits, self.scale, self.softcap,
                CAP=self.softcap > 0, HAS_FRESH=self.k is not None, L=shape, num_warps=4 if shape.dim <= 128 else 8,
            )  # fmt: skip
        rows = power_of_two(shape.group) * samples
        wide = max(16, min(512, 2048 // rows))  # pages that a ranking step holds for all rows
        lists = self._new(units, shape.heads, stride, dtype=torch.int32)
        lengths = self._new(units, shape.heads, dtype=torch.int32)
        rank = self._new(units, shape.heads, stride)
        ranking = {
            "R": rows, "SAMPLES": samples, "LEAD": max(16, power_of_two(lead)) if samples == 1 else 1, "N": wide,
            "SEARCH": 1024, "L": shape, "num_warps": warps,
        }  # fmt: skip
        stats = known if stats is None else stats
        codes = variance
        if settings.scoring != "header":
            self.launch(rank_headers, (units, shape.heads),
                mass, variance, known, stats, rank, lists, lengths, self.context, unit_list, self.totals, stride,
                splits, lead, first, *self.limits, settings.share, *SPREAD, *EXPLAINED,
                ALL=settings.scoring == "codes", **ranking,
            )  # fmt: skip
            page, slot = self.payload, self.payload_slot
            if self.residency is not None:
                page, slot = self.residency.scoring
            self.launch(probe_pages, (units, shape.heads * parts, -(-self.pages // PROBE_PAGES)),
                self.q, page, codes, lists, lengths, self.cu_q, self.table, slot, unit_list, self.totals,
                self.q.stride(0), self.table.stride(0), page.stride(0), stride, first, self.scale, self.softcap,
                M=padded, PAGES=PROBE_PAGES, HAS_SLOTS=slot is not None, **common,
            )  # fmt: skip
        chosen = self._new(units, shape.heads, self.cap, dtype=torch.int32)
        shares = self._new(units, shape.heads, shape.group, stride)
        fixed = settings.select != "coverage"
        self.launch(choose_pages, (units, shape.heads),
            mass, variance, codes, known, stats, rank, shares, lists, chosen, lengths, self.dropped, self.pages_read,
            self.depth, self.handed, self.cu_q, self.context, unit_list, self.totals, stride, self.cap,
            0 if self.handed is None else self.handed.shape[-1], splits, lead, first, *self.limits,
            self.cap, settings.global_ratio or 0.0, 2.0 if fixed else settings.coverage,
            -1 if fixed else settings.min_pages, JOIN=settings.scoring != "header", HAND_OUT=self.handed is not None,
            HAS_DROPPED=self.dropped is not None, HAS_READ=self.pages_read is not None,
            HAS_DEPTH=self.depth is not None, G=power_of_two(shape.group),
            **ranking, maxnreg=255,  # else ptxas spills to fit more blocks
        )  # fmt: skip
        return chosen, lengths

    def _block_wave(self, first: int, units: int) -> None:
        rows = self.blocking.block_rows
        shape = dataclasses.replace(self.L, tile=min(self.L.tile, self.blocking.block_tile))
        chosen = lengths = self.blocks
        if not self.dense:
            chosen, lengths = self._choose(self.blocks, first, units, SAMPLES, None, 1, 1)
        self._fetch(self.blocks, first, units, (chosen, lengths))
        if self.prefill is not None and self.prefill.fits(self):
            self.prefill.attend(self, first, units, chosen, lengths)
            return
        parts = -(-min(self.max_query, BLOCK_QUERIES) * shape.group // rows)
        self.launch(attend_blocks, (units, shape.heads, parts),
            self.q, self.k, self.v, self.out, self.lse, self.cu_q, self.context, self.table, self.open_slot,
            self.payload_slot, self.payload, self.host, self.home, self.open_pages, self.blocks, self.totals, chosen,
            lengths, self.q.stride(0), self._kv_stride(), self.out.stride(0),
            0 if self.lse is None else self.lse.stride(0),
            self.table.stride(0), self.payload.stride(0), self.host_stride, self.open_pages.stride(0), self.cap, first,
            *self.limits,
            self.scale, self.softcap, M=rows, CHOSEN=not self.dense, HAS_FRESH=self.k is not None,
            HAS_LSE=self.lse is not None, **{**self.flags, "L": shape}, num_warps=self.blocking.block_warps,
        )  # fmt: skip
