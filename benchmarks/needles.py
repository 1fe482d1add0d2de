"""Needles over depth x length: how sure a model is of an answer that stands once in a long prompt, and its heat map.

A haystack is English text with five facts, one at each depth ("The door code of the old library is 48213."), and five
questions behind it, each with its answer. One pass gives the likelihood of every answer, in nats summed over its
tokens; greedy decoding from each question, on the pages that the pass left in the prefix cache, says whether the model
gives it. On the constructed retrieval models a haystack is filler with one record, and five of them make the depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import engine, tasks

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SUBJECTS = (
    "secret number of the amber box",
    "door code of the old library",
    "telephone number of the village baker",
    "serial number of the steam engine",
    "postal code of the northern harbour",
)
FACT = "The {subject} is"
QUESTION = "\n\nQuestion: What is the {subject}?\nAnswer: " + FACT


@dataclass(frozen=True)
class Haystack:
    """`ids[start:end]` for the i-th `(start, end)` of `spans` is the answer to the needle at `depths[i]`."""

    length: int
    ids: list[int]
    depths: list[float]
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class Answers:
    """Of one haystack, by span: negative log-likelihood in nats, and whether greedy decoding gives the answer."""

    nats: list[float]
    right: list[bool]


def text_haystack(tokenizer: Any, filler: Sequence[int], length: int, seed: int) -> Haystack:
    """`length` tokens in all, of `filler` (at least as many) with the facts between; questions in random order."""

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    rng = np.random.default_rng(seed)
    subjects = [SUBJECTS[i] for i in rng.permutation(len(DEPTHS))]
    answers = [encode(f" {number}") for number in rng.integers(10000, 100000, len(DEPTHS))]
    facts = [
        encode("\n\n" + FACT.format(subject=subject)) + answer + encode(".\n\n")
        for subject, answer in zip(subjects, answers, strict=True)
    ]
    order = rng.permutation(len(DEPTHS)).tolist()
    questions = [(encode(QUESTION.format(subject=subjects[i])), answers[i]) for i in order]
    room = length - sum(map(len, facts)) - sum(len(q) + len(a) for q, a in questions)
    if room < len(DEPTHS):
        raise SystemExit(f"a haystack of {length} tokens has no room for {len(DEPTHS)} needles: use longer ones")
    ids: list[int] = []
    cuts = [0, *(round(depth * room) for depth in DEPTHS), room]
    for i, fact in enumerate(facts):
        ids += [*filler[cuts[i] : cuts[i + 1]], *fact]
    ids += filler[cuts[-2] : cuts[-1]]
    spans = []
    for question, answer in questions:
        ids += question
        spans.append((len(ids), len(ids) + len(answer)))
        ids += answer
    return Haystack(length, ids, [DEPTHS[i] for i in order], spans)


def recall_haystacks(length: int, vocab: int, seed: int) -> list[Haystack]:
    """For the constructed models: one needle a haystack."""
    size = 5
    found = [tasks.needle(length - size, vocab, depth, seed=len(DEPTHS) * seed + i) for i, depth in enumerate(DEPTHS)]
    return [Haystack(length, n.ids, [depth], [(length - size, length)]) for n, depth in zip(found, DEPTHS, strict=True)]


def answer(llm: Any, haystacks: Sequence[Haystack]) -> list[Answers]:
    """Runs inside the engine's process. The engine needs prefix caching, or decoding reads each haystack five times."""
    return [_answer(llm, haystack) for haystack in haystacks]


def _answer(llm: Any, haystack: Haystack) -> Answers:
    nll = engine.score(llm, haystack.ids).nll
    ids, spans = haystack.ids, haystack.spans
    longest = max(end - start for start, end in spans)
    generated = engine.generate(llm, [ids[:start] for start, _ in spans], longest)
    return Answers(
        [float(nll[start - 1 : end - 1].sum()) for start, end in spans],
        [got[: end - start] == ids[start:end] for got, (start, end) in zip(generated, spans, strict=True)],
    )


def cells(
    haystacks: Sequence[Haystack], answers: Sequence[Answers]
) -> dict[tuple[int, float], list[tuple[float, bool]]]:
    """(length, depth) -> nats and rightness of its needles, in the haystacks' order."""
    found: dict[tuple[int, float], list[tuple[float, bool]]] = {}
    for haystack, got in zip(haystacks, answers, strict=True):
        for depth, nats, right in zip(haystack.depths, got.nats, got.right, strict=True):
            found.setdefault((haystack.length, depth), []).append((nats, right))
    return found


