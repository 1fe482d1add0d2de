"""Which page format an engine serves: what the settings say, or, for `auto`, what the probe decided for this model.

Decided once, before the cache is laid out, in the process that makes the configuration; workers get the result.
"""

from __future__ import annotations

import logging
from typing import Any

from .config import OF_FORMAT, SAFE_FORMAT, KtxConfig
from .probe import store
from .probe.store import S_TOK_BOUND, Decision

logger = logging.getLogger("vllm.ktx")


def choose_format(vllm_config: Any, config: KtxConfig, page_size: int) -> KtxConfig:
    """`config` with `auto` replaced by a format, and the log line that says why; warns of a choice that is known to be
    bad."""
    model, cache_dtype = vllm_config.model_config, vllm_config.cache_config.cache_dtype
    fmt = config.kv_format(cache_dtype)
    if not fmt.quantized:
        return config
    decision, missing = store.find(model.model, model.revision, vllm_config.load_config.download_dir)
    if config.is_auto(cache_dtype):
        name, why = automatic(config, decision, missing, page_size)
        logger.info("KTX: format %s (auto): %s", name, why)
        return config.with_default_format(name)
    for text in doubts(config, fmt, decision):
        logger.warning("KTX: %s", text)
    return config


def automatic(config: KtxConfig, decision: Decision | None, missing: str, page_size: int) -> tuple[str, str]:
    """The format for `auto`, and why."""
    changed = [name for name in OF_FORMAT if getattr(config, name) is not None]
    safe = f"{SAFE_FORMAT} is safe for every model measured"
    if decision is None:
        return SAFE_FORMAT, f"{missing}, and {safe}"
    if changed:
        return SAFE_FORMAT, f"the stored probe knows nothing of ktx.{changed[0]}; {safe}"
    if page_size > decision.page_size:
        text = f"the stored probe measured pages of {decision.page_size} tokens, not {page_size} (--block-size); {safe}"
        return SAFE_FORMAT, text
    row = decision.row(decision.format)
    if row is None:
        return decision.format, f"no quantized format stayed within {decision.bound:g} nats in the stored probe"
    return decision.format, f"smallest within {decision.bound:g} nats in the stored probe: KL {row['worst']:.1e}"


def doubts(config: KtxConfig, fmt: Any, decision: Decision | None) -> list[str]:
    """What speaks against an explicit choice."""
    found = []
    row = decision.row(fmt.name) if decision else None
    if decision and row and not row["safe"]:
        found.append(
            f"ktx.format={fmt.name!r} is UNSAFE for this model: the stored probe measured a KL divergence of "
            f"{row['worst']:.1e} nats, over its bound {decision.bound:g}. Use ktx.format='auto' (here "
            f"{decision.format!r}), or run `vllm-ktx probe` with another --bound."
        )
    if fmt.k_bits == 4 and not fmt.k_method.startswith("per_channel"):
        if decision is None:
            found.append(
                f"ktx.key_scale={fmt.k_method!r} with INT4 keys ruins models with key outliers (Qwen2.5: perplexity "
                "x2), and this one has not been screened. Run `vllm-ktx probe` first, or use 'per_channel'."
            )
        elif decision.s_tok > S_TOK_BOUND:
            found.append(
                f"ktx.key_scale={fmt.k_method!r} with INT4 keys is UNSAFE for this model: it has key outliers "
                f"(s_tok {decision.s_tok:.1f} in the worst layer, over {S_TOK_BOUND}). Use 'per_channel'."
            )
    return found
