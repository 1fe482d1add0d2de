"""The Triton kernels: compiled for four cards without any of them, measured where there is one. Needs torch and triton.

    python -m benchmarks.gpu --compile [--wide] [--json OUT]     registers, shared memory, spills: no GPU needed
    python -m benchmarks.gpu --all --json OUT                    everything that needs a GPU, in one go (minutes)

`--all` checks first (against the float64 oracle, and a replayed CUDA graph against an eager step), then times decode
and prefill steps of one layer against the fastest bf16 attention that is installed: torch's SDPA, flash-attn, and
KTX's own split-KV kernel on unquantized pages. Steps are whole: scoring, selection, attention, join; prefill by both
of `ktx.prefill_kernel`, by xformers where it can be had and is right. Beside them stand a decode step with its pages in
pinned memory (in slots, fetched, read in place) and the card's own ceilings (copy
bandwidth, bf16 matmul, copies from pinned memory), all under a cap of 24 GB.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from vllm_ktx.attention_backends import reference
from vllm_ktx.attention_backends.device_tiers import pinned, unpin
from vllm_ktx.attention_backends.selection import SparseSettings
from vllm_ktx.attention_backends.self_check import LIMITS, KernelError, self_check
from vllm_ktx.attention_backends.sparse_pages import sparse_attention_reference
from vllm_ktx.attention_backends.triton import aot
from vllm_ktx.attention_backends.triton.device_pages import WORD, DevicePages
from vllm_ktx.attention_backends.triton.launch import TritonKernels, launch
from vllm_ktx.attention_backends.triton.residency import FOUND
from vllm_ktx.attention_backends.triton.xformers_prefill import XformersPrefill, unavailable
from vllm_ktx.kv_quant import PageLayout, parse_format

from .problem import SHAPES, Problem, Shape, fill_pages, make_problem

DEVICE, DTYPE = "cuda", torch.bfloat16
CAP_BYTES = 24 * 10**9
CONTEXTS = (8192, 32768, 131072, 1 << 20)
SMALL, WRONG = SparseSettings(window=512, max_pages=16), LIMITS[DTYPE]  # settings of checks, error that fails them
CHECKED = (("k4v4", 128, 64), ("k4v4", 64, 32), ("k8v4", 128, 64), ("none", 64, 64), ("none", 128, 64))  # and page size
CHUNK = 8192  # fresh tokens of a prefill step
# Of Llama-3.1-8B in the default format; --wide adds head sizes, formats and, for what reads and writes them, scales.
NARROW = (("k4v4", 128, {}),)
BY_32 = {"k_method": "per_channel_32", "v_method": "per_token_32", "scale_bits": 8}
WIDE = (
    *(("k4v4", dim, {}) for dim in (64, 256)), *((name, 128, {}) for name in ("k8v4", "k8v8", "none")),
    ("k4v4", 128, {"k_method": "per_channel_32"}), ("k4v4", 128, BY_32), ("k4v4", 256, BY_32),
    ("k8v8", 128, {"k_method": "per_token_32", "v_method": "per_channel_32", "scale_bits": 8}),
)  # fmt: skip
SCALED = ("seal_pages", "attend_split", "attend_blocks", "probe_pages", "gather_tokens")


def compile_table(wide: bool, archs: tuple[int, ...] = tuple(aot.ARCHS)) -> list[dict[str, Any]]:
    """One row a format, head size, kernel and card."""
    rows = []
    for name, dim, scales in NARROW + (WIDE if wide else ()):
        fmt = parse_format(name, **scales)
        sparse = SparseSettings(scoring="cascade" if fmt.keys_by_channel else "header") if fmt.quantized else None
        launches = aot.record(PageLayout(fmt, 64, 8, dim), 32, sparse=sparse)
        if scales:
            launches = [launch for launch in launches if launch.label.startswith(SCALED)]
        label = " ".join((name, *map(str, scales.values())))
        for built in aot.compile_all(launches, archs):
            rows.append({"triton": triton.__version__, "format": label, "head_dim": dim, **dataclasses.asdict(built)})
            print("{format} {head_dim} {label}: sm_{arch}, {registers} registers, {shared} B shared, {spills} B "
                  "spilled".format(**rows[-1]), file=sys.stderr)  # fmt: skip
    return rows


def compile_markdown(rows: list[dict[str, Any]]) -> str:
    """The table of docs/gpu.md: registers / shared memory in KiB by card, and the most that any kernel spills."""
    archs = sorted({row["arch"] for row in rows})
    lines = ["| format, head_dim | kernel | warps | " + " | ".join(f"sm_{a} ({aot.ARCHS[a]})" for a in archs) + " |"]
    lines.append("|---" * (3 + len(archs)) + "|")
    groups: dict[tuple, dict[int, dict]] = {}
    for row in rows:
        groups.setdefault((row["format"], row["head_dim"], row["label"], row["warps"]), {})[row["arch"]] = row
    for (fmt, dim, label, warps), cards in groups.items():
        cells = [
            f"{cards[a]['registers']} / {cards[a]['shared'] / 1024:.1f} / {cards[a]['spills']}" if a in cards else "-"
            for a in archs
        ]
        lines.append(f"| {fmt}, {dim} | {label} | {warps} | {' | '.join(cells)} |")
    return "\n".join(lines)


def to_device(problem: Problem, device: str | None = None, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """`Problem.kernel_inputs` on a device, the model's dtype changed to `dtype`; by default `DEVICE` and `DTYPE`."""
    device, dtype = device or DEVICE, dtype or DTYPE

    def move(x: Any) -> Any:
        return x.to(device, dtype if x.is_floating_point() else x.dtype) if isinstance(x, torch.Tensor) else x

    return {name: move(x) for name, x in problem.kernel_inputs().items()}


