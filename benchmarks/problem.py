"""The synthetic problem of the kernel benchmarks: one layer's paged cache and one step over it, the same for all modes.

Keys and queries are random, but with what page selection meets in a model:

- Channels differ in size and offset, as keys do (that is what INT4 has to cope with).
- A page's keys are its mean plus noise within the page. Means drift from page to page (correlation 0.8). The part of a
  key's variance that lies between pages runs from 0.12 (first kv head) to 0.7 (last): headers explain some heads well
  and others badly, so that `cascade` reads the codes of about half of the pages, as on SmolLM2 (`selection.py`: 0.50).
- Query heads of one kv head, and neighbouring tokens, ask for much the same (correlation 0.8 each; what a block of 64
  tokens asks for drifts with correlation 0.9).
- Queries concentrate: each kv head's are scaled so that its best 135 (first kv head) to 40 (last) pages give every
  query head of the first token 0.95 of its softmax mass. With the window that makes 105 to 200 pages at 128K; from
  there down the number falls with the root of the context (SmolLM2 at 8K: 22). They lie anywhere: the window holds no
  more than its share, which is harder than a model's recency.

Keys within a page are independent here, a model's are not: what INT4 and two-bit codes lose, and so `dropped_true`
and the errors against dense and unquantized attention, is more than on a model (`quality.py`, `selection.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_ktx.attention_backends.cpu import native
from vllm_ktx.attention_backends.torch_kernels import TorchKernels
from vllm_ktx.kv_quant import PageLayout, parse_format

BETWEEN = (0.12, 0.7)  # share of the keys' variance that lies between pages, first and last kv head
CONCENTRATION = (135, 40)  # pages that give COVERED of the mass at FULL pages, first and last kv head
FULL, LEAST = 2048, 8
COVERED = 0.95
TOPIC = 64  # tokens that ask for the same
SLICE = 8192  # tokens made at once: float32 noise of a million would not fit


@dataclass(frozen=True)
class Shape:
    """One layer's attention shape of a named model."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-3.1-8b", 32, 8, 128),
        Shape("qwen2.5-7b", 28, 4, 128),
        Shape("qwen2.5-0.5b", 14, 2, 64),
        Shape("smollm2", 9, 3, 64),
    )
}


@dataclass
class Problem:
    """One layer's cache and one step over it: `query_len` fresh tokens behind `context` older ones, one sequence.

    `keys`, `values` are the unquantized context, `[context, kv_heads, D]` bf16; `pages` is what the kernels read,
    `headers` (uint8 `[num_blocks, header_bytes]`) what they read beside it in sparse mode.
    """

    shape: Shape
    layout: PageLayout
    context: int
    query_len: int
    keys: torch.Tensor
    values: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    pages: dict[str, torch.Tensor] = field(default_factory=dict)
    headers: torch.Tensor | None = None

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5

    def kernel_inputs(self) -> dict[str, Any]:
        """Keyword arguments shared by every implementation of `attention`."""
        return {"q": self.q, "k": self.k, "v": self.v, "scale": self.scale, **self.pages}


