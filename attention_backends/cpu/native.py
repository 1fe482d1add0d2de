"""Loads the native CPU kernels and wraps them for tensors: backend code sees `CpuKernels`, never ctypes.

The library is plain C++ behind the C ABI of csrc/ktx.h, built at install time beside this file. It is linked against no
OpenMP runtime of its own: `load` makes torch's visible first, since vLLM binds the threads of that one to cores.
"""

from __future__ import annotations

import ctypes
import logging
import os
from ctypes import byref, c_char_p, c_int32, c_int64, pointer
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_ktx.attention_backends.kernels import MIN_WAVE, Residency
from vllm_ktx.attention_backends.selection import SparseSettings
from vllm_ktx.attention_backends.selection.cascade import EXPLAINED, SPREAD
from vllm_ktx.attention_backends.selection.settings import SCORINGS
from vllm_ktx.kv_quant.formats import KVFormat
from vllm_ktx.kv_quant.layout import PageLayout

from . import abi

logger = logging.getLogger(__name__)

ISAS = ("avx512", "avx2", "portable")
ISA_VARIABLE = "VLLM_KTX_CPU_ISA"
MAX_PAGE_SIZE = 256


@lru_cache(maxsize=1)
def load() -> CpuKernels | None:
    """The kernels, or None (after one warning that says why) where the library is missing or doesn't fit.

    `VLLM_KTX_CPU_ISA` (avx512, avx2, portable) overrides the choice of instruction set.
    """
    paths = sorted(Path(__file__).parent.glob("_native*.so"))
    if not paths:
        logger.warning(
            "KTX: the native CPU kernels are not built (no _native*.so in %s); attention falls back to torch, which is "
            "many times slower. Install a C++17 compiler and reinstall vllm-ktx.",
            Path(__file__).parent,
        )
        return None
    try:
        _preload_openmp()
        kernels = CpuKernels(ctypes.CDLL(str(paths[0])))
    except (OSError, AttributeError, ImportError) as error:
        logger.warning("KTX: the native CPU kernels in %s can't be used, falling back to torch: %s", paths[0], error)
        return None
    if isa := os.environ.get(ISA_VARIABLE):
        kernels.set_isa(isa)
    return kernels


def _preload_openmp() -> None:
    """Makes the OpenMP runtime that torch has loaded visible to the library; the system's if torch brings none."""
    candidates = []
    maps = Path("/proc/self/maps")
    if maps.exists():
        files = {line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines() if "libgomp" in line}
        candidates += sorted(files, key=lambda path: ("torch" not in path, path))
    candidates += [str(path) for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))]
    candidates.append("libgomp.so.1")
    for name in candidates:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
            return
        except OSError:
            continue
    raise OSError(f"no OpenMP runtime found; tried {', '.join(candidates)}")


