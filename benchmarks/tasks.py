"""Prompts with known answers: associative recall and needles for the constructed model, keyed needles for real ones.

The constructed model (benchmarks.models.retrieval) continues "k1 k2" with what followed those two tokens before. Its
vocabulary of V tokens is split by use: k1 from [0, V/4), k2 from [V/4, 3V/4), values and filler from [3V/4, V), so no
accidental pair of neighbours is a key.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Recall:
    """Token ids whose prediction at positions[i] must be answers[i]; the ids hold the answers too (teacher forcing)."""

    ids: list[int]
    positions: list[int]
    answers: list[int]

    def prompt(self, i: int) -> list[int]:
        """The ids up to query i, for generation: the next token must be answers[i]."""
        return self.ids[: self.positions[i] + 1]


def dense_recall(length: int, vocab: int, queries: int, seed: int = 0) -> Recall:
    """`length` tokens (a few fewer for rounding): records "k1 k2 value filler" with distinct keys, then the queries.

    There are vocab^2 / 8 keys (32768 at vocab 512, which fill 128K tokens); where they run out, records of filler are
    spread between them. The queries ask for records at even spacing over the whole context, in random order.
    """
    rng = np.random.default_rng(seed)
    first, second, value = vocab // 4, vocab // 2, vocab * 3 // 4
    slots = (length - 3 * queries) // 4
    count = min(slots, first * second)
    if count < queries:
        raise ValueError(f"length={length} holds {count} records, fewer than queries={queries}; raise length")
    keys = rng.permutation(first * second)[:count]
    context = rng.integers(value, vocab, (slots, 4))
    where = np.sort(rng.permutation(slots)[:count])
    context[where, 0], context[where, 1] = keys // second, first + keys % second
    asked = where[rng.permutation(np.linspace(0, count - 1, queries).astype(int))]
    tail = context[asked, :3]
    positions = context.size + 3 * np.arange(queries) + 1
    ids = np.concatenate([context.ravel(), tail.ravel()])
    return Recall(ids.tolist(), positions.tolist(), tail[:, 2].tolist())


def needle(length: int, vocab: int, depth: float, seed: int = 0, size: int = 5) -> Recall:
    """`length` tokens of filler with one record "k1 k2 v1 .. v_size" at depth (0 start, 1 end), ending in "k1 k2".

    The model must generate v1 .. v_size: `ids` is the prompt with them appended, `prompt(0)` the prompt alone.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth={depth} must lie between 0 (start of the context) and 1 (end)")
    if length < size + 10:
        raise ValueError(f"length={length} is too short for a needle of size={size}; raise it to {size + 10} or more")
    rng = np.random.default_rng(seed)
    ids = rng.integers(vocab * 3 // 4, vocab, length)
    record = rng.permutation(vocab * 3 // 4)[: size + 2]
    start = int(depth * (length - size - 8))
    ids[start : start + size + 2] = record
    ids[-2:] = record[:2]
    answers = record[2:].tolist()
    return Recall([*ids.tolist(), *answers], list(range(length - 1, length - 1 + size)), answers)


@dataclass(frozen=True)
class TextNeedles:
    """A prompt of English text with keyed facts in it, a question's text for each, and the answers to look for."""

    context: str
    questions: list[str]
    answers: list[str]


WORDS = ("amber", "cobalt", "violet", "copper", "silver", "indigo", "scarlet", "emerald", "ivory", "crimson")


def text_needles(text: str, chars: int, needles: int = 3, seed: int = 0) -> TextNeedles:
    """The first `chars` characters of a text, with `needles` facts at even depths between its lines.

    Facts read "The secret number of the amber box is 48213."; an answer is correct where its number is generated.
    """
    if not 1 <= needles <= len(WORDS):
        raise ValueError(f"needles={needles} must lie between 1 and {len(WORDS)}")
    rng = np.random.default_rng(seed)
    colours = [WORDS[i] for i in rng.permutation(len(WORDS))[:needles]]
    numbers = [str(n) for n in rng.integers(10000, 100000, needles)]
    lines = text[:chars].splitlines()
    for i in reversed(range(needles)):
        at = int((i + 0.5) / needles * len(lines))
        lines.insert(at, f"\nThe secret number of the {colours[i]} box is {numbers[i]}.\n")
    return TextNeedles(
        context="\n".join(lines),
        questions=[f"What is the secret number of the {colour} box?" for colour in colours],
        answers=numbers,
    )