def make_problem(
    shape: Shape, fmt_name: str, context: int, query_len: int, page_size: int = 64, order: str = "shuffled",
    **settings: Any,
) -> Problem:  # fmt: skip
    """A seeded problem as the module's docstring describes it. `order` of the blocks: `shuffled`, as in a pool that was
    used for long, or `sequential`, as vLLM hands them out at first. `settings`: as `parse_format` takes them."""
    gen = torch.Generator().manual_seed(7)
    tokens = Tokens(shape, page_size, context + query_len, gen)
    keys, values = tokens.rows(0, context)
    k, v = tokens.rows(context, query_len)
    q = make_queries(shape, query_len, gen)
    heads = torch.arange(shape.kv_heads).repeat_interleave(shape.q_heads // shape.kv_heads)
    q = (q * concentrate(q[0], keys, shape, page_size)[heads, None]).bfloat16()
    layout = PageLayout(parse_format(fmt_name, **settings), page_size, shape.kv_heads, shape.head_dim, dtype_bytes=2)
    problem = Problem(shape, layout, context, query_len, keys, values, q, k, v)
    problem.headers, problem.pages = fill_pages(layout, keys, values, query_len, order)
    return problem


class Tokens:
    """Keys and values by position."""

    def __init__(self, shape: Shape, page_size: int, tokens: int, gen: torch.Generator) -> None:
        self.size, self.gen = page_size, gen
        self.row = (shape.kv_heads, shape.head_dim)
        between = torch.linspace(*BETWEEN, shape.kv_heads).reshape(1, -1, 1)
        spread = torch.exp(0.5 * torch.randn(1, *self.row, generator=gen))
        self.noise = spread * (1 - between).sqrt()
        self.mean = drift(-(-tokens // page_size), 0.8, self.row, gen) * (spread * between.sqrt())
        self.mean += 2 * torch.randn(1, *self.row, generator=gen)

    def rows(self, begin: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`[tokens, kv_heads, D]` bf16 each, of positions `begin` on."""
        keys, values = torch.empty(2, tokens, *self.row, dtype=torch.bfloat16)
        for start in range(0, tokens, SLICE):
            count = min(SLICE, tokens - start)
            page = (begin + start + torch.arange(count)) // self.size
            noise = torch.randn(2, count, *self.row, generator=self.gen)
            keys[start : start + count] = self.mean[page] + self.noise * noise[0]
            values[start : start + count] = noise[1]
        return keys, values


def drift(steps: int, correlation: float, row: tuple[int, ...], gen: torch.Generator) -> torch.Tensor:
    """`[steps, *row]` of unit normals, neighbours correlated."""
    fresh = torch.randn(steps, *row, generator=gen)
    for now, last in zip(fresh[1:], fresh, strict=False):
        now.mul_((1 - correlation**2) ** 0.5).add_(last, alpha=correlation)
    return fresh


def make_queries(shape: Shape, tokens: int, gen: torch.Generator) -> torch.Tensor:
    """`[tokens, q_heads, D]` of unit length a channel."""
    group = shape.q_heads // shape.kv_heads
    topics = drift(-(-tokens // TOPIC), 0.9, (shape.kv_heads, 1, shape.head_dim), gen)
    topics = topics.repeat_interleave(TOPIC, 0)[:tokens]
    heads = torch.randn(1, shape.kv_heads, group, shape.head_dim, generator=gen)
    own = torch.randn(tokens, shape.kv_heads, group, shape.head_dim, generator=gen)
    asked = 0.8**0.5 * topics + 0.2**0.5 * heads
    return (0.8**0.5 * asked + 0.2**0.5 * own).reshape(tokens, shape.q_heads, shape.head_dim)


def concentrate(q: torch.Tensor, keys: torch.Tensor, shape: Shape, page_size: int) -> torch.Tensor:
    """Factors `[kv_heads]` by which queries `q` `[q_heads, D]` read COVERED of their mass from CONCENTRATION pages."""
    count = len(keys) // page_size
    factors = torch.ones(shape.kv_heads)
    if count < 2 * LEAST:
        return factors
    wanted = torch.linspace(*CONCENTRATION, shape.kv_heads) * min(1.0, (count / FULL) ** 0.5)
    for head, own in enumerate(q.reshape(shape.kv_heads, -1, shape.head_dim)):
        logits = own @ keys[: count * page_size, head].float().T * shape.head_dim**-0.5
        low, high = 0.05, 20.0
        for _ in range(12):
            middle = (low * high) ** 0.5
            needed = pages_needed(torch.softmax(logits * middle, -1).reshape(len(own), count, page_size).sum(-1))
            low, high = (middle, high) if needed > max(LEAST, wanted[head]) else (low, middle)
        factors[head] = low
    return factors


def pages_needed(share: torch.Tensor) -> int:
    """How many of the best pages, by the sum over the group, give each of its heads COVERED of its mass.

    `share`: `[G, pages]`.
    """
    best = share.sum(0).argsort(descending=True)
    return int((share[:, best].cumsum(-1).amin(0) < COVERED).sum()) + 1


def fill_pages(
    layout: PageLayout, keys: torch.Tensor, values: torch.Tensor, query_len: int, blocks: str = "shuffled"
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Seals what a running sequence would have sealed; the residual pages and the tail stay open. Headers and pages."""
    context, size = len(keys), layout.page_size
    num_pages = max(1, -(-context // size))
    sealed = max(0, context // size - layout.fmt.residual_pages)
    order = torch.arange(num_pages, dtype=torch.int32)
    if blocks == "shuffled":
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).int()
    open_slot = torch.full((num_pages,), -1, dtype=torch.int32)
    open_slot[order[sealed:].long()] = torch.arange(num_pages - sealed, dtype=torch.int32)
    open_pages = torch.zeros(num_pages - sealed, 2, layout.num_kv_heads, size, layout.head_dim, dtype=keys.dtype)
    payload = torch.zeros(num_pages, layout.payload_bytes, dtype=torch.uint8)
    headers = torch.zeros(num_pages, max(layout.header_bytes, 1), dtype=torch.uint8)
    kernels = make_kernels("auto")
    head_stride, token_stride = layout.head_dim, layout.num_kv_heads * layout.head_dim
    starts = torch.arange(sealed) * size * token_stride
    kernels.seal(layout, keys, values, starts, order[:sealed], headers, payload, None, token_stride, head_stride)
    rest = torch.arange(sealed * size, context, dtype=torch.int32)
    slot, offset = (rest // size - sealed).int(), (rest % size).int()
    if len(rest):
        kernels.append(layout, keys, values, rest, slot, offset, open_pages)
    return headers, {
        "cu_q": torch.tensor([0, query_len], dtype=torch.int32),
        "context": torch.tensor([context], dtype=torch.int32),
        "block_table": order.reshape(1, -1),
        "open_slot": open_slot,
        "payload": payload,
        "open_pages": open_pages,
    }


def make_kernels(isa: str) -> Any:
    """The kernels to measure: `auto` (native, or torch where not built), `torch`, or an instruction set's name.

    Raises ValueError for an instruction set that this machine or build lacks.
    """
    kernels = None if isa == "torch" else native.load()
    if kernels is None:
        if isa not in ("auto", "torch"):
            raise ValueError(f"--isa {isa}: the native kernels are not built; run `make native` or use --isa torch")
        return TorchKernels()
    if isa != "auto":
        kernels.set_isa(isa)
    return kernels
