"""The probe itself: every candidate format serves the same texts through vLLM, and the smallest close enough is chosen.

One engine a format, each in a process of its own, with dense attention and steps of one page: a query then reads codes
where a decode step would. The measure is the KL divergence of the next-token distribution from the same engine with
unquantized pages, over the 20 likeliest tokens: no labels, no reference text, and it sees a format that breaks a model
long before a benchmark's score does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from . import engine, store
from .divergence import kl_lower_bound
from .engine import Engine, Scores
from .outliers import Outliers
from .texts import ANSWER, Texts, make_texts

CANDIDATES = ("k4v4", "k8v4", "k8v8")  # from the smallest


@dataclass(frozen=True)
class Settings:
    """What to measure. `bound`: see `Decision`. `dtype`: vLLM's; in bf16 rounding alone costs about 1e-3 nats."""

    model: str
    bound: float = store.DEFAULT_BOUND
    tokens: int = 2048
    page_size: int = 64
    dtype: str = "float32"
    cache_gib: float = 1.0
    formats: tuple[str, ...] = CANDIDATES


@dataclass(frozen=True)
class Reading:
    """What one engine made of the texts. `replies`: of the chats; `written`: continuations of the free starts."""

    scores: list[Scores]
    replies: list[list[int]]
    written: list[list[int]]
    bytes_per_token: float
    layers: list[dict[str, float]] = field(default_factory=list)


def read(llm: Any, texts: Texts, page_size: int, base: Reading | None) -> Reading:
    """Runs inside the engine's process. `base`: the unquantized engine's reading; None: this is that engine."""
    outliers, replies, written = Outliers(page_size), [], []
    if base is None:
        replies = engine.generate(llm, texts.chats, ANSWER, texts.stop) if texts.chats else []
        written = engine.generate(llm, texts.starts, texts.max_model_len - 2, temperature=1.0) if texts.starts else []
        with outliers.watching():
            scores = [engine.score(llm, ids) for ids in scored_texts(texts, replies, written)]
    else:
        scores = [engine.score(llm, ids) for ids in scored_texts(texts, base.replies, base.written)]
    return Reading(scores, replies, written, _bytes_per_token(llm, page_size, base), outliers.figures())


def scored_texts(texts: Texts, replies: Sequence[list[int]], written: Sequence[list[int]]) -> list[list[int]]:
    chats = [chat + reply for chat, reply in zip(texts.chats, replies, strict=True)]
    return [*texts.documents, *(s + w for s, w in zip(texts.starts, written, strict=True)), *chats]


def _bytes_per_token(llm: Any, page_size: int, base: Reading | None) -> float:
    """Bytes of all layers' pages; unquantized ones as bf16 takes them, whatever dtype they are measured in."""
    config = llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    caches = [layer.kv_cache for layer in layers if getattr(layer, "kv_cache", None) is not None]
    size = sum(cache[0].numel() * cache.element_size() for cache in caches) / page_size
    return size if base else 2 * size / config.model_config.dtype.itemsize


def run(settings: Settings, say: Callable[[str], None]) -> store.Decision:
    """Measures and decides. `say` gets a line of progress. Raises ValueError, naming what is missing, if it can't."""
    folder = store.local_path(settings.model)
    if folder and not (folder / "config.json").is_file():
        raise ValueError(
            f"model {settings.model!r} has no config.json: give the folder of a Hugging Face model (GGUF files are not "
            "probed: set ktx.format for them)"
        )
    digest = store.model_hash(folder) if folder else None
    if folder is None or digest is None:
        raise ValueError(
            f"model {settings.model!r}: its weights are not on this disk; give the model's folder, or download it first"
        )
    texts = make_texts(folder, settings.tokens)
    say(f"texts: {texts.kind}")
    base = _engine(settings, folder, texts, "none", say, None)
    rows = []
    for fmt in settings.formats:
        found = _engine(settings, folder, texts, fmt, say, base)
        row = compare(texts, settings.page_size, base, found)
        rows.append({"format": fmt, **row, "safe": row["worst"] <= settings.bound})
    return decide(settings, str(folder), digest, rows, base, texts)


def decide(
    settings: Settings, model: str, digest: str, rows: list[dict[str, Any]], base: Reading, texts: Texts
) -> store.Decision:
    """The smallest format within the bound; `none` if there is none."""
    within = sorted((row["bytes_per_token"], row["format"]) for row in rows if row["safe"])
    chosen = within[0][1] if within else "none"
    import vllm

    details = {
        "texts": texts.kind,
        "tokens": sum(len(s.nll) for s in base.scores),
        "dtype": settings.dtype,
        "bytes_per_token_none": base.bytes_per_token,
        "vllm": vllm.__version__,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return store.Decision(model, digest, chosen, settings.bound, settings.page_size, rows, base.layers, details)


def compare(texts: Texts, page_size: int, base: Reading, found: Reading) -> dict[str, Any]:
    """Mean KL by kind of text, the worst of them, and how often the likeliest token is the same."""
    plain = len(base.scores) - len(texts.chats)
    # The first page is never read from codes; of a chat, the reply counts.
    first = [page_size] * plain + [len(chat) - 1 for chat in texts.chats]
    kl = [kl_lower_bound(p, q)[at:] for p, q, at in zip(base.scores, found.scores, first, strict=True)]
    same = [p.best[at:] == q.best[at:] for p, q, at in zip(base.scores, found.scores, first, strict=True)]
    parts = {"text": kl[:plain], "chat": kl[plain:]}
    means = {name: float(np.concatenate(part).mean()) for name, part in parts.items() if any(map(len, part))}
    if not means:
        raise ValueError(f"the texts are no longer than one page of {page_size} tokens: raise --tokens")
    return {
        "bytes_per_token": found.bytes_per_token,
        "kl": means,
        "worst": max(means.values()),
        "kl_99": float(np.quantile(np.concatenate(kl), 0.99)),
        "agreement": float(np.concatenate(same).mean()),
    }


def _engine(
    settings: Settings, folder: Path, texts: Texts, fmt: str, say: Callable[[str], None], base: Reading | None
) -> Reading:
    say(f"{fmt} ...")
    setup = Engine(
        str(folder),
        texts.max_model_len,
        {"format": fmt, **({} if fmt == "none" else {"attention": "dense"})},
        chunk=settings.page_size,
        cache_bytes=int(settings.cache_gib * 2**30),
        options={"dtype": settings.dtype, "block_size": settings.page_size},
    )
    ran = engine.run(setup, read, texts, settings.page_size, base)
    say(f"{fmt}: {ran.seconds:.0f} s")
    return ran.value
