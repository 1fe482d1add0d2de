"""A model's own queries and keys, after RoPE, for studies of page selection: one forward pass through transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

QK = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Prompt:
    """Token ids, the query rows to look at, and where their answers lie.

    `rows`: int64, ascending. `needles`: for some rows, the position of the token that answers them. `asked`: for each
    question, the rows that predict its answer (the rows before the first of them are the question).
    """

    ids: list[int]
    rows: torch.Tensor
    needles: dict[int, int]
    asked: list[list[int]]


def collect(folder: Path, prompt: Prompt) -> list[QK]:
    """Each layer's queries of `prompt.rows` `[rows, q_heads, D]` and all keys `[tokens, kv_heads, D]`, float32."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layers: list[QK] = []

    def attention(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        layers.append((query[0].transpose(0, 1)[prompt.rows].clone(), key[0].transpose(0, 1).clone()))
        return sdpa_attention_forward(module, query, key, *args, **kwargs)

    AttentionInterface.register("ktx_probe", attention)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="ktx_probe").eval()
    with torch.no_grad():
        model(torch.tensor([prompt.ids]), logits_to_keep=1)
    return layers


def recall_prompt(vocab: int, context: int, questions: int = 50) -> Prompt:
    """Records and questions for a constructed retrieval model."""
    from benchmarks import tasks

    task = tasks.dense_recall(context, vocab, questions)
    ids = torch.tensor(task.ids)
    needles = {}
    for position in task.positions:
        found = (ids[: position - 1][:-1] == ids[position - 1]) & (ids[1 : position - 1] == ids[position])
        needles[position] = int(found.nonzero()[0]) + 2
    return Prompt(task.ids, torch.tensor(task.positions), needles, [])


def text_prompt(folder: Path, text: str, context: int, first_row: int, rows: int, needles: int = 10) -> Prompt:
    """English of at most `context` tokens with keyed facts in it, and all facts asked for and answered at its end.

    Rows: `rows` of them at even distances from `first_row` on, and every row of the questions and answers.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chars = 4 * context
    while True:
        prompt = _ask(tokenizer, text, chars, needles)
        over = len(prompt.ids) - context
        if over <= 0:
            break
        chars -= max(64, 3 * over)
    spread = torch.linspace(min(first_row, len(prompt.ids) - 1), len(prompt.ids) - 1, rows).long()
    return Prompt(prompt.ids, torch.cat((spread, prompt.rows)).unique(), prompt.needles, prompt.asked)


def _ask(tokenizer: Any, text: str, chars: int, needles: int) -> Prompt:
    from benchmarks import tasks

    facts = tasks.text_needles(text, chars, needles, seed=1)
    encoded = tokenizer(facts.context, add_special_tokens=False, return_offsets_mapping=True)
    starts = [begin for begin, _ in encoded.offset_mapping]
    ids, where, asked = list(encoded.input_ids), {}, []
    for question, answer in zip(facts.questions, facts.answers, strict=True):
        statement = question.replace("What is the", "The").replace("?", " is")
        ids += tokenizer(f"\n{question} {statement}", add_special_tokens=False).input_ids
        more = tokenizer(f" {answer}.", add_special_tokens=False).input_ids
        at = facts.context.index(f"is {answer}.") + 2
        first = max(i for i, start in enumerate(starts) if start <= at)
        rows = list(range(len(ids) - 1, len(ids) + len(more) - 2))  # without the row that predicts the full stop
        where |= {row: first + i for i, row in enumerate(rows)}
        asked.append(rows)
        ids += more
    return Prompt(ids, torch.arange(len(encoded.input_ids), len(ids)), where, asked)
