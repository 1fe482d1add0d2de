"""Chooses the kernels of this process: the native library where it was built, plain torch otherwise."""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..kv_quant import KVFormat, PageLayout
from .selection import SparseSettings

logger = logging.getLogger("vllm.ktx")

MIN_WAVE = 16  # pages that must be resident at once: those of one split of a row's context


class Residency(Protocol):
    """Where pages that a kernel is about to read come from.

    limit: most distinct blocks of one call, at least `MIN_WAVE`. scoring: uint8 `[num_blocks, >= scoring_bytes]`, the
    first bytes of every sealed page, which are then never fetched for scoring; None: they are. slots: addresses of
    three uint8 `[num_slots]` arrays, a slot's state, its parts, and a mark, and the values of the first two where a
    page is whole: what is so everywhere in a wave gets the mark and isn't fetched; None: all is.
    """

    limit: int
    scoring: torch.Tensor | None
    slots: tuple[int, int, int, int, int] | None
    native: Any  # what the native kernels keep with it; None at first. The other attributes don't change after that

    def fetch(self, blocks: npt.NDArray[np.int32], scoring: bool) -> None:
        """Makes the pages of `blocks` `[n]`, distinct, readable through `payload_slot` until the next call; `scoring`:
        their first `PageLayout.scoring_bytes` are enough."""


class Kernels(Protocol):
    """What a set of kernels must do; the contracts stand in `cpu/native.py`."""

    @property
    def name(self) -> str: ...

    pages: bool  # whether attention takes a residency

    def unserved(self, fmt: KVFormat) -> str | None: ...

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
    ) -> None: ...

    def append(
        self,
        layout: PageLayout,
        k: torch.Tensor,
        v: torch.Tensor,
        token: torch.Tensor,
        slot: torch.Tensor,
        offset: torch.Tensor,
        open_pages: torch.Tensor,
    ) -> None: ...

    def attention(
        self,
        layout: PageLayout,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
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
    ) -> None: ...


@functools.cache
def select_kernels(choice: str) -> Kernels:
    """`choice`: `auto`, `native`, `torch` or `triton`. Raises RuntimeError if what was asked for is not there.

    `triton` runs on CUDA tensors, or on the CPU in Triton's interpreter (very slow: for tests).
    """
    if choice == "triton" or (choice == "auto" and torch.cuda.is_available()):
        return _triton_kernels()
    if choice != "torch":
        from .cpu.native import load

        native = load()
        if native is not None:
            return native
    if choice == "native":
        raise RuntimeError(
            "ktx.kernels='native': the native CPU library was not built (no C++ compiler at install?). "
            "Install g++ and run `pip install -e .` again, or set ktx.kernels to 'auto'."
        )
    from .torch_kernels import TorchKernels

    return TorchKernels()


def _triton_kernels() -> Kernels:
    try:
        from triton import knobs

        from .triton.launch import TritonKernels
    except ImportError as error:
        raise RuntimeError(f"ktx.kernels='triton': Triton can't be imported ({error}): install it") from None
    if not torch.cuda.is_available() and not knobs.runtime.interpret:
        raise RuntimeError(
            "ktx.kernels='triton': torch finds no CUDA device; set ktx.kernels to 'auto' (with TRITON_INTERPRET=1 they "
            "run on the CPU, for tests)"
        )
    return TritonKernels()


class Heads(NamedTuple):
    """What a model's attention heads are like. group: query heads of a kv head."""

    dtype: torch.dtype
    head_dim: int
    group: int
    softcap: float = 0.0


def prefill_kernels(choice: str, kernels: Kernels, heads: Heads) -> Kernels:
    """`kernels` with the prefill that `choice` (`auto`, `triton` or `xformers`) names; `auto` is Triton's, as no GPU
    has compared the two yet. Raises RuntimeError, with the reason, if xformers was asked for and can't serve `heads`.
    """
    if choice != "xformers":
        return kernels
    reason: str | None = f"it is a part of the Triton kernels, and these are {kernels.name}"
    if kernels.name == "triton":
        from .triton.launch import TritonKernels
        from .triton.xformers_prefill import XformersPrefill, unavailable

        reason = unavailable(*heads)
        if reason is None:
            return TritonKernels(prefill=XformersPrefill())
    raise RuntimeError(f"ktx.prefill_kernel='xformers': {reason}. Set ktx.prefill_kernel to 'auto', or leave it out.")


@functools.cache
def kernels_for(choice: str, fmt: KVFormat) -> Kernels:
    """The kernels that serve `fmt`: `select_kernels(choice)`, or torch's, after one warning, where the native ones
    don't know a part of it. Raises RuntimeError if others were asked for and can't serve it.
    """
    chosen = select_kernels(choice)
    missing = chosen.unserved(fmt)
    if missing is None:
        return chosen
    if choice != "auto" or chosen.name == "triton":
        raise RuntimeError(
            f"ktx.kernels={choice!r}: these kernels don't have {missing} (format {fmt.name}: {fmt.scales}). Use the "
            "format's own scales, or (on a CPU) set ktx.kernels to 'auto' (torch, many times slower)."
        )
    logger.warning(
        "KTX: no native kernels for %s (format %s: %s): plain torch serves this model's attention, many times slower. "
        "It is meant for comparisons; leave ktx.key_scale and ktx.value_scale out for speed.",
        missing,
        fmt.name,
        fmt.scales,
    )
    return select_kernels("torch")
