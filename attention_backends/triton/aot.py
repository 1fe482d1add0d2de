"""Ahead-of-time compilation without a GPU: what a serving step would launch, compiled for named cards and measured.

The launches are recorded from `TritonKernels` itself, on tensors without memory (torch's `meta` device), so what is
compiled has exactly the argument types, constants and specializations that serving uses.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from vllm_ktx.kv_quant import PageLayout

from ..selection import SparseSettings
from .device_pages import DevicePages
from .launch import TritonKernels
from .warmup import empty, shapes_only, step_inputs, write
from .xformers_prefill import XformersPrefill

# Compute capability -> cards, and shared memory that one thread block may use (CUDA programming guide, table of
# technical specifications by compute capability), in bytes.
ARCHS = {80: "A100", 86: "RTX 3090, A10", 89: "RTX 4090, L4", 90: "H100"}
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
_TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8",
}  # fmt: skip
_LABELLED = ("CHOSEN", "JOIN", "HAS_HOST", "BLOCKS")
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")


@dataclass(frozen=True)
class Recorded:
    """One launch: the kernel, what it is specialized for, and Triton's options."""

    label: str
    source: ASTSource
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, kernel: Any, args: tuple, given: dict[str, Any]) -> Recorded:
        options = {"enable_fp_fusion": True, **{name: given.pop(name) for name in _OPTIONS if name in given}}
        signature, constants, attributes = {}, {}, {}
        values = {**dict(zip(kernel.arg_names, args, strict=False)), **given}
        for i, parameter in enumerate(kernel.params):
            name, varies = parameter.name, parameter.do_not_specialize
            value = values[name]
            constant = name in given or value is None or (isinstance(value, int) and value == 1 and not varies)
            signature[name] = "constexpr" if constant else _type_of(value)
            aligned = isinstance(value, torch.Tensor) and not parameter.do_not_specialize_on_alignment
            if constant:
                constants[(i,)] = given[name] if name in given else value
            elif aligned or (isinstance(value, int) and value % 16 == 0 and not varies):
                attributes[(i,)] = [["tt.divisibility", 16]]
        label = kernel.__name__ + "".join(f" {flag}" for flag in _LABELLED if given.get(flag))
        label += f" x{given['SAMPLES']}" if "SAMPLES" in given else ""
        return cls(label, ASTSource(kernel, signature, constants, attributes), tuple(options.items()))

    def compile(self, arch: int) -> Compiled:
        """Compiles for compute capability `arch`. Raises what triton or ptxas raise."""
        built = triton.compile(self.source, target=GPUTarget("cuda", arch, 32), options=dict(self.options))
        registers, spills = resource_usage(built.asm["cubin"])
        return Compiled(self.label, arch, built.metadata.num_warps, registers, built.metadata.shared, spills)


@dataclass(frozen=True)
class Compiled:
    """What a compiled kernel takes: registers a thread, shared memory a block and spilled memory a thread, in bytes."""

    label: str
    arch: int
    warps: int
    registers: int
    shared: int
    spills: int


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of stack a thread (where ptxas spills to), from the bundled cuobjdump."""
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing of registers:\n{text}")
    return int(found[1]), int(found[2])


def record(
    layout: PageLayout,
    q_heads: int,
    dtype: torch.dtype = torch.bfloat16,
    sparse: SparseSettings | None = None,
    tokens: int = 8192,
    rows: int = 4,
    max_pages: int = 2048,
    with_disk: bool = False,
) -> list[Recorded]:
    """The distinct launches of sealing, appending and attending one step of `rows` rows and `tokens` tokens, with all
    pages on the device and with `DevicePages`; `with_disk`: whose places in host memory change."""
    found: dict[str, Recorded] = {}

    def keep(kernel: Any, grid: tuple[int, ...], *args: Any, **given: Any) -> None:
        launch = Recorded.of(kernel, args, given)
        found.setdefault(launch.label, launch)

    kernels, step = TritonKernels(launch=keep), step_inputs(layout, q_heads, dtype, sparse, tokens, rows, max_pages)
    payload = step["payload"]
    planes = empty(len(payload), layout.scoring_bytes, kind=torch.uint8)
    home = empty(len(payload)) if with_disk else None
    pages = DevicePages(layout, payload[: len(payload) // 4], payload, None if with_disk else planes, home=home)
    for where in (None, pages):
        write(kernels, layout, step, where)
    for prefill in (None, XformersPrefill(shapes_only()))[: 1 if sparse is None else 2]:
        for residency in (None, pages):
            TritonKernels(launch=keep, prefill=prefill).attention(layout, residency=residency, **step)
    return list(found.values())


class _Peak(TorchDispatchMode):
    """Bytes that new tensors take at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.now += made.nbytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(made, self._free, made.nbytes)
        return made

    def _free(self, size: int) -> None:
        self.now -= size


def workspace(
    layout: PageLayout, q_heads: int, dtype: torch.dtype, sparse: SparseSettings | None, tokens: int, max_pages: int
) -> int:
    """Most bytes of buffers that attention of one row of `tokens` tokens over up to `max_pages` pages holds at once."""
    step = step_inputs(layout, q_heads, dtype, sparse, tokens, 1, max_pages)
    with _Peak() as held:
        TritonKernels(launch=lambda *args, **options: None).attention(layout, **step)
    return held.peak


def compile_all(launches: list[Recorded], archs: tuple[int, ...] = tuple(ARCHS)) -> Iterator[Compiled]:
    """Every launch for every arch."""
    for launch in launches:
        for arch in archs:
            yield launch.compile(arch)