def figures(haystacks: Sequence[Haystack], answers: Sequence[Answers]) -> dict[str, Any]:
    """Means: `nats`, `accuracy` `[depths][lengths]`, and of all needles."""
    by_cell = cells(haystacks, answers)
    lengths = sorted({length for length, _ in by_cell})
    table = [[np.array(by_cell[length, depth], float).mean(0) for length in lengths] for depth in DEPTHS]
    every = np.array([pair for cell in by_cell.values() for pair in cell], float)
    return {
        "lengths": lengths,
        "depths": list(DEPTHS),
        "needles_per_cell": len(by_cell[lengths[0], DEPTHS[0]]),
        "nats": [[round(float(cell[0]), 4) for cell in row] for row in table],
        "accuracy": [[float(cell[1]) for cell in row] for row in table],
        "mean_nats": float(every[:, 0].mean()),
        "mean_accuracy": float(every[:, 1].mean()),
    }


def difference(
    haystacks: Sequence[Haystack],
    answers: Sequence[Answers],
    base: Sequence[Answers],
    beyond: int,
    known: Sequence[Answers] | None = None,
) -> dict[str, Any]:
    """Nats lost against `base` (paired; positive: less sure) on haystacks longer than `beyond` tokens.

    `known`: whose right answers make up `answerable`, the needles that the model finds at all; None: those of `base`.

    `worst_cell`: the largest mean of one (length, depth) pair. `flipped`: answers that only `base` gave, and that it
    didn't give.
    """
    ours, theirs = cells(haystacks, answers), cells(haystacks, base)
    lost = {
        cell: np.array([a[0] - b[0] for a, b in zip(found, theirs[cell], strict=True)])
        for cell, found in ours.items()
        if cell[0] > beyond
    }
    if not lost:
        return {}
    every = np.concatenate(list(lost.values()))
    worst = max(lost, key=lambda cell: lost[cell].mean())
    pairs = [(a[1], b[1]) for cell in lost for a, b in zip(ours[cell], theirs[cell], strict=True)]
    right = cells(haystacks, base if known is None else known)
    answerable = every[[good for cell in lost for _, good in right[cell]]]
    return {
        **mean_of(every, "nats"),
        "answerable": {**mean_of(answerable, "nats"), "needles": len(answerable)},
        "nats_by_length": {
            length: float(np.concatenate([x for cell, x in lost.items() if cell[0] == length]).mean())
            for length in sorted({length for length, _ in lost})
        },
        "worst_cell": {"length": worst[0], "depth": worst[1], "nats": float(lost[worst].mean())},
        "worst_needle": float(every.max()),
        "flipped": [sum(b and not a for a, b in pairs), sum(a and not b for a, b in pairs)],
        "needles": len(every),
    }


def mean_of(values: np.ndarray, name: str) -> dict[str, float]:
    """Mean and standard error of a sample; 0 where it is too small for one."""
    count = len(values)
    stderr = float(values.std(ddof=1) / np.sqrt(count)) if count > 1 else 0.0
    return {name: float(values.mean()) if count else 0.0, f"{name}_stderr": stderr}


def heat_map(panels: dict[str, dict[str, Any]], file: Path) -> None:
    """PNG: one panel of nats for each of `figures`' results, cells marked with how many needles were answered."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    high = max(max(map(max, found["nats"])) for found in panels.values())
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.2 * len(panels), 3.4), layout="constrained", squeeze=False
    )
    image = None
    for axis, (title, found) in zip(axes[0], panels.items(), strict=True):
        image = axis.imshow(found["nats"], cmap="viridis_r", vmin=0, vmax=high, aspect="auto")
        axis.set_title(title, fontsize=10)
        axis.set_xticks(range(len(found["lengths"])), [f"{round(length / 1024, 1):g}K" for length in found["lengths"]])
        axis.set_yticks(range(len(DEPTHS)), [f"{100 * depth:.0f} %" for depth in DEPTHS])
        axis.set_xlabel("prompt, tokens")
        for y, row in enumerate(found["nats"]):
            for x, nats in enumerate(row):
                right = round(found["accuracy"][y][x] * found["needles_per_cell"])
                text = f"{nats:.2f}\n{right}/{found['needles_per_cell']}"
                axis.text(
                    x, y, text, ha="center", va="center", fontsize=8, color="white" if nats > high / 2 else "black"
                )
    axes[0][0].set_ylabel("depth of the needle")
    figure.colorbar(image, ax=axes, label="-ln p(answer), nats")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
