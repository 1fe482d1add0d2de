"""What a 24 GB card holds, by formula from the code's own sizes.

    python -m benchmarks.memory_plans > docs/memory-plans.md

Nothing here is measured on a card; the table says what to expect and which line to serve with.
Bytes of pages, headers and open pages come from `PageLayout` and `OpenPages`, those of the kernels' workspace from the
Triton launcher, run on tensors without memory; weights are counted from the models' published shapes. Needs triton.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass

import torch

from vllm_ktx.attention_backends.selection import SparseSettings
from vllm_ktx.attention_backends.triton import aot
from vllm_ktx.kv_quant import PageLayout, parse_format
from vllm_ktx.offload import OpenPages

PAGE = 64
CHUNK = 2048  # --max-num-batched-tokens
RUNTIME = 0.7e9  # CUDA context, cuBLAS workspace, captured graphs: an allowance, not a sum
CARD = 24e9
USABLE = 0.95 * CARD
# Pages of context for each one that stays on the device: 256 and 1,024 stay, and a query reads 67 to 195 a kv head.
OVERCOMMIT = {131072: 8, 1 << 20: 16}


@dataclass(frozen=True)
class Model:
    """Shape of a dense decoder, from its config.json. `qk`: parameters of norms on queries and keys, a layer."""

    name: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    dim: int
    inner: int
    vocab: int
    bias: bool = False
    qk: int = 0

    @property
    def linear(self) -> int:
        """Parameters of the layers' matrices, which weight quantization stores in 4 bits."""
        attention = self.hidden * self.dim * (2 * self.q_heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def rest(self) -> int:
        """Embeddings, output matrix (not tied in these models), norms, biases."""
        bias = self.dim * (self.q_heads + 2 * self.kv_heads) if self.bias else 0
        return 2 * self.vocab * self.hidden + self.layers * (2 * self.hidden + bias + self.qk) + self.hidden

    def weights(self, bits: int) -> float:
        """Bytes; 4 bits: a 16-bit scale and a 4-bit zero point for every 128 (AWQ, GPTQ), the rest in bf16."""
        per_weight = 2.0 if bits == 16 else (4 + 20 / 128) / 8
        return self.linear * per_weight + self.rest * 2

    def activations(self) -> float:
        """bf16 bytes of a chunk at its widest: residual stream twice, the MLP's two halves and their product."""
        return 2.0 * CHUNK * (2 * self.hidden + 3 * self.inner)


MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": Model("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256),
    "Qwen/Qwen2.5-7B-Instruct-1M": Model("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, bias=True),
    "Qwen/Qwen2.5-14B-Instruct-1M": Model("Qwen2.5-14B", 48, 5120, 40, 8, 128, 13824, 152064, bias=True),
    "Qwen/Qwen3-8B": Model("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, qk=256),
}
FOUR_BIT = {
    "meta-llama/Llama-3.1-8B-Instruct": "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4",
    "Qwen/Qwen3-8B": "Qwen/Qwen3-8B-AWQ",
}


@dataclass(frozen=True)
class Plan:
    """One model, weight precision, context and page format on one card; bytes, of one sequence of `context` tokens."""

    model: Model
    bits: int
    context: int
    fmt: str = "k4v4"

    @property
    def layout(self) -> PageLayout:
        return PageLayout(parse_format(self.fmt), PAGE, self.model.kv_heads, self.model.dim)

    @property
    def pages(self) -> int:
        return self.context // PAGE

    @property
    def headers(self) -> int:
        return self.pages * self.layout.header_bytes * self.model.layers

    @property
    def payloads(self) -> int:
        return self.pages * self.layout.payload_bytes * self.model.layers

    @property
    def hot(self) -> float:
        """Payloads that stay on the device under OVERCOMMIT."""
        return self.payloads / OVERCOMMIT[self.context]

    @property
    def open_pages(self) -> int:
        slots = OpenPages.slots_per_row(PAGE, self.layout.fmt.residual_pages, 0) + 1
        return slots * self.layout.dense_bytes * self.model.layers

    @property
    def workspace(self) -> int:
        """The most that the attention kernels' buffers take at once, in a chunk at the context's end."""
        return _workspace(self.layout, self.model.q_heads, self.pages)

    @property
    def fixed(self) -> float:
        return self.model.weights(self.bits) + self.workspace + self.model.activations() + RUNTIME

    @property
    def resident(self) -> float:
        """All pages on the device."""
        return self.fixed + self.headers + self.payloads + self.open_pages

    @property
    def tiered(self) -> float:
        """Headers and a hot pool on the device, the other pages in host memory."""
        return self.fixed + self.headers + self.hot + self.open_pages

    @property
    def planes(self) -> int:
        """Scoring planes of all pages."""
        return self.pages * self.layout.scoring_bytes * self.model.layers

    @property
    def scored(self) -> float:
        """The same with the scoring planes on the device."""
        return self.tiered + self.planes

    @property
    def bus(self) -> float:
        """Bytes that one row's step scores, in all layers, where headers explain the keys well: over the bus, if the
        planes aren't on the device."""
        settings = SparseSettings()
        first, last = settings.candidates(self.context, self.context, PAGE)
        return settings.share * (last - first) * self.layout.scoring_bytes * self.model.layers

    @property
    def host_gib(self) -> int:
        """Host memory of the command: all pages, and one to spare."""
        return int(1.01 * self.payloads / 2**30) + 1

    @property
    def cache_bytes(self) -> int:
        """Device memory of the command: as many blocks as `host_gib` holds, and the hot pool."""
        blocks = self.host_gib * 2**30 // (self.model.layers * self.layout.payload_bytes)
        kept = blocks * self.layout.kept_bytes(self.scored <= USABLE)
        return self.model.layers * (kept + self.pages // OVERCOMMIT[self.context] * self.layout.payload_bytes)

    def serve(self, checkpoint: str, tiered: bool) -> str:
        """The command that the plan stands for."""
        name = checkpoint if self.bits == 16 else FOUR_BIT.get(checkpoint, f"{checkpoint}-AWQ-OR-GPTQ")
        ktx, cache = f'"format": "{self.fmt}"', "--gpu-memory-utilization 0.95"
        if tiered:
            ktx, cache = f'{ktx}, "host_gib": {self.host_gib}', f"--kv-cache-memory-bytes {self.cache_bytes}"
        return (
            f"vllm serve {name} --attention-backend ktx --max-model-len {self.context} --max-num-seqs 1 "
            f"--max-num-batched-tokens {CHUNK} {cache} "
            f"--additional-config '{{\"ktx\": {{{ktx}}}}}'"
        )


@functools.cache
def _workspace(layout: PageLayout, q_heads: int, pages: int) -> int:
    return aot.workspace(layout, q_heads, torch.bfloat16, SparseSettings(), CHUNK, pages)


def bytes_of_a_step(pages_chosen: int, context: int = 131072) -> tuple[float, float, float]:
    """Bytes that a decode step of one Llama-3.1-8B layer reads: headers, plane 0, pages; by the default settings."""
    settings, plan = SparseSettings(), Plan(MODELS["meta-llama/Llama-3.1-8B-Instruct"], 16, context)
    first, last = settings.candidates(context, context, PAGE)
    always = plan.pages - (last - first)
    layout = plan.layout
    headers = float(plan.pages * layout.header_bytes)
    return (
        headers,
        settings.share * (last - first) * layout.scoring_bytes,
        (always + pages_chosen) * layout.payload_bytes,
    )


def gb(value: float) -> str:
    return f"{value / 1e9:.2f}"


def fits(value: float) -> str:
    return f"{gb(value)}{'' if value <= USABLE else ' (no)'}"


INTRODUCTION = """\
Written by `python -m benchmarks.memory_plans`, by formula; **not measured: KTX has not run on a GPU yet** (see
[gpu.md](gpu.md)). One sequence of the given context, format `k4v4`, pages of 64 tokens, chunks of 2,048 tokens. GB are
10^9 bytes, and a card of 24 GB gives a server about 22.8 (0.95).

- *All pages* keeps the whole cache on the device.
- *Hot pool* keeps the headers and one page in 8 (128K) or in 16 (1M) there, and all pages in host memory.
- *Scoring planes*: what `scoring: cascade` reads of pages to rank them. KTX keeps those of all pages on the device
  where they fit beside slots for what a query may read; else each step reads the bytes in the last column over the bus
  (one row, all layers, where headers explain the keys well; PCIe 4.0 x16 moves about 25 GB a second).
- The totals include the attention kernels' workspace (the most that their launcher allocates at once in a chunk at the
  context's end: {workspaces}) and an allowance of 0.70 GB for CUDA's context,
  libraries and graphs."""


def document() -> str:
    """The text of docs/memory-plans.md."""
    plans = [(c, Plan(m, bits, n)) for c, m in MODELS.items() for bits in (16, 4) for n in OVERCOMMIT]
    spaces = {n: [gb(p.workspace) for _, p in plans if p.context == n] for n in OVERCOMMIT}
    workspaces = ", ".join(f"{' to '.join(sorted({min(x), max(x)}))} GB at {n >> 10}K" for n, x in spaces.items())
    lines = [
        "# Memory plans for a 24 GB card",
        "",
        INTRODUCTION.format(workspaces=workspaces),
        "",
        "| model | weights | context | weights GB | headers | pages | open pages | activations | total, all pages "
        "| hot pool | total, hot pool | scoring planes | total with them | host memory | or over the bus, a step |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for _, p in plans:
        weights = "bf16" if p.bits == 16 else "4-bit"
        cells = [
            p.model.name, weights, f"{p.context >> 10}K", gb(p.model.weights(p.bits)), gb(p.headers), gb(p.payloads),
            gb(p.open_pages), gb(p.model.activations()), fits(p.resident), gb(p.hot), fits(p.tiered), gb(p.planes),
            fits(p.scored), gb(p.payloads), gb(p.bus),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "(no): does not fit 0.95 of 24 GB.", "", "## Commands", ""]
    for checkpoint, p in plans:
        if p.tiered > USABLE:
            continue
        tiered = p.resident > USABLE
        lines += [
            f"{p.model.name}, {'bf16' if p.bits == 16 else '4-bit'} weights, {p.context >> 10}K tokens"
            f"{', hot pool' if tiered else ''}{' and scoring planes' if tiered and p.scored <= USABLE else ''}:",
            "",
            "```console",
            f"$ {p.serve(checkpoint, tiered)}",
            "```",
            "",
        ]
    lines += [
        "Names that end in -AWQ-OR-GPTQ stand for a 4-bit checkpoint of your choice. Llama-3.1-8B is trained for 128K, "
        "Qwen3-8B for 40K (128K with YaRN: `--hf-overrides`, see its model card); rows beyond that are memory only.",
        "",
        "## Bytes of a decode step",
        "",
        "One layer of Llama-3.1-8B at 128K, default settings: all headers, plane 0 of 35 % of the candidates (where "
        "headers explain the keys well), and the pages. bf16 dense reads 536.9 MB. How many pages are chosen depends "
        "on the text: up to 51 the step reads 1/20 of the bf16 bytes or less, at the cap of 128 it reads 1/16.6.",
        "",
        "| pages chosen beside window and sinks | headers MB | plane 0 MB | pages MB | total MB | of bf16 dense |",
        "|---|---|---|---|---|---|",
    ]
    dense = 131072 * 2 * 8 * 128 * 2
    for chosen in (8, 32, 64, 128):
        parts = bytes_of_a_step(chosen)
        total = sum(parts)
        lines.append(
            f"| {chosen} | {' | '.join(f'{x / 1e6:.1f}' for x in parts)} | {total / 1e6:.1f} | 1/{dense / total:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(document())
    sys.exit(0)