def _ptr(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _need(condition: bool, name: str, found: object, needed: str) -> None:
    if not condition:
        raise ValueError(f"{name}: found {found}, needed {needed}")


def _check_indices(dtype: torch.dtype, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.dtype != dtype or not tensor.is_contiguous()):
            raise ValueError(f"{name}: found {tensor.dtype}, strides {tensor.stride()}; needed contiguous {dtype}")


def _check_rows(name: str, rows: torch.Tensor, heads: int, dim: int) -> None:
    """`rows` must be `[tokens, heads, dim]` with heads one after the other; only the token stride is free."""
    shape, stride = rows.shape, rows.stride()
    if len(shape) != 3 or shape[1] != heads or shape[2] != dim or stride[2] != 1 or (heads > 1 and stride[1] != dim):
        raise ValueError(f"{name}: found shape {tuple(shape)}, strides {stride}; needed [tokens, {heads}, {dim}] with "
                         f"strides [any, {dim}, 1]")  # fmt: skip


def _check_bytes(name: str, data: torch.Tensor, needed: int) -> None:
    if data.dtype != torch.uint8 or data.dim() != 2 or data.shape[1] < needed or data.stride(1) != 1:
        raise ValueError(f"{name}: found {data.dtype} {tuple(data.shape)}, strides {data.stride()}; needed uint8 "
                         f"[any, >= {needed}] with contiguous rows")  # fmt: skip


class _Fetcher:
    """A residency as C sees it, made once for each. What `fetch` raises is kept for the caller of the kernel."""

    def __init__(self, residency: Residency, layout: PageLayout, num_blocks: int) -> None:
        _need(residency.limit >= MIN_WAVE, "residency.limit", residency.limit, f"at least {MIN_WAVE}")
        planes = residency.scoring
        if planes is not None:
            _check_bytes("residency.scoring", planes, layout.scoring_bytes)
        self._fetch = residency.fetch
        self._error: BaseException | None = None
        self._function = abi.FETCH(self._call)  # lives as long as the struct that points to it
        self.struct = abi.Residency(
            self._function, None, residency.limit, num_blocks, _ptr(planes), 0 if planes is None else planes.stride(0),
            *(residency.slots or (None, None, None, 0, 0)),
        )  # fmt: skip

    def reraise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _call(self, context: Any, blocks: Any, count: int, scoring: int) -> int:
        try:
            self._fetch(np.ctypeslib.as_array(blocks, (count,)), bool(scoring))
        except BaseException as error:
            self._error = error
            return 1
        return 0


class CpuKernels:
    """The native kernels. All tensors are on the CPU; methods are thread-safe, release the GIL and return when done.

    Index tensors are contiguous; out-of-range indices are not checked. `num_threads=0` means OpenMP's default.
    """

    pages = True

    def __init__(self, library: ctypes.CDLL) -> None:
        """Takes a loaded library. Raises ImportError if it was built from another version of the ABI."""
        library.ktx_isa.restype = c_char_p
        library.ktx_set_isa.argtypes = [c_char_p]
        library.ktx_abi_size.argtypes, library.ktx_abi_size.restype = [c_int32], c_int64
        built = (library.ktx_abi_version(), *(library.ktx_abi_size(i) for i in range(len(abi.SIZES))))
        ours = (abi.VERSION, *map(ctypes.sizeof, abi.SIZES))
        if built != ours:
            raise ImportError(f"ABI version and struct sizes {built}, needed {ours}: reinstall vllm-ktx")
        self._library = library

    @property
    def name(self) -> str:
        """What a log or report calls these kernels."""
        return f"native ({self.isa})"

    def unserved(self, fmt: KVFormat) -> str | None:
        """What of a page format these kernels don't know, in words; None if they serve it."""
        return ", ".join(f"scales {name}" for name in sorted({fmt.k_method, fmt.v_method} - set(abi.METHODS))) or None

    @property
    def isa(self) -> str:
        """Instruction set in use: avx512, avx2 or portable."""
        return self._library.ktx_isa().decode()

    def set_isa(self, name: str) -> None:
        """Uses the given instruction set from now on, process-wide. Raises ValueError if it isn't available."""
        if self._library.ktx_set_isa(name.encode()):
            raise ValueError(f"{ISA_VARIABLE}={name!r}: this CPU or build has only {', '.join(self.available_isas())}")

    def available_isas(self) -> list[str]:
        """Instruction sets that both this CPU and this build have, fastest first."""
        now = self._library.ktx_isa()
        found = [name for name in ISAS if self._library.ktx_set_isa(name.encode()) == 0]
        self._library.ktx_set_isa(now)
        return found

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
        """Quantizes whole pages, as `KVCacheQuantizer.seal` does, into `headers[block]` and `payload[slot]`.

        Page i's token t of kv head h starts `src_offsets[i] + t * token_stride + h * head_stride` elements behind the
        first of `k` (and of `v`). `src_offsets` int64 [n]; `blocks`, `slots` int32 [n] (`slots=None`: the blocks);
        `headers` uint8 [num_blocks, header_bytes], `payload` uint8 [num_slots, payload_bytes], rows may be strided.
        """
        self._check_layout(layout)
        self._check_dtype(layout, k=k, v=v)
        _check_indices(torch.int64, src_offsets=src_offsets)
        _check_indices(torch.int32, blocks=blocks, slots=slots)
        _check_bytes("headers", headers, layout.header_bytes)
        _check_bytes("payload", payload, layout.payload_bytes if layout.fmt.quantized else layout.dense_bytes)
        args = abi.SealArgs(
            pointer(abi.layout_struct(layout)), k.data_ptr(), v.data_ptr(), abi.DTYPES[k.dtype], len(blocks),
            token_stride, head_stride, src_offsets.data_ptr(), blocks.data_ptr(), _ptr(slots), headers.data_ptr(),
            payload.data_ptr(), headers.stride(0), payload.stride(0), num_threads,
        )  # fmt: skip
        self._library.ktx_seal(byref(args))

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
        """Copies rows `token[i]` of `k` and `v` [tokens, num_kv_heads, head_dim] into open pages.

        Row i goes to token `offset[i]` of `open_pages[slot[i]]` ([num_open, 2, num_kv_heads, page_size, head_dim]).
        `token`, `slot`, `offset`: int32 [n].
        """
        k, v = self._fresh_rows(layout, k, v)
        self._check_dtype(layout, k=k, v=v, open_pages=open_pages)
        self._check_open(layout, open_pages)
        _check_indices(torch.int32, token=token, slot=slot, offset=offset)
        args = abi.AppendArgs(
            pointer(abi.layout_struct(layout)), k.data_ptr(), v.data_ptr(), abi.DTYPES[k.dtype], len(token),
            k.stride(0), layout.head_dim, token.data_ptr(), slot.data_ptr(), offset.data_ptr(), open_pages.data_ptr(),
            open_pages.stride(0) * open_pages.element_size(), num_threads,
        )  # fmt: skip
        self._library.ktx_append(byref(args))

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
        residency: Residency | None = None,
    ) -> None:
        """Causal attention of a mixed batch into `out`.

        Row r's queries are `q[cu_q[r] : cu_q[r + 1]]`; they attend `context[r]` older tokens, in the pages of
        `block_table[r]`, and the row's own `k`, `v` up to themselves (`k=v=None`: the context alone).

        `q`, `out` [tokens, num_q_heads, head_dim], `k`, `v` [tokens, num_kv_heads, head_dim], `open_pages`
        [num_open, 2, num_kv_heads, page_size, head_dim]: the model's dtype. `cu_q` [rows + 1], `context` [rows],
        `block_table` [rows, any], `open_slot` [num_blocks] (-1: read the payload), `payload_slot` [num_blocks] (None:
        the block): int32. `payload` uint8 [num_slots, payload_bytes]. `lse` float32 [tokens, num_q_heads]: natural
        log-sum-exp; -inf, with an output of zeros, where there was nothing to attend.

        `sparse`: which pages each query reads (None: all), by `headers` uint8 [num_blocks, header_bytes]. `dropped`
        float32 and `pages_read` int32, both [tokens, num_kv_heads], contiguous: the estimated share of softmax mass
        that was not read, and the context pages that were. `depth`, like `dropped`: the share of the candidates of the
        selection whose two-bit codes were read. `chosen` int32 [tokens, num_kv_heads, any], contiguous: the
        selected ones beside window and sinks, ascending, -1 behind the last; 64 queries of a prefill block share their
        list, which only the first of them gets.

        `residency`: fetches pages that `payload_slot` doesn't have yet; None: all are there. The result is the same, to
        the bit. What its `fetch` raises ends the call and is raised here; `out` then holds anything.
        """
        native = self._check_layout(layout)
        heads, dim = q.shape[1], layout.head_dim
        _need(heads % layout.num_kv_heads == 0, "query heads", heads, f"a multiple of {layout.num_kv_heads} kv heads")
        _check_rows("q", q, heads, dim)
        _check_rows("out", out, heads, dim)
        self._check_dtype(layout, q=q, out=out, open_pages=open_pages)
        if k is not None and v is not None:
            k, v = self._fresh_rows(layout, k, v)
            self._check_dtype(layout, q=q, k=k, v=v)
        self._check_open(layout, open_pages)
        _check_indices(torch.int32, cu_q=cu_q, context=context, open_slot=open_slot, payload_slot=payload_slot)
        _check_indices(torch.float32, lse=lse)
        _check_bytes("payload", payload, layout.payload_bytes if layout.fmt.quantized else layout.dense_bytes)
        _need(block_table.dtype == torch.int32 and block_table.stride(-1) == 1, "block_table",
              f"{block_table.dtype}, strides {block_table.stride()}", "int32 with contiguous rows")  # fmt: skip
        args = abi.AttentionArgs(
            native, q.data_ptr(), _ptr(k), _ptr(v), out.data_ptr(), _ptr(lse), abi.DTYPES[q.dtype], heads, len(context),
            block_table.stride(0), q.stride(0), 0 if k is None else k.stride(0), out.stride(0), cu_q.data_ptr(),
            context.data_ptr(), block_table.data_ptr(), open_slot.data_ptr(), _ptr(payload_slot), payload.data_ptr(),
            open_pages.data_ptr(), payload.stride(0), open_pages.stride(0) * open_pages.element_size(), scale, softcap,
            num_threads,
        )  # fmt: skip
        if sparse is not None:
            args.sparse = pointer(self._sparse_args(layout, sparse, headers, dropped, pages_read, chosen, depth))
        caller = None
        if residency is not None:
            caller = residency.native = residency.native or _Fetcher(residency, layout, len(open_slot))
            args.residency = pointer(caller.struct)
        code = self._library.ktx_attention(byref(args))
        if caller is not None:
            caller.reraise()
        if code:
            raise RuntimeError(f"ktx_attention returned {code} for {layout}")

    def _sparse_args(
        self,
        layout: PageLayout,
        sparse: SparseSettings,
        headers: torch.Tensor | None,
        dropped: torch.Tensor | None,
        pages_read: torch.Tensor | None,
        chosen: torch.Tensor | None,
        depth: torch.Tensor | None,
    ) -> abi.SparseArgs:
        if headers is None or not layout.fmt.quantized:
            raise ValueError("sparse attention needs headers, which only a quantized format has")
        sparse.check_page_size(layout.page_size)
        if sparse.scoring != "header" and not layout.fmt.keys_by_channel:
            raise ValueError(f"scoring {sparse.scoring!r} reads codes by channel: with key_scale="
                             f"{layout.fmt.k_method!r} use scoring 'header'")  # fmt: skip
        _check_bytes("headers", headers, layout.header_bytes)
        _check_indices(torch.float32, dropped=dropped, depth=depth)
        _check_indices(torch.int32, pages_read=pages_read, chosen=chosen)
        return abi.SparseArgs(
            headers.data_ptr(), headers.stride(0), sparse.window, sparse.sink_pages(layout.page_size),
            SCORINGS.index(sparse.scoring), int(sparse.select != "coverage"), sparse.min_pages,
            sparse.top_k or sparse.cap, sparse.coverage, sparse.global_ratio or 0.0, sparse.share, *SPREAD, *EXPLAINED,
            0, _ptr(dropped), _ptr(pages_read), _ptr(chosen), 0 if chosen is None else chosen.shape[-1],
            _ptr(depth),
        )  # fmt: skip

    def _check_layout(self, layout: PageLayout) -> ctypes._Pointer:
        _need(layout.page_size <= MAX_PAGE_SIZE, "page size (vLLM's --block-size)", layout.page_size,
              f"at most {MAX_PAGE_SIZE} for the CPU kernels")  # fmt: skip
        return pointer(abi.layout_struct(layout))

    def _check_dtype(self, layout: PageLayout, **tensors: torch.Tensor) -> None:
        first = next(iter(tensors.values()))
        for name, tensor in tensors.items():
            if tensor.dtype not in abi.DTYPES or tensor.dtype != first.dtype or tensor.device.type != "cpu":
                raise ValueError(f"{name}: found {tensor.dtype} on {tensor.device}; needed one dtype for all, "
                                 f"float32, float16 or bfloat16, on the CPU")  # fmt: skip

    def _check_open(self, layout: PageLayout, open_pages: torch.Tensor) -> None:
        page = (2, layout.num_kv_heads, layout.page_size, layout.head_dim)
        if open_pages.shape[1:] != page or (len(open_pages) and not open_pages[0].is_contiguous()):
            raise ValueError(f"open_pages: found {tuple(open_pages.shape)}, strides {open_pages.stride()}; needed "
                             f"[any, {page}] with contiguous pages")  # fmt: skip

    def _fresh_rows(self, layout: PageLayout, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _check_rows("k", k, layout.num_kv_heads, layout.head_dim)
        _check_rows("v", v, layout.num_kv_heads, layout.head_dim)
        if k.stride(0) != v.stride(0):  # the kernels take one stride; a model may hand out one of the two as a view
            k, v = k.contiguous(), v.contiguous()
        return k, v