def account(problem: Problem, device: str) -> dict[str, torch.Tensor]:
    shape = (problem.query_len, problem.shape.kv_heads)
    return {
        "dropped": torch.zeros(shape, device=device),
        "pages_read": torch.zeros(shape, dtype=torch.int32, device=device),
    }


def correctness(
    device: str,
    shape: Shape,
    context: int,
    query_len: int,
    settings: SparseSettings,
    dtype: torch.dtype | None = None,
    prefill: XformersPrefill | None = None,
) -> dict[str, float]:
    """Relative errors of the dense and the sparse step against the float64 oracle; how far the accounts are off.

    `sparse` includes what pages that rank alike make, where the oracle took others.
    """
    problem = make_problem(shape, "k4v4", context, query_len)
    inputs, given = to_device(problem, device, dtype), to_device(problem, "cpu", dtype)
    kernels = TritonKernels(prefill=prefill)
    out, headers, more = torch.empty_like(inputs["q"]), problem.headers, account(problem, device)
    assert headers is not None
    kernels.attention(problem.layout, out=out, **inputs)
    found = {"dense": _error(out, reference.attention(problem.layout, **given)[0])}
    kernels.attention(problem.layout, out=out, headers=headers.to(device), sparse=settings, **more, **inputs)
    oracle = sparse_attention_reference(problem.layout, headers=headers, settings=settings, **given)
    found["sparse"] = _error(out, oracle.out)
    found["dropped"] = float((more["dropped"].cpu().double() - oracle.dropped).abs().max())
    found["pages"] = float((more["pages_read"].cpu() - oracle.pages_read).abs().float().mean())
    return found


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.cpu().double(), want.double()
    return float((got - want).norm() / want.norm())


