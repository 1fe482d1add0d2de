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
from .xformers_prefill import Functions, XformersPrefill

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
        for i, name in enumerate(kernel.arg_names):
            value = values[name]
            constant = name in given or value is None or (isinstance(value, int) and value == 1)
            signature[name] = "constexpr" if constant else _type_of(value)
            if constant:
                constants[(i,)] = given[name] if name in given else value
            elif isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
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

    kernels, step = TritonKernels(launch=keep), _step(layout, q_heads, dtype, sparse, tokens, rows, max_pages)
    k, v, some = step["k"], step["v"], _empty(8)
    headers = _empty(len(step["payload"]), layout.header_bytes, kind=torch.uint8)
    strides = k.stride(0), k.stride(1)
    kernels.seal(layout, k, v, _empty(8, kind=torch.int64), some, headers, step["payload"], None, *strides)
    kernels.append(layout, k, v, some, some, some, step["open_pages"])
    payload = step["payload"]
    planes = _empty(len(payload), layout.scoring_bytes, kind=torch.uint8)
    home = _empty(len(payload)) if with_disk else None
    pages = DevicePages(layout, payload[: len(payload) // 4], payload, None if with_disk else planes, home=home)
    pages.seal(kernels, layout, k, v, _empty(8, kind=torch.int64), some, headers, *strides)
    pages.read(kernels, _empty(8, kind=torch.int64))
    for prefill in (None, XformersPrefill(_shapes_only()))[: 1 if sparse is None else 2]:
        for residency in (None, pages):
            TritonKernels(launch=keep, prefill=prefill).attention(layout, residency=residency, **step)
    return list(found.values())


def _empty(*size: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(size, dtype=kind, device="meta")


def _step(
    layout: PageLayout, q_heads: int, dtype: torch.dtype, sparse: SparseSettings | None, tokens: int, rows: int,
    max_pages: int,
) -> dict[str, Any]:  # fmt: skip
    """What `TritonKernels.attention` takes for a step of `rows` rows and `tokens` tokens, without memory."""
    heads, dim, blocks = layout.num_kv_heads, layout.head_dim, 2 * max_pages
    qkv = _empty(tokens, q_heads + 2 * heads, dim, kind=dtype)
    q, k, v = qkv.split((q_heads, heads, heads), 1)
    account: dict[str, Any] = {}
    if sparse is not None:
        dropped, depth = (_empty(tokens, heads, kind=torch.float32) for _ in range(2))
        account = {"sparse": sparse, "dropped": dropped, "depth": depth, "pages_read": _empty(tokens, heads)}
        account["headers"] = _empty(blocks, layout.header_bytes, kind=torch.uint8)
    return {
        "q": q, "k": k, "v": v, "out": _empty(tokens, q_heads, dim, kind=dtype), "cu_q": _empty(rows + 1),
        "context": _empty(rows), "block_table": _empty(rows, max_pages), "open_slot": _empty(blocks),
        "payload": _empty(blocks, layout.payload_bytes, kind=torch.uint8),
        "open_pages": _empty(64, 2, heads, layout.page_size, dim, kind=dtype), "scale": dim**-0.5, **account,
    }  # fmt: skip


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
    step = _step(layout, q_heads, dtype, sparse, tokens, 1, max_pages)
    with _Peak() as held:
        TritonKernels(launch=lambda *args, **options: None).attention(layout, **step)
    return held.peak


def _shapes_only() -> Functions:
    """xformers' functions as far as shapes go."""

    def attended(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(q), q.new_empty(q.shape[0], *q.shape[2:4], q.shape[1], dtype=torch.float32)

    return Functions(attended, attended, lambda outs, lses: (outs[0].float(), lses[0]))


def compile_all(launches: list[Recorded], archs: tuple[int, ...] = tuple(ARCHS)) -> Iterator[Compiled]:
    """Every launch for every arch."""
    for launch in launches:
        for arch in archs:
            yield launch.compile(arch)
