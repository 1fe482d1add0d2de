"""Writes the measured tables of README.md and docs/tiers.md from the JSON files in benchmarks/results, and nothing that
is not in them.

python -m benchmarks.tables            rewrites the texts between their `measured` markers
python -m benchmarks.tables --check    fails if a text says something else than the results (a test runs this)
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
START, END = (
    "<!-- measured: written by `python -m benchmarks.tables`, from benchmarks/results -->",
    "<!-- end measured -->",
)

EAGER = "both with `enforce_eager`"
DISK_TARGET = 0.8  # of fio's throughput


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a text is out of date")
    args = parser.parse_args()
    old = {path: path.read_text() for path in documents()}
    new = {path: insert(old[path], tables) for path, tables in documents().items()}
    for path in [path for path in new if new[path] != old[path]]:
        if args.check:
            print(f"{path.relative_to(ROOT)} is out of date: run python -m benchmarks.tables")
        else:
            path.write_text(new[path])
    return int(args.check and new != old)


def documents() -> dict[Path, str]:
    """What stands between the markers of each text."""
    readme = [end_to_end(), small_device(), pools(), contexts(), kernels(), quality(), selection()]
    return {ROOT / "README.md": "\n\n".join(part for part in readme if part), ROOT / "docs" / "tiers.md": disk()}


def insert(text: str, tables: str) -> str:
    """`text` with what stands between the markers replaced. Raises ValueError if they are missing."""
    before, _, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the text has no markers {START!r} and {END!r}")
    return f"{before}{START}\n\n{tables}\n\n{END}{after}"


def load(pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(pattern))]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def end_to_end() -> str:
    """One request through `vllm.LLM`, against stock vLLM in the same run."""
    documents = [d for d in load("retrieval-*.json") if "stock" in d]
    rows = []
    for d in documents:
        stock = d["stock"]
        rows.append(
            [
                f"{d['context']:,} tokens, `{d['format']}`",
                f"{d['accuracy']:.0%} of {d['needles']} (stock {stock['accuracy']:.0%})",
                f"{d['ttft_s']:.1f} s against {stock['ttft_s']:.1f} s: **{d['ratio_ttft']:.1f}x**",
                f"{d['decode_tok_s']:.0f} against {stock['decode_tok_s']:.1f} tokens/s: **{d['ratio_decode']:.1f}x**",
                f"{d['device_bytes'] / 2**20:.0f} of {d['kv_bytes_bf16'] / 2**20:.0f} MiB",
            ]
        )
    if not rows:
        return ""
    head = ["retrieval model", "needles found", "time to first token", "decode", "KV bytes, of bf16"]
    note = f"Against stock vLLM in the same run, {documents[0]['threads']} threads; {EAGER}. {source(*documents)}"
    return f"**One long request, end to end**\n\n{table(head, rows)}\n\n{note}"


def small_device() -> str:
    """One request whose keys and values exceed the device, against an engine that has the room."""
    documents = [d for d in load("retrieval-*.json") if "resident" in d]
    rows = []
    for d in documents:
        whole, tiers = d["resident"], "on disk" if "disk_dir" in d["ktx"] else "in host memory"
        rows.append(
            [
                f"{d['context']:,} tokens, `{d['format']}`, the rest {tiers}",
                f"{d['device_bytes'] / 2**20:.1f} MiB, {d['device_bytes'] / d['kv_bytes_bf16']:.1%} of bf16",
                f"{d['accuracy']:.0%} of {d['needles']}, {'the same' if d['same_tokens'] else 'OTHER'} tokens",
                f"{d['ttft_s']:.1f} against {whole['ttft_s']:.1f} s",
                f"{d['decode_tok_s']:.0f} against {whole['decode_tok_s']:.0f} tokens/s",
            ]
        )
    if not rows:
        return ""
    head = ["retrieval model", "device memory", "needles found", "time to first token", "decode"]
    refused = f"Stock vLLM with that memory: *{documents[0]['stock_with_this_memory'].split('. ')[0]}*."
    note = (
        "Against KTX with everything on the device, in the same run; each run had the machine to another degree (load "
        f"average), so compare within a row; {EAGER}. {refused} {source(*documents)}"
    )
    return f"**Larger than the device**\n\n{table(head, rows)}\n\n{note}"


def pools() -> str:
    """What a hot pool of one, two, three steps' pages costs in steady decoding."""
    rows, documents = [], load("tiers-steady*.json")
    for d in documents:
        where = "disk" if "disk_dir" in d["tiers"] else "host memory"
        for name, row in d["pools"].items():
            if row["slots"] is None:
                continue
            rows.append(
                [
                    f"{name} a step's {d['budget_pages']:.0f} pages: {row['slots']} of {d['blocks']} ({where})",
                    f"{row['hit_rate']:.1%}",
                    f"{row['stall_share']:.1%}",
                    f"{row['cpu_ms_ratio']:.2f}x CPU, {row['wall_ms_ratio']:.2f}x wall",
                    "yes" if row["same_tokens"] else "NO",
                ]
            )
    if not rows:
        return ""
    first = documents[0]
    head = ["hot pool, SmolLM2", "hits", "time stalled", "time a token, of resident", "same text"]
    note = (
        f"Decoding behind {first['tokens']:,} tokens of English; settings: {settings(first['ktx'])}, beside them "
        f"{' and '.join(settings(d['tiers']) for d in documents)}. {source(*documents)}"
    )
    return f"**The hot pool**\n\n{table(head, rows)}\n\n{note}"


