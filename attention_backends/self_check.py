"""Do these kernels compute on this machine what they should? One small step against the oracles, before any request.

Written for cards and CPUs that the tests never saw: a wrong result must stop the start, not the users of it.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from dataclasses import dataclass
from typing import Any

import torch

from ..kv_quant import PageLayout
from . import reference
from .kernels import Kernels
from .selection import SparseSettings
from .sparse_pages import BLOCK, sparse_attention_reference
from .torch_kernels import TorchKernels

# Largest norm of an output's error over that of the output, by the model's dtype. The tests allow less.
LIMITS = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}
SEALED = 1e-3  # part of the pages' bytes that may differ: codes whose value lies on an edge
DROPPED = 0.05  # of the estimated share of softmax mass
SLOTS = 8  # of a device that doesn't hold all pages


class KernelError(RuntimeError):
    """The kernels are wrong on this machine."""


@dataclass
class _Step:
    """Decode behind 19 pages, the last partly filled; a chunk behind 12 that are full; a first chunk; a second token.
    Everything on the kernels' device; `sealed`: what `seal` takes, `filled`: what `append` takes."""

    layout: PageLayout
    inputs: dict[str, Any]
    headers: torch.Tensor
    sealed: tuple[Any, ...]
    filled: tuple[Any, ...]

    @classmethod
    def make(cls, layout: PageLayout, q_heads: int, dtype: torch.dtype, device: torch.device) -> _Step:
        size, heads, dim = layout.page_size, layout.num_kv_heads, layout.head_dim
        gen = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=gen)

        rows = ((1, 19 * size - 1), (2 * BLOCK + 2, 12 * size), (5, 0), (1, 1))  # fresh tokens, context
        counts = [-(-context // size) for _, context in rows]
        blocks = 1 + torch.randperm(sum(counts), generator=gen).int()
        table = torch.zeros(len(rows), max(counts), dtype=torch.int32)
        for row, own in zip(table, blocks.split(counts), strict=True):
            row[: len(own)] = own
        num_blocks, tokens = 1 + sum(counts), sum(fresh for fresh, _ in rows)
        # Channels with offsets, pages that differ: what scales and scorers have to tell apart.
        shift = 2 * normal(heads, dim)
        keys = (normal(num_blocks, size, heads, dim) + normal(num_blocks, 1, heads, dim) + shift).to(dtype)
        values = normal(num_blocks, size, heads, dim).to(dtype)
        partial = [(int(table[row, context // size]), context % size) for row, (_, context) in enumerate(rows)
                   if context % size]  # fmt: skip
        open_slot = torch.full((num_blocks,), -1, dtype=torch.int32)
        for slot, (block, _) in enumerate(partial):
            open_slot[block] = slot
        old = torch.tensor([[block * size + i, open_slot[block], i] for block, used in partial for i in range(used)])
        whole = (open_slot[1:] < 0).nonzero().flatten() + 1
        pages = torch.zeros(num_blocks, layout.payload_bytes, dtype=torch.uint8)
        inputs = {
            "q": (2 * normal(tokens, q_heads, dim)).to(dtype),
            "k": (normal(tokens, heads, dim) + shift).to(dtype),
            "v": normal(tokens, heads, dim).to(dtype),
            "cu_q": torch.tensor([0, *(fresh for fresh, _ in rows)]).cumsum(0).int(),
            "context": torch.tensor([context for _, context in rows], dtype=torch.int32),
            "block_table": table,
            "open_slot": open_slot,
            "payload": pages,
            "open_pages": torch.zeros(len(partial), 2, heads, size, dim, dtype=dtype),
        }
        flat = (keys.view(-1, heads, dim).to(device), values.view(-1, heads, dim).to(device))
        return cls(
            layout,
            {name: x.to(device) for name, x in inputs.items()} | {"scale": dim**-0.5},
            torch.zeros(num_blocks, layout.header_bytes, dtype=torch.uint8, device=device),
            (*flat, (whole * size * heads * dim).to(device), whole.int().to(device)),
            (*flat, *(column.int().to(device) for column in old.unbind(1))),
        )

    def fill(self, kernels: Any, payload: torch.Tensor, headers: torch.Tensor, open_pages: torch.Tensor) -> None:
        strides = self.layout.num_kv_heads * self.layout.head_dim, self.layout.head_dim
        kernels.seal(self.layout, *self.sealed, headers, payload, None, *strides)
        kernels.append(self.layout, *self.filled, open_pages)

    def here(self) -> _Step:
        """On the CPU."""
        move = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in self.inputs.items()}
        sealed, filled = (tuple(x.cpu() for x in part) for part in (self.sealed, self.filled))
        return _Step(self.layout, move, self.headers.cpu(), sealed, filled)


def self_check(
    kernels: Kernels,
    layout: PageLayout,
    q_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    sparse: SparseSettings | None = None,
    softcap: float = 0.0,
    paged: bool = False,
) -> dict[str, float]:
    """Seals, appends and attends a small batch, and compares with the oracles on the CPU; returns the errors by name.

    sparse: settings of the engine, cut to the batch's size. paged: also with pages beyond the device's memory (Triton),
    which must change nothing. Raises KernelError, naming the step and the error.
    """
    step, found = _Step.make(layout, q_heads, dtype, device), {}
    step.fill(kernels, step.inputs["payload"], step.headers, step.inputs["open_pages"])
    here = step.here()
    want = [torch.zeros_like(x) for x in (here.inputs["payload"], here.headers, here.inputs["open_pages"])]
    here.fill(TorchKernels(), *want)
    for name, got, right in (("sealing", here.inputs["payload"], want[0]), ("headers", here.headers, want[1])):
        if right.numel():
            found[name] = float((got != right).float().mean())
    found["appending"] = float((here.inputs["open_pages"] != want[2]).float().mean())
    inputs = {**step.inputs, "softcap": softcap}
    out = torch.full_like(inputs["q"], torch.nan)
    kernels.attention(layout, out=out, **inputs)
    found["dense attention"] = _error(out, reference.attention(layout, **{**here.inputs, "softcap": softcap})[0])
    more: dict[str, Any] = {}
    if sparse is not None and kernels.name != "torch":  # which are the oracle itself, and hand out no lists
        more = {"sparse": _cut(sparse, layout.page_size), "headers": step.headers}
        found |= _sparse(kernels, step, here, {**inputs, **more}, out)
    if paged:
        found["pages in host memory"] = _paged(kernels, step, {**inputs, **more}, out)
    limits = {"sealing": SEALED, "headers": SEALED, "appending": 0.0, "unread mass": DROPPED, "pages in host memory": 0}
    limits["pages taken"] = 1  # may lie on the edge
    wrong = {name: error for name, error in found.items() if not error <= limits.get(name, LIMITS[dtype])}
    if wrong:
        place = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
        raise KernelError(
            f"KTX's {kernels.name} kernels are wrong on {place}: "
            + ", ".join(f"{name} is off by {error:.3g} ({limits.get(name, LIMITS[dtype]):g} is allowed)"
                        for name, error in wrong.items())
            + f" (format {layout.fmt.name}, {layout.num_kv_heads} kv heads of {layout.head_dim}, {q_heads} query "
            f"heads, pages of {layout.page_size}, {dtype}). Nothing was served. Please report this line; "
            "ktx.self_check=false serves all the same"
        )  # fmt: skip
    return found


@functools.cache
def check_once(*args: Any) -> tuple[dict[str, float], float]:
    """`self_check(*args)` and the seconds it took; the first time in a process that it is asked for."""
    started = time.perf_counter()
    return self_check(*args), time.perf_counter() - started


def _cut(sparse: SparseSettings, size: int) -> SparseSettings:
    """Settings under which the batch's rows have pages to choose from, and leave some out."""
    return dataclasses.replace(
        sparse,
        window=2 * size,
        sinks=min(sparse.sinks, size),
        min_pages=1,
        max_pages=min(sparse.max_pages, 4),
        top_k=sparse.top_k and min(sparse.top_k, 4),
    )


def _sparse(kernels: Kernels, step: _Step, here: _Step, inputs: dict[str, Any], out: torch.Tensor) -> dict[str, float]:
    """Attention over the pages that the kernels chose, what they say of the others, how many they took."""
    shape = (len(out), step.layout.num_kv_heads)
    dropped, depth = torch.zeros(2, *shape, device=out.device)
    read = torch.zeros(shape, dtype=torch.int32, device=out.device)
    chosen = torch.full((*shape, 20), -1, dtype=torch.int32, device=out.device)
    out.fill_(torch.nan)
    kernels.attention(step.layout, out=out, dropped=dropped, pages_read=read, depth=depth, chosen=chosen, **inputs)
    own = {**here.inputs, "softcap": inputs["softcap"], "headers": here.headers, "settings": inputs["sparse"]}
    free = sparse_attention_reference(step.layout, **own)
    lists = _lists(step.layout, here.inputs, inputs["sparse"], chosen.cpu())
    want = sparse_attention_reference(step.layout, lists=lists, **own)
    return {
        "sparse attention": _error(out, want.out),
        "unread mass": float((dropped.cpu().double() - free.dropped).abs().max()),
        "pages taken": float((read.cpu() - free.pages_read).abs().max()),
    }


def _lists(
    layout: PageLayout, inputs: dict[str, Any], settings: SparseSettings, chosen: torch.Tensor
) -> list[list[torch.Tensor]]:
    """All pages that each token and kv head read, from those that were chosen beside the others."""
    lists: list[list[torch.Tensor]] = []
    everything = settings.select == "coverage" and settings.coverage >= 1  # no list is made then
    for row, context in enumerate(inputs["context"].tolist()):
        begin, end = inputs["cu_q"][row : row + 2].tolist()
        pages, blocks_end = -(-context // layout.page_size), (end - begin - 1) // BLOCK * BLOCK
        for token in range(end - begin):
            if token < blocks_end and token % BLOCK:  # its block's list is the first token's
                lists.append(lists[-1])
                continue
            first, last = settings.candidates(context + token, context, layout.page_size)
            chooses = first < last and not everything
            always = torch.tensor([*range(first), *range(last, pages)] if chooses else range(pages))
            lists.append([torch.cat((always.long(), head[head >= 0].long())).sort().values
                          for head in chosen[begin + token]])  # fmt: skip
    return lists


def _paged(kernels: Any, step: _Step, inputs: dict[str, Any], resident: torch.Tensor) -> float:
    """Share of the outputs that change where few pages are on the device, the first time and when they have come."""
    from .device_tiers import pinned, unpin
    from .triton.device_pages import DevicePages

    registered: list[torch.Tensor] = []
    payload, layout = inputs["payload"], step.layout
    host = pinned(len(payload), payload.shape[1], payload.device, registered)
    try:
        pages = DevicePages(layout, torch.zeros_like(payload[:SLOTS]), host)
        strides = layout.num_kv_heads * layout.head_dim, layout.head_dim
        k, v, offsets, blocks = step.sealed
        pages.seal(kernels, layout, k, v, offsets, blocks, torch.zeros_like(step.headers), *strides)
        worst = float((host[1:] != payload[1:].cpu())[step.inputs["open_slot"][1:].cpu() < 0].float().mean())
        for _ in range(2):
            out = torch.full_like(resident, torch.nan)
            kernels.attention(layout, out=out, residency=pages, **inputs)
            worst = max(worst, float((out != resident).float().mean()))
        return worst
    finally:
        unpin(registered)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.cpu().double() - want).norm() / want.norm())
