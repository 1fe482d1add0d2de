"""What the probe lets a model read: Python's own reference, as text and as questions in chat form.

`pydoc_data.topics` is English that every CPython ships. A model without a tokenizer reads what it generates itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TASKS = ("Summarize this text.", "What is this text about?", "List three facts from this text.", "Explain this text.")
ANSWER = 128  # tokens of a chat's reply, which the unquantized model writes
FREE = 4  # texts that a model without a tokenizer writes


@dataclass(frozen=True)
class Texts:
    """Token ids. `documents` are scored whole; of `chats` the reply is. `starts`: to be continued freely instead."""

    documents: list[list[int]]
    chats: list[list[int]]
    starts: list[list[int]]
    stop: list[int]
    max_model_len: int
    kind: str


def make_texts(folder: Path, tokens: int) -> Texts:
    """`tokens` tokens of text and half as many of chat prompts, less where the model's own context is shorter."""
    config = _text_config(folder)
    longest = min(tokens, int(config.get("max_position_embeddings") or tokens) - 1)
    tokenizer, words = _tokenizer(folder), _topics()
    document = _encode(tokenizer, words, 0.3, longest) if tokenizer else []
    if len(set(document)) < 16:  # no tokenizer, or one that doesn't know English
        vocab, size = int(config["vocab_size"]), longest // FREE
        starts = [[(7919 * (i + 1)) % vocab] for i in range(FREE)]
        return Texts([], [], starts, [], size + 1, "written by the model itself: it has no tokenizer for English")
    chats = []
    if getattr(tokenizer, "chat_template", None):
        room = max(16, min(longest - ANSWER - 200, tokens // 8))
        for i, task in enumerate(TASKS):
            passage = tokenizer.decode(_encode(tokenizer, words, (i + 0.5) / 8 + 0.4, room))
            message = [{"role": "user", "content": f"{task}\n\n{passage}"}]
            text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            chats.append(tokenizer(text, add_special_tokens=False).input_ids)
    needed = max(len(document), *(len(chat) + ANSWER for chat in chats)) if chats else len(document)
    kind = "pydoc_data.topics" + (", and chats about it" if chats else " (no chat template)")
    return Texts([document], chats, [], _stop_tokens(folder), needed + 1, kind)


def _topics() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[key] for key in sorted(topics))


def _encode(tokenizer: Any, text: str, where: float, tokens: int) -> list[int]:
    start = text.index("\n", int(where * (len(text) - 12 * tokens))) + 1
    return tokenizer(text[start : start + 12 * tokens], add_special_tokens=False).input_ids[:tokens]


def _tokenizer(folder: Path) -> Any:
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _text_config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return config.get("text_config") or config


def _stop_tokens(folder: Path) -> list[int]:
    file = folder / "generation_config.json"
    stop = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
    return [] if stop is None else stop if isinstance(stop, list) else [stop]
