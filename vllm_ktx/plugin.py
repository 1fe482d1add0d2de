"""What vLLM runs in every process: registers the KTX backend and, for engines that select it, checks the configuration.

Installed but not selected, it changes nothing.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from . import _compat
from .config import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE, KtxConfig

logger = logging.getLogger("vllm.ktx")  # under vLLM's logger: same handlers, same format

_registered = False
# Draft models keep a KV cache of their own and rewrite it in other steps than the ones KTX plans.
_SPECULATIVE_METHODS = ("ngram", "ngram_gpu", "suffix")


def register() -> None:
    """Idempotent. Logs one line and registers nothing if this vLLM is out of range."""
    global _registered
    if _registered:
        return
    _registered = True
    problem = _compat.vllm_version_problem()
    if problem:
        logger.error(problem)
        return
    _compat.register_backend_member()
    _compat.wrap_platform(before_defaults=check_config, after_defaults=apply_defaults)


def check_config(vllm_config: Any) -> None:
    """Raises ValueError, naming setting, value and fix, for an engine configuration that KTX can't serve."""
    cache = vllm_config.cache_config
    config = ktx_config(vllm_config)
    fmt = config.kv_format(cache.cache_dtype)
    if cache.user_specified_block_size and (cache.block_size % 32 or cache.block_size > MAX_PAGE_SIZE):
        raise ValueError(
            f"--block-size {cache.block_size}: KTX needs a multiple of 32 up to {MAX_PAGE_SIZE} (default "
            f"{DEFAULT_PAGE_SIZE})"
        )
    _warn_of_misplaced_settings(vllm_config)
    config.sparse_settings(fmt, cache.block_size if cache.user_specified_block_size else DEFAULT_PAGE_SIZE)
    reasons = unsupported(vllm_config)
    if reasons:
        raise ValueError(f"Attention backend KTX can't serve this model: {'; '.join(reasons)}.")


def unsupported(vllm_config: Any) -> list[str]:
    """Why KTX can't serve this configuration, as far as it shows before the model's layers exist."""
    from vllm.platforms import current_platform

    model, reasons = vllm_config.model_config, []
    if not current_platform.is_cpu():
        reasons.append(
            "KTX doesn't serve on CUDA yet (its GPU kernels have been tested without a GPU only, see docs/gpu.md): "
            "install vLLM's CPU build (KTX_DEVICE=cpu make install), or leave --attention-backend out"
        )
    if model.is_encoder_decoder:
        reasons.append("encoder-decoder models have cross attention, which KTX doesn't page")
    if model.is_hybrid or model.has_inner_state:
        reasons.append("state-space (Mamba) and hybrid models keep a recurrent state beside the KV cache")
    if model.use_mla:
        reasons.append("multi-head latent attention (DeepSeek) is not served yet")
    if vllm_config.kv_transfer_config is not None and vllm_config.kv_transfer_config.is_kv_transfer_instance:
        reasons.append("a KV connector (--kv-transfer-config) would move pages without their open copies: remove it")
    if getattr(model.hf_text_config, "attention_chunk_size", None):
        reasons.append("chunked local attention (Llama 4) attends in chunks that KTX doesn't know")
    if vllm_config.cache_config.kv_cache_dtype_skip_layers:
        reasons.append("--kv-cache-dtype-skip-layers is not served: KTX stores all layers in one format")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in _SPECULATIVE_METHODS:
        reasons.append(
            f"speculative method {speculative.method!r} keeps a draft KV cache: "
            f"use one of {', '.join(_SPECULATIVE_METHODS)}"
        )
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        reasons.append(
            "decode context parallelism splits a sequence's pages over ranks: use --decode-context-parallel-size 1"
        )
    return reasons


def apply_defaults(vllm_config: Any) -> None:
    """KTX's page size where the user gave no block size (after the platform chose its own default)."""
    if not vllm_config.cache_config.user_specified_block_size:
        vllm_config.cache_config.block_size = DEFAULT_PAGE_SIZE


def _warn_of_misplaced_settings(vllm_config: Any) -> None:
    """Settings beside `ktx` instead of under it would be ignored without a word."""
    extra = vllm_config.additional_config
    known = {field.name for field in dataclasses.fields(KtxConfig)}
    stray = sorted(known & set(extra)) if isinstance(extra, dict) else []
    if stray:
        logger.warning(
            'KTX ignores %s in --additional-config: its settings go under "ktx", as in \'{"ktx": {"%s": ...}}\'',
            ", ".join(stray),
            stray[0],
        )


def ktx_config(vllm_config: Any) -> KtxConfig:
    """The engine's KTX settings."""
    extra = vllm_config.additional_config
    return KtxConfig.parse(extra.get("ktx") if isinstance(extra, dict) else None)