def contexts() -> str:
    """Several long requests at once, and a million tokens."""
    lines = []
    for d in load("tiers-concurrent.json"):

        def of(name: str, d: dict[str, Any] = d) -> str:
            return f"{d[name]['seconds']:.0f} s, {d[name]['preemptions']:.0f} preemptions, {d[name]['right']} right"

        lines.append(
            f"- {d['requests']} requests of {d['tokens']:,} tokens at once on {d['device_bytes'] / 2**20:.0f} MiB, "
            f"which hold one in bf16: {of('ktx')}; stock {of('stock')} (**{d['ratio_seconds']:.1f}x**); {EAGER}. "
            f"{source(d)}"
        )
    for d in load("tiers-million.json"):
        early, dense, device = d["early_turn"], d["kv_bytes_bf16"] / 1e9, d["device_bytes"] / 1e6
        lines.append(
            f"- {d['tokens']:,} tokens of a synthetic model ({dense:.1f} GB of bf16 keys and values) on a device of "
            f"{device:.0f} MB: read in {d['ttft_s']:.0f} s, then {d['decode_tok_s']:.0f} tokens/s, peak RSS "
            f"{d['peak_rss_gib']:.1f} GiB. Back at its first half: a prefix hit of {early['from_the_cache']:,} tokens, "
            f"for which {early['fetched_bytes'] / 1e6:.1f} MB were fetched from the tiers, answered in "
            f"{early['seconds']:.1f} s. Settings: {settings(d['ktx'])}. {source(d)}"
        )
    return "**Several contexts at once, and a million tokens**\n\n" + "\n".join(lines) if lines else ""


def kernels() -> str:
    """The attention step alone, against vLLM's CPU op."""
    documents = [row for kind in ("decode", "prefill") for d in load(f"{kind}*.json") for row in d.get("results", [d])]
    rows = []
    for d in sorted(documents, key=lambda d: (d["query_len"], d["context"], d["mode"], d["ms"])):
        what = f"prefill of {d['query_len']}" if d["query_len"] > 1 else "decode"
        how = d["mode"] if d["mode"] == "dense" else f"{d['mode']}, scored by {d['scoring']}"
        ratios = f"**{d['ratio_cpu_time']:.1f}x** CPU time, {d['ratio_wall']:.1f}x wall"
        times = f"{d['ms']:.2f} against {d['baseline_ms']:.2f} ms"
        rows.append([what, f"{d['context'] // 1024}K", f"`{d['format']}`, {how}", d.get("isa", ""), times, ratios])
    if not rows:
        return ""
    head = ["step", "context", "KTX", "ISA", "time", "ratio"]
    first = documents[0]
    note = (
        f"One layer of the {first['shape']} shape, bf16, {first.get('threads', 1)} thread; synthetic keys (see "
        f"benchmarks/harness.py). {source(*documents)}"
    )
    return f"**Attention kernels, against vLLM's CPU op**\n\n{table(head, rows)}\n\n{note}"