def paged(problem: Problem, num_slots: int, planes: bool = True) -> tuple[dict[str, Any], DevicePages]:
    """The problem with its pages in pinned memory and `num_slots` empty slots on the device, and what holds them.
    `planes`: the device holds the scoring planes."""
    layout, payload = problem.layout, problem.pages["payload"]
    registered: list[torch.Tensor] = []
    host = pinned(len(payload), layout.payload_bytes, torch.device(DEVICE), registered)
    host.copy_(payload)
    slots = torch.empty(num_slots, layout.payload_bytes, dtype=torch.uint8, device=DEVICE)
    first = host[:, : layout.scoring_bytes].to(DEVICE) if planes else None
    pages = DevicePages(layout, slots, host, first)
    weakref.finalize(pages, unpin, registered)
    inputs = to_device(dataclasses.replace(problem, pages={**problem.pages, "payload": payload[:1]}))
    return {**inputs, "residency": pages}, pages


def graph_matches(settings: SparseSettings, num_slots: int | None = None) -> bool:
    """Whether a captured decode step, replayed after its inputs changed, gives what an eager step gives. `num_slots`:
    captured with pages in pinned memory and so many slots, eager with all pages on the device."""
    problem = make_problem(SHAPES["llama-3.1-8b"], "k4v4", 16384, 1)
    inputs, kernels = to_device(problem), TritonKernels()
    assert problem.headers is not None
    headers, out = problem.headers.to(DEVICE), torch.empty_like(inputs["q"])
    captured = inputs if num_slots is None else paged(problem, num_slots)[0]
    captured |= {name: inputs[name] for name in ("q", "context")}

    def step(to: torch.Tensor, given: dict[str, Any]) -> None:
        kernels.attention(problem.layout, out=to, headers=headers, sparse=settings, max_query_len=1, **given)

    replay = graphed(lambda: step(out, captured))
    inputs["q"].mul_(-0.5)
    inputs["context"].fill_(9000)  # its tail lies in a sealed page: any content does for this comparison
    want = torch.empty_like(out)
    step(want, inputs)
    for _ in range(2):  # pages come, pages are there
        replay()
        # Pages in host memory have kernels of their own, which may contract other multiplications and additions.
        if not (torch.equal(out, want) if num_slots is None else _error(out, want.cpu()) < WRONG):
            return False
    return True


def timed(
    call: Callable[[], Any], seconds: float = 0.7, least: int = 3, before: Callable[[], Any] = lambda: None
) -> float:
    """Median milliseconds on the device, with the second-level cache overwritten and `before` done before each call."""
    flush = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    before()
    call()
    torch.cuda.synchronize()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < least or (time.perf_counter() - start < seconds and len(times) < 200):
        flush.zero_()
        before()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a CUDA graph, as serving replays it."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def ceilings() -> dict[str, float]:
    """What the card itself does: copy bandwidth, bf16 matmul, copies from pinned memory in one run and by pages."""
    big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    half = 1 << 29
    copy_ms = timed(lambda: big[:half].copy_(big[half:]))
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    matmul_ms = timed(lambda: a @ a)
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    run_ms = timed(lambda: big[: host.numel()].copy_(host, non_blocking=True))
    page = 71680  # a k4v4 page of Llama-3.1-8B
    pages = [slice(i * page, (i + 1) * page) for i in range(0, 1024, 4)]

    def by_pages() -> None:
        for at in pages:
            big[at].copy_(host[at], non_blocking=True)

    return {
        "copy_gb_s": 2 * half / copy_ms / 1e6,
        "bf16_tflop_s": 2 * 8192**3 / matmul_ms / 1e9,
        "pinned_gb_s": host.numel() / run_ms / 1e6,
        "pinned_pages_gb_s": len(pages) * page / timed(by_pages) / 1e6,
    }


