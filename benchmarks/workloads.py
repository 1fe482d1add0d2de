"""What the quality benchmark lets a model read: prompts, documents, haystacks; for real and for constructed models."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import cache, corpus, models, needles, sparsity, tasks
from benchmarks.models import smollm2

QUESTIONS = (
    "What is gravity, and who first described it?",
    "Write a short poem about the sea in autumn.",
    "How do I make an omelette? List the steps.",
    "Explain to a child why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey?",
)
TASKS = ("Summarize this text.", "What is this text about?", "List three facts from this text.")
CHAT_LENGTHS = (150, 300, 500, 800, 1200, 1800)
PLAIN_LENGTHS = (50, 90, 160, 280, 500, 900, 1400, 2000)


@dataclass(frozen=True)
class Workload:
    """Token ids that every engine gets. `scored[i]`: rows of document i's `Scores` that count (None: all)."""

    prompts: list[list[int]]
    new_tokens: int
    stop: list[int]
    documents: list[list[int]]
    scored: list[list[int] | None]

    @property
    def max_model_len(self) -> int:
        return max(max(map(len, self.prompts)) + self.new_tokens, *map(len, self.documents)) + 1


def folder_of(name: str) -> Path:
    """The folder of a model: `smollm2-s32` is SmolLM2 with the key-outlier fold at scale 32."""
    fold = re.fullmatch(r"smollm2-s(\d+)", name)
    if not fold:
        return models.path(name)
    scale = float(fold[1])
    recipe = {"base": smollm2.RECIPE, "key_outliers": scale, "fold": 1}
    return cache.prepared(name, recipe, partial(models.fold_key_outliers, models.path("smollm2"), scale=scale))


def workload(folder: Path, args: argparse.Namespace) -> Workload:
    variant = folder / "variant.json"
    if variant.exists():
        return recall_workload(json.loads(variant.read_text())["vocab"], args)
    from transformers import AutoTokenizer

    return text_workload(AutoTokenizer.from_pretrained(folder), stop_tokens(folder), args)


def stop_tokens(folder: Path) -> list[int]:
    file = folder / "generation_config.json"
    stop = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
    return [] if stop is None else stop if isinstance(stop, list) else [stop]


def recall_workload(vocab: int, args: argparse.Namespace) -> Workload:
    """Needles at all depths to be generated, and documents of records whose answers are scored."""
    count = args.prompts
    lengths = np.geomspace(64, 2000, count).astype(int).tolist()
    size = min(16, args.new_tokens)
    prompts = [
        tasks.needle(length, vocab, depth=i / max(1, count - 1), seed=i, size=size).prompt(0)
        for i, length in enumerate(lengths)
    ]
    documents = [
        tasks.dense_recall(args.context, vocab, queries=args.context // 16, seed=i)
        for i in range(-(-args.tokens // args.context))
    ]
    return Workload(prompts, size, [], [d.ids for d in documents], [d.positions for d in documents])


def text_workload(tokenizer: Any, stop: list[int], args: argparse.Namespace) -> Workload:
    texts = [corpus.text(name) for name in args.text.split(",")]
    count = -(-args.tokens // args.context)
    # One token more than the context: the first is not predicted.
    documents = [passage(tokenizer, texts[i % len(texts)], i / count, args.context + 1) for i in range(count)]
    return Workload(prompts_of(tokenizer, texts)[: args.prompts], args.new_tokens, stop, documents, [None] * count)


def passage(tokenizer: Any, text: str, where: float, tokens: int) -> list[int]:
    """`tokens` tokens of `text` from the line after the fraction `where` of it."""
    start = text.index("\n", int(where * (len(text) - 12 * tokens))) + 1
    ids = tokenizer(text[start : start + 12 * tokens], add_special_tokens=False).input_ids[:tokens]
    if len(ids) < tokens:
        raise SystemExit(
            f"the text has too few tokens for a passage of {tokens}: lower --context or name a longer --text"
        )
    return ids


def prompts_of(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Twenty: short questions and tasks over passages, in chat form, and passages to continue; long and short mixed."""
    passages = [*CHAT_LENGTHS, *PLAIN_LENGTHS]
    parts = [passage(tokenizer, texts[i % len(texts)], (i + 0.5) / len(passages), n) for i, n in enumerate(passages)]
    chats = [
        chat(tokenizer, f"{TASKS[i % len(TASKS)]}\n\n{tokenizer.decode(ids)}")
        for i, ids in enumerate(parts[: len(CHAT_LENGTHS)])
    ]
    groups = [[chat(tokenizer, question) for question in QUESTIONS], chats, parts[len(CHAT_LENGTHS) :]]
    return [group[i] for i in range(len(PLAIN_LENGTHS)) for group in groups if i < len(group)]


def chat(tokenizer: Any, content: str) -> list[int]:
    if not tokenizer.chat_template:
        return tokenizer(content + "\n\n").input_ids
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    return tokenizer(text, add_special_tokens=False).input_ids


def sparse_work(folder: Path, args: argparse.Namespace) -> sparsity.Work:
    """Documents and haystacks of at most `context - 1` tokens, so that the model's whole length can be asked for."""
    most, count = args.context - 1, -(-args.tokens // args.context)
    sizes = [min(size, most) for size in sparsity.lengths(args.context)]
    seeds = range(args.needles)
    variant = folder / "variant.json"
    if variant.exists():
        vocab = json.loads(variant.read_text())["vocab"]
        documents = [tasks.dense_recall(most, vocab, queries=most // 16, seed=i) for i in range(count)]
        found = [hay for size in sizes for seed in seeds for hay in needles.recall_haystacks(size, vocab, seed)]
        return sparsity.Work([d.ids for d in documents], [d.positions for d in documents], found)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [corpus.text(name) for name in args.text.split(",")]
    parts = [passage(tokenizer, texts[i % len(texts)], i / count, most) for i in range(count)]
    filler = [passage(tokenizer, texts[i % len(texts)], (i + 0.5) / args.needles, most) for i in seeds]
    found = [needles.text_haystack(tokenizer, filler[i], size, seed=i) for size in sizes for i in seeds]
    return sparsity.Work(parts, [None] * count, found)