def quality() -> str:
    """Perplexity and agreement of each format, dense attention."""
    documents = [d for d in load("quality-smollm2*.json") if d.get("mode") == "dense"]
    documents.sort(key=lambda d: (len(d["model"]), d["model"]))
    rows = []
    for d in documents:
        for r in d.get("rows", [d]):
            change, error = r["ppl_change"], r["ppl_change_stderr"]
            rows.append([d["model"], f"`{r['format']}`", f"{change:+.2%} ± {error:.2%}", f"{r['agreement']:.1%}"])
    if not rows:
        return ""
    head = ["model", "format", "perplexity, against stock", "next-token agreement"]
    note = (
        "float32, chunks of 64 tokens so that nearly all keys are read from codes. `-s8` to `-s128`: the same model "
        "with key outliers folded into its weights (same function), as Qwen models have them. `int4_per_token_head`: "
        f"stock vLLM's own INT4 rule, simulated. {source(*documents)}"
    )
    return f"**Quality of the page formats (SmolLM2-135M)**\n\n{table(head, rows)}\n\n{note}"


def selection() -> str:
    """Which pages the scorers find."""
    documents = load("selection-smollm2.json")
    if not documents:
        return ""
    d = documents[0]
    names = {"variance": "header (mean and deviation)", "cascade": "cascade (default)"}
    rows = []
    for name in ("mean", "quest", "variance", "cascade", "codes"):
        r = d["scorers"][name]
        found = [f"{r[key]:.3f}" for key in ("recall", "needle_recall", "reached")]
        rows.append([names.get(name, name), *found, f"{r['pages']:.0f}"])
    head = ["scorer", "mass found, of the best choice's", "needle pages found", "reached, where 0.95 is asked", "pages"]
    note = f"SmolLM2's own queries and keys at {d['context']:,} tokens, 5 % of the pages. {source(d)}"
    return f"**Page selection**\n\n{table(head, rows)}\n\n{note}"


def disk() -> str:
    """The disk tier against fio."""
    (d,) = load("disk.json")
    rows: list[list[str]] = []
    target: list[str] = []
    for r in d["results"]:
        row = [f"{r['page_bytes'] >> 10} KiB"]
        for side in ("read", "write"):
            ratio = r[f"{side}_mb_s"] / r[f"fio_{side}_mb_s"]
            row += [spread(r, side), spread(r, f"fio_{side}"), f"**{ratio:.2f}**"]
            target += [f"{row[0]} {side}s {'meet' if ratio >= DISK_TARGET else 'miss'} it"]
        rows.append([*row, f"{r['small_read_mb_s']:,.0f}", f"{r['merged_write_mb_s']:,.0f}"])
    head = ["page", "read, random", "fio", "ratio", "write, in order", "fio", "ratio", "read, 64 at a time"]
    note = (
        f"MB/s, medians (least to most) of {d['rounds']} rounds of {d['seconds']:g} s of each, in turns; file of "
        f"{d['file_gib']:g} GiB, depth {d['depth']}, {d['results'][0]['engine']}. The target is {DISK_TARGET} of fio: "
        f"{', '.join(target)}. {source(d)}"
    )
    return f"{table([*head, 'write, merged to 1 MiB'], rows)}\n\n{note}"


def spread(row: dict[str, Any], name: str) -> str:
    median, ends = f"{row[f'{name}_mb_s']:,.0f}", row.get(f"{name}_range")
    return f"{median} ({ends[0]:,.0f} to {ends[1]:,.0f})" if ends else median


def settings(ktx: dict[str, Any]) -> str:
    """What was set, as `additional_config` takes it."""
    return "`" + json.dumps({k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in ktx.items()}) + "`"


def source(*documents: dict[str, Any]) -> str:
    """Hardware, load of the machine at the end of each run (of many: the range), and the commands."""
    unique = [dict.fromkeys(str(d.get(key, "unknown")) for d in documents) for key in ("hardware", "command")]
    loads = [d.get("load_average", "not recorded") for d in documents]
    known = [load for load in loads if load != "not recorded"]
    said = ", ".join(map(str, loads)) if len(known) < 4 else f"{min(known)} to {max(known)}"
    said = said if known else "not recorded"
    return f"{', '.join(unique[0])}, load average {said}; {', '.join(f'`{each}`' for each in unique[1])}."


if __name__ == "__main__":
    sys.exit(main())
