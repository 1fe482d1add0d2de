"""How well each scorer picks pages, on a real model's own queries and keys.

    python -m benchmarks.selection --model smollm2 --context 8192 [--pinning] [--json] [--save]

Every scorer of `attention_backends.selection` ranks the pages between the first page and a window of 1024 tokens, for
decode rows spread over the second part of a long text and for all rows of questions about facts hidden in it. Truth is
the softmax mass of every page by the model's unquantized keys.

    recall      true mass in the chosen pages relative to the oracle's, at the same count: 5 % of the context's pages
                (the mean over those layers, kv heads and rows where the oracle finds 0.1 %; `weighted`: the ratio of
                the sums)
    needle      share of answer rows whose fact's page is chosen, of those for which the oracle chooses it
    claimed     share of a head's mass that a selection with coverage 0.95 (no floor, no cap) claims to read, where
                sinks and window alone don't reach it: the mean over heads, and of the head that decided
    reached     what it truly read
    pages       pages that it selected
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks import corpus, harness, models, probe
from vllm_ktx.attention_backends.selection import SCORERS, CascadeScorer, ContextPages, Scorer, SparseSettings
from vllm_ktx.attention_backends.selection.pages import estimate_mass, rank, shares
from vllm_ktx.attention_backends.sparse_pages import choose
from vllm_ktx.kv_quant import PRESETS, KVCacheQuantizer, PageLayout, parse_format

WINDOW = 1024
BUDGET = 0.05  # of the context's pages
COVERAGE = 0.95
VOTERS = (64, 128)  # rows before an answer whose votes pin pages
LEAST_MASS = 1e-3  # of a head's mass
LEAST_CANDIDATES = 8  # rows with fewer tell nothing


class Sealed(ContextPages):
    """The pages of one layer, sealed; `keys` are the unquantized ones, and headers and codes are decoded only once."""

    @classmethod
    def seal(cls, keys: torch.Tensor, fmt: str, page_size: int) -> Sealed:
        """`keys`: `[tokens, kv_heads, D]`; tokens behind the last whole page are left out."""
        tokens, heads, dim = keys.shape
        count = tokens // page_size
        layout = PageLayout(parse_format(fmt), page_size, heads, dim, dtype_bytes=4)
        pages = keys[: count * page_size].reshape(count, page_size, heads, dim).transpose(1, 2)
        headers, payload = KVCacheQuantizer(layout).seal(pages, torch.zeros_like(pages))
        blocks, none_open = torch.arange(count), torch.full((count,), -1)
        open_pages = torch.zeros(0, 2, heads, page_size, dim)
        sealed = cls(layout, blocks, count * page_size, none_open, headers, payload, open_pages, dtype=torch.float32)
        sealed.__dict__["true_keys"] = pages.contiguous()
        return sealed

    @cached_property
    def _moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        return super().moments(self.blocks)

    @cached_property
    def _two_bit(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, step = super().two_bit_keys(self.blocks)
        return keys, step.expand(len(keys), *step.shape[1:])

    def keys(self, pages: torch.Tensor) -> torch.Tensor:
        return self.__dict__["true_keys"][pages]

    def moments(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._moments[0][pages], self._moments[1][pages]

    def two_bit_keys(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._two_bit[0][pages], self._two_bit[1][pages]


@dataclass
class Rows:
    """Rows of one layer that choose from the same candidates `pages`: positions `at`, queries `q` `[R, H, G, 1, D]`.

    `base` `[R, H, G, 1]`: true log-mass of what is always read; `share`, `rest`: true shares of candidates and of that.
    """

    at: torch.Tensor
    q: torch.Tensor
    base: torch.Tensor
    pages: torch.Tensor
    share: torch.Tensor
    rest: torch.Tensor
    context: Sealed

    @property
    def budget(self) -> int:
        return max(1, round(BUDGET * (int(self.at[0]) // self.context.layout.page_size)))


def rows_of(qk: probe.QK, at: torch.Tensor, fmt: str, page_size: int) -> Iterator[Rows]:
    """Groups of the rows `at` of one layer, by the page where their window begins."""
    q, keys = qk
    context = Sealed.seal(keys, fmt, page_size)
    heads, dim = keys.shape[1:]
    q = (q * dim**-0.5).reshape(len(q), heads, -1, 1, dim)
    last = (at - WINDOW) // page_size
    for end in last.unique().tolist():
        if end - 1 < LEAST_CANDIDATES:
            continue
        mine = last == end
        own = at[mine]
        always = torch.cat((torch.arange(page_size), torch.arange(end * page_size, int(own.max()) + 1)))
        logits = torch.einsum("rhgsd,nhd->rhgsn", q[mine], keys[always])
        hidden = always > own.reshape(-1, 1, 1, 1, 1)
        base = torch.logsumexp(logits.masked_fill(hidden, float("-inf")), -1)
        pages = torch.arange(1, end)
        truth = SCORERS["oracle"]()(q[mine], context, pages, base)
        yield Rows(own, q[mine], base, pages, *shares(truth, base), context)


def captured(order: torch.Tensor, share: torch.Tensor, count: int) -> torch.Tensor:
    """True mass `[R, H]`, summed over the group, of the first `count` pages of `order` `[R, H, n]`."""
    chosen = order[:, :, None, None, :count].expand(*share.shape[:-1], min(count, share.shape[-1]))
    return share.gather(-1, chosen).sum((2, 3, 4))


def holds(order: torch.Tensor, rows: Rows, needles: dict[int, int], count: int) -> torch.Tensor:
    """bool `[R, H]`: the page of the row's answer is among the first `count`; False for rows that ask for nothing."""
    size = rows.context.layout.page_size
    page = torch.tensor([needles.get(row, -1) // size for row in rows.at.tolist()])
    return (rows.pages[order[:, :, :count]] == page.reshape(-1, 1, 1)).any(-1)


def figures(rows: Rows, scorer: Scorer, needles: dict[int, int]) -> dict[str, torch.Tensor]:
    """Figures of one scorer for each row and kv head, flat."""
    log_mass = scorer(rows.q, rows.context, rows.pages, rows.base)
    share, rest = shares(log_mass, rows.base)
    budget = rows.budget
    best = rank(rows.share)
    settings = SparseSettings(window=WINDOW, coverage=COVERAGE, min_pages=1, max_pages=1 << 20)
    order, count, claimed = choose(share, rest, settings, rows.context.num_pages)
    ranked = rows.share.gather(-1, order[:, :, None, None].expand_as(share))
    reached = torch.cat((rows.rest.unsqueeze(-1), ranked), -1).cumsum(-1).mean(3)
    index = count[:, :, None, None].expand(-1, -1, claimed.shape[2], 1)
    needed = claimed[..., 0].amin(-1) < COVERAGE
    claim, reach = claimed.gather(-1, index)[..., 0], reached.gather(-1, index)[..., 0]
    decides = claim.argmin(-1, keepdim=True)
    found = {
        "mass": captured(order, rows.share, budget),
        "best": captured(best, rows.share, budget),
        "needle": holds(order, rows, needles, budget) & holds(best, rows, needles, budget),
        "needle_best": holds(best, rows, needles, budget),
        "group": torch.full(count.shape, share.shape[2]),
        "needed": needed,
        "pages": count,
        "claimed": claim.mean(-1),
        "reached": reach.mean(-1),
        "claimed_head": claim.gather(-1, decides)[..., 0],
        "reached_head": reach.gather(-1, decides)[..., 0],
        "depth": _depth(rows, scorer, count),
    }
    return {name: value.reshape(-1).double() for name, value in found.items()}


def _depth(rows: Rows, scorer: Scorer, like: torch.Tensor) -> torch.Tensor:
    """Share of the candidates whose codes are read."""
    if not isinstance(scorer, CascadeScorer):
        return torch.full(like.shape, float(scorer == SCORERS["codes"]()))
    layout, moments = rows.context.layout, rows.context.moments(rows.pages)
    return scorer.depth(*estimate_mass(rows.q, *moments, layout.page_size)[1:])


def summary(parts: list[dict[str, torch.Tensor]]) -> dict[str, float | None]:
    """Means over everything; None where there was nothing to measure."""
    all_of = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    needed = all_of["needed"].bool()
    kept = ("claimed", "reached", "claimed_head", "reached_head", "pages")
    needles = all_of["needle_best"].sum()
    result = {
        "recall": (all_of["mass"] / all_of["best"])[all_of["best"] > LEAST_MASS * all_of["group"]].mean(),
        "recall_weighted": all_of["mass"].sum() / all_of["best"].sum(),
        "needle_recall": all_of["needle"].sum() / needles if needles else torch.tensor(float("nan")),
        **{name: all_of[name][needed].mean() for name in kept},
        "reached_all_rows": all_of["reached"].mean(),
        "codes_read": all_of["depth"].mean(),
        "codes_read_median": all_of["depth"].median(),
    }
    return {name: None if value.isnan() else round(float(value), 4) for name, value in result.items()}


# --- pinning ----------------------------------------------------------------------------------------------------------


def pinning(layers: list[probe.QK], prompt: probe.Prompt, fmt: str, page_size: int) -> list[dict[str, Any]]:
    """Whether votes of the rows before an answer help to choose pages for the answer's rows, with the default scorer.

    At the same number of pages, `pinned` of them those with the most votes (shares summed over voters and group).
    """
    totals: dict[tuple[int, int], list[torch.Tensor]] = {}
    for qk in layers:
        for answer in prompt.asked:
            for voters in VOTERS:
                _pin_one(qk, prompt, answer, voters, fmt, page_size, totals)
    result = []
    for (voters, pinned), parts in sorted(totals.items()):
        mass, best, needle, possible = torch.stack(parts).sum(0).tolist()
        result.append(
            {
                "voters": voters,
                "pinned": pinned,
                "recall_weighted": mass / best,
                "needle_recall": needle / max(1, possible),
            }
        )
    return result


def _pin_one(
    qk: probe.QK,
    prompt: probe.Prompt,
    answer: list[int],
    voters: int,
    fmt: str,
    page_size: int,
    totals: dict[tuple[int, int], list[torch.Tensor]],
) -> None:
    wanted = (prompt.rows > answer[0] - voters) & (prompt.rows <= answer[-1])
    groups = list(rows_of((qk[0][wanted], qk[1]), prompt.rows[wanted], fmt, page_size))
    pages = min(len(group.pages) for group in groups)
    votes = torch.zeros(qk[1].shape[1], pages)
    share = []
    for group in groups:
        log_mass = SCORERS["cascade"]()(group.q, group.context, group.pages, group.base)
        share.append(shares(log_mass, group.base)[0][..., :pages])
        votes += share[-1][group.at < answer[0]].sum((0, 2, 3))
    for group, estimate in zip(groups, share, strict=True):
        mine = group.at >= answer[0]
        if not mine.any():
            continue
        truth, budget = group.share[mine][..., :pages], group.budget
        best, found = rank(truth), holds(rank(truth), group_of(group, mine), prompt.needles, budget)
        for pinned in (0, budget // 3, budget // 2):
            boost = torch.zeros_like(votes).scatter_(-1, votes.topk(pinned, -1).indices, 1e3)
            order = rank(estimate[mine] + boost[:, None, None])
            hit = holds(order, group_of(group, mine), prompt.needles, budget) & found
            parts = [captured(order, truth, budget).sum(), captured(best, truth, budget).sum(), hit.sum(), found.sum()]
            totals.setdefault((voters, pinned), []).append(torch.stack([part.double() for part in parts]))


def group_of(rows: Rows, mine: torch.Tensor) -> Rows:
    """The rows `mine` of a group."""
    parts = (each[mine] for each in (rows.at, rows.q, rows.base))
    at, q, base = parts
    return Rows(at, q, base, rows.pages, rows.share[mine], rows.rest[mine], rows.context)


# --- command line -----------------------------------------------------------------------------------------------------


def make_prompt(folder: Path, args: argparse.Namespace) -> probe.Prompt:
    variant = folder / "variant.json"
    if variant.exists():
        return probe.recall_prompt(json.loads(variant.read_text())["vocab"], args.context)
    return probe.text_prompt(folder, corpus.text(args.text), args.context, args.context // 4, args.rows)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    folder = models.path(args.model)
    prompt = make_prompt(folder, args)
    layers = probe.collect(folder, prompt)
    parts: dict[str, list[dict[str, torch.Tensor]]] = {name: [] for name in SCORERS}
    for qk in layers:
        for rows in rows_of(qk, prompt.rows, args.format, args.page_size):
            for name, scorer in SCORERS.items():
                parts[name].append(figures(rows, scorer(), prompt.needles))
    if not parts["oracle"]:
        raise SystemExit(f"--context {args.context}: too short beside a window of {WINDOW} tokens; use 4096 or more")
    result: dict[str, Any] = {
        "model": args.model,
        "context": len(prompt.ids),
        "rows": len(prompt.rows),
        "format": args.format,
        "page_size": args.page_size,
        "window": WINDOW,
        "budget": BUDGET,
        "coverage": COVERAGE,
        "scorers": {name: summary(each) for name, each in parts.items()},
    }
    if args.pinning and prompt.asked:
        result["pinning"] = pinning(layers, prompt, args.format, args.page_size)
    return result | harness.environment()


def report(result: dict[str, Any]) -> None:
    print(f"{result['model']}, {result['context']} tokens, {result['rows']} rows, {result['format']} pages")
    print(f"{'scorer':>9} {'recall':>7} {'weighted':>8} {'needle':>7} {'claimed':>8} {'reached':>8} {'(head':>7}"
          f" {'reached)':>8} {'pages':>6} {'codes':>6}")  # fmt: skip
    for name, found in result["scorers"].items():
        row = {key: float("nan") if value is None else value for key, value in found.items()}
        print(f"{name:>9} {row['recall']:>7.3f} {row['recall_weighted']:>8.3f} {row['needle_recall']:>7.3f}"
              f" {row['claimed']:>8.3f} {row['reached']:>8.3f} {row['claimed_head']:>7.3f} {row['reached_head']:>8.3f}"
              f" {row['pages']:>6.1f} {row['codes_read']:>6.2f}")  # fmt: skip
    for row in result.get("pinning", ()):
        print(f"pinned {row['pinned']} pages by {row['voters']} rows: recall {row['recall_weighted']:.3f} (weighted), "
              f"needle {row['needle_recall']:.3f}")  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.selection", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help=f"{', '.join(models.NAMES)}, or a model's directory")
    parser.add_argument("--context", type=int, default=8192, help="tokens of the prompt")
    parser.add_argument("--text", default="emma", choices=corpus.NAMES, help="where the English comes from")
    parser.add_argument("--format", default="k4v4", help="page format, a quantized one")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--rows", type=int, default=96, help="rows beside those of questions and answers")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pinning", action="store_true", help="also: do pages voted for by the question help?")
    parser.add_argument("--json", action="store_true", help="the last line of stdout is one JSON object")
    parser.add_argument("--save", action="store_true", help=f"write {harness.RESULTS.name}/selection-MODEL.json")
    args = parser.parse_args(argv)
    if args.format not in PRESETS or not PRESETS[args.format].quantized:
        known = ", ".join(name for name, fmt in PRESETS.items() if fmt.quantized)
        parser.error(f"--format {args.format!r}: use one of {known}, whose pages have headers and codes")
    torch.set_num_threads(args.threads)
    result = measure(args)
    report(result)
    if args.save:
        harness.RESULTS.mkdir(exist_ok=True)
        name = f"selection-{Path(args.model).name}.json"
        (harness.RESULTS / name).write_text(json.dumps(result, indent=2) + "\n")
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
