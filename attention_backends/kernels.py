"""Chooses the kernels of this process: the native library where it was built, plain torch otherwise."""

from __future__ import annotations

import functools
import logging
from typing import Protocol

import torch

from ..kv_quant import PageLayout
from .selection import SparseSettings

logger = logging.getLogger("vllm.ktx")


class Kernels(Protocol):
    """What a set of kernels must do; the contracts stand in `cpu/native.py`."""

    @property
    def name(self) -> str: ...

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