def bf16_baselines(problem: Problem) -> dict[str, Callable[[], Any]]:
    """bf16 attention of the same step over contiguous keys and values, by every implementation that is there."""
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    q = problem.q.to(DEVICE).transpose(0, 1)[None]
    keys, values = (
        torch.cat((old, new)).to(DEVICE) for old, new in ((problem.keys, problem.k), (problem.values, problem.v))
    )
    k, v = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    mask = None if problem.query_len == 1 else causal_lower_right(problem.query_len, len(keys))
    calls: dict[str, Callable[[], Any]] = {"sdpa": lambda: sdpa(q, k, v, attn_mask=mask, enable_gqa=True)}
    try:
        from flash_attn import flash_attn_with_kvcache

        calls["flash_attn"] = lambda: flash_attn_with_kvcache(q.transpose(1, 2), keys[None], values[None], causal=True)
    except ImportError:
        pass
    return calls


@functools.cache
def no_xformers(shape: Shape) -> str | None:
    """Why prefill isn't timed with xformers: what keeps it from running, or that it is wrong here; None: it is."""
    reason = unavailable(DTYPE, shape.head_dim, shape.q_heads // shape.kv_heads)
    if reason is not None:
        return reason
    try:
        found = correctness(DEVICE, shape, 4000, 200, SMALL, prefill=XformersPrefill())
    except RuntimeError as error:
        return f"it failed: {error}"
    return None if found["sparse"] < WRONG else f"its relative error is {found['sparse']:.3g}"


def ktx_steps(
    problem: Problem, settings: SparseSettings, used: dict[str, torch.Tensor]
) -> dict[str, Callable[[], Any]]:
    kernels, inputs = TritonKernels(), to_device(problem)
    assert problem.headers is not None
    headers, out = problem.headers.to(DEVICE), torch.empty_like(inputs["q"])
    common = {"out": out, "max_query_len": problem.query_len, **inputs}

    def sparse(kernels: TritonKernels) -> Callable[[], Any]:
        return lambda: kernels.attention(problem.layout, headers=headers, sparse=settings, **used, **common)

    steps = {"ktx_sparse": sparse(kernels), "ktx_dense": lambda: kernels.attention(problem.layout, **common)}
    if problem.query_len > 1 and no_xformers(problem.shape) is None:
        steps["ktx_xformers"] = sparse(TritonKernels(prefill=XformersPrefill()))
    return steps


def plain_step(problem: Problem) -> Callable[[], Any]:
    """KTX's split-KV decode over the same tokens in unquantized pages."""
    layout = dataclasses.replace(problem.layout, fmt=parse_format("none"))
    _, pages = fill_pages(layout, problem.keys, problem.values, problem.query_len)
    inputs = to_device(dataclasses.replace(problem, layout=layout, pages=pages))
    out, kernels = torch.empty_like(inputs["q"]), TritonKernels()
    return lambda: kernels.attention(layout, out=out, max_query_len=problem.query_len, **inputs)


def bytes_read(problem: Problem, settings: SparseSettings, pages_read: float) -> dict[str, float]:
    """Bytes, by the page format's sizes, of a decode step: sparse (headers, plane 0 at `share`, pages), dense bf16."""
    layout, size = problem.layout, problem.layout.page_size
    pages = problem.context // size
    first, last = settings.candidates(problem.context, problem.context, size)
    probed = settings.share * (last - first) if settings.scoring == "cascade" else 0.0
    sparse = pages * layout.header_bytes + probed * layout.scoring_bytes + pages_read * layout.payload_bytes
    dense = 2 * problem.context * layout.num_kv_heads * layout.head_dim * 2
    return {"sparse_bytes": sparse, "bf16_bytes": dense, "bytes_ratio": dense / sparse}


def step_row(shape: Shape, context: int, query_len: int, settings: SparseSettings) -> dict[str, Any]:
    """One step of one layer: milliseconds of each implementation, bytes, rates."""
    problem = make_problem(shape, "k4v4", max(0, context - query_len), query_len)
    torch.cuda.reset_peak_memory_stats()
    row: dict[str, Any] = {"shape": shape.name, "context": context, "query_len": query_len}
    used = account(problem, DEVICE)
    for name, call in ktx_steps(problem, settings, used).items():
        row[f"{name}_ms"] = timed(graphed(call) if query_len == 1 else call)
    row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    row["pages_read"] = float(used["pages_read"].float().mean())
    if query_len == 1:
        row |= bytes_read(problem, settings, row["pages_read"])
        row["ktx_gb_s"] = row["sparse_bytes"] / row["ktx_sparse_ms"] / 1e6
    torch.cuda.empty_cache()
    for name, call in bf16_baselines(problem).items():
        try:
            row[f"{name}_ms"] = timed(call, least=2)
        except RuntimeError as error:  # no kernel of it takes this shape
            row[f"{name}_error"] = str(error).splitlines()[0]
    if query_len == 1:
        row["split_kv_bf16_ms"] = timed(graphed(plain_step(problem)))
        row["split_kv_bf16_gb_s"] = row["bf16_bytes"] / row["split_kv_bf16_ms"] / 1e6
    found = [row[f"{n}_ms"] for n in ("sdpa", "flash_attn", "split_kv_bf16") if f"{n}_ms" in row]
    best = min(found, default=float("nan"))
    row["speedup"] = best / row["ktx_sparse_ms"]
    if query_len > 1:
        flops = 4 * shape.q_heads * shape.head_dim * query_len * (context - query_len / 2)
        row["bf16_tflop_s"] = flops / best / 1e9
    print(json.dumps(row), file=sys.stderr, flush=True)
    torch.cuda.empty_cache()
    return row


def paged_steps(problem: Problem, settings: SparseSettings) -> dict[str, tuple[Callable[[], Any], DevicePages]]:
    """A decode step with pages in pinned memory: a pool that holds what it reads, the same without scoring planes on
    the device, and a pool of one slot."""
    blocks, kernels, steps = len(problem.pages["payload"]), TritonKernels(), {}
    assert problem.headers is not None
    headers, out = problem.headers.to(DEVICE), torch.empty_like(problem.q, dtype=DTYPE, device=DEVICE)
    for name, slots, planes in (("pool", -(-blocks // 2), True), ("host_planes", -(-blocks // 2), False),
                                ("in_place", 1, True)):  # fmt: skip
        inputs, pages = paged(problem, slots, planes)
        step = functools.partial(kernels.attention, problem.layout, out=out, headers=headers, sparse=settings,
                                 max_query_len=1, **inputs)  # fmt: skip
        steps[name] = (step, pages)
    return steps


def fetch_all(pages: DevicePages) -> tuple[Callable[[], Any], int]:
    """A call that fetches a page, scattered in host memory, into every slot, and the bytes it moves."""
    order = torch.randperm(len(pages.host), generator=torch.Generator().manual_seed(3))[: len(pages.slots)]
    pages.block_of.copy_(order)
    pages.fetched.copy_(torch.arange(len(order)))
    pages.clock[FOUND.value] = len(order)
    return functools.partial(pages.fetch, launch), len(order) * pages.words * WORD


def paged_row(shape: Shape, context: int, settings: SparseSettings) -> dict[str, Any]:
    """A decode step of one layer with its pages in pinned memory: all that it reads in slots (hit), none (miss: it is
    fetched first), read in place; what fetching takes alone."""
    problem = make_problem(shape, "k4v4", context - 1, 1)
    steps = paged_steps(problem, settings)
    call, pages = steps["pool"]
    row: dict[str, Any] = {"shape": shape.name, "context": context, "slots": len(pages.slots)}
    step = graphed(call)
    row["hit_ms"], row["miss_ms"] = timed(step), timed(step, before=pages.forget)
    pages.forget()
    pages.counts.zero_()
    step()
    row["pages"] = int(pages.counts.sum())
    for name in ("host_planes", "in_place"):
        row[f"{name}_ms"] = timed(graphed(steps[name][0]))
    call, moved = fetch_all(pages)
    row["fetch_gb_s"] = moved / timed(call) / 1e6
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def checks(device: str, dtype: torch.dtype = DTYPE) -> dict[str, Any]:
    """Sealing, appending, attending, pages in host memory against the oracles, by format: errors, or what is wrong."""
    found: dict[str, Any] = {}
    for name, dim, size in CHECKED:
        layout = PageLayout(parse_format(name), size, 2, dim)
        sparse = SparseSettings() if layout.fmt.quantized else None
        try:
            errors = self_check(TritonKernels(), layout, 8, dtype, torch.device(device), sparse, 0.0, True)
        except (KernelError, RuntimeError) as error:
            errors = {"error": str(error)}
        found[f"{name} {dim} pages of {size}"] = errors
    return found


def measure_all(seconds: float, save: Callable[[dict[str, Any]], None] = lambda result: None) -> dict[str, Any]:
    """Checks, ceilings and steps; leaves out what no longer fits `seconds`, and says so. `save`s after each section."""
    start = time.perf_counter()
    device = torch.cuda.get_device_properties(0)
    torch.cuda.set_per_process_memory_fraction(min(1.0, CAP_BYTES / device.total_memory))
    settings = SparseSettings()
    llama, qwen = SHAPES["llama-3.1-8b"], SHAPES["qwen2.5-7b"]
    result: dict[str, Any] = {
        "card": device.name,
        "capability": f"{device.major}.{device.minor}",
        "memory_cap_gb": CAP_BYTES / 1e9,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "self_check": checks(DEVICE),
    }
    save(result)
    result["checks"] = {
        f"{shape.name} {tokens}": correctness(DEVICE, shape, 4000, tokens, SMALL)
        for shape in (llama, qwen)
        for tokens in (1, 200)
    }
    save(result)
    result["graph_matches"] = graph_matches(settings)
    result["paged_graph_matches"] = all(graph_matches(settings, slots) for slots in (3, 256))
    result["no_xformers"] = {shape.name: no_xformers(shape) for shape in (llama, qwen)}
    save(result)
    print(json.dumps(result), file=sys.stderr, flush=True)
    wrong = [name for name, check in result["checks"].items() if max(check["dense"], check["sparse"]) > WRONG]
    wrong += [name for name, errors in result["self_check"].items() if "error" in errors]
    if wrong or not (result["graph_matches"] and result["paged_graph_matches"]):
        raise SystemExit(f"the kernels are wrong on this card ({wrong or 'replayed graph'}): nothing was timed")
    result["ceilings"] = ceilings()
    save(result)
    result["pinned_pages"] = paged_row(llama, CONTEXTS[2], settings)
    torch.cuda.empty_cache()
    result["steps"], result["left_out"] = [], []
    steps = [(shape, context, n) for context in CONTEXTS[:3] for shape in (llama, qwen) for n in (1, CHUNK)]
    for shape, context, query_len in [*steps, (llama, CONTEXTS[3], 1)]:
        if time.perf_counter() - start > seconds:
            result["left_out"].append([shape.name, context, query_len])
        else:
            result["steps"].append(step_row(shape, context, query_len, settings))
        save(result)
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compile for sm_80, 86, 89, 90 and print the table")
    parser.add_argument("--wide", action="store_true", help="with --compile: other head sizes and formats too")
    parser.add_argument("--all", action="store_true", help="check and time everything on this machine's GPU")
    parser.add_argument("--seconds", type=float, default=400.0, help="start no new step after so long")
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args(argv)
    if args.compile == args.all:
        parser.error("use either --compile or --all")
    if args.all and not torch.cuda.is_available():
        print("benchmarks.gpu --all: torch finds no CUDA device on this machine, so nothing was measured. "
              "--compile needs none.", file=sys.stderr)  # fmt: skip
        return 1

    def save(result: Any) -> None:
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")

    result: Any = compile_table(args.wide) if args.compile else measure_all(args.seconds, save)
    save(result)
    print(compile_markdown(result) if args.compile else json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
