"""What vLLM runs in every process: registers the KTX backend and, for engines that select it, checks the configuration.

Installed but not selected, it changes nothing.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
from typing import Any

from . import _compat
from .choice import choose_format
from .config import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE, KtxConfig
from .kv_quant import PageLayout

logger = logging.getLogger("vllm.ktx")  # under vLLM's logger: same handlers, same format

_registered = False
MIN_CAPABILITY = 80  # of a CUDA device, as vLLM writes 8.0
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
    _compat.customize_specs_by_layer()
    _compat.wrap_platform(before_defaults=check_config, after_defaults=apply_defaults)


def check_config(vllm_config: Any) -> None:
    """Raises ValueError, naming setting, value and fix, for an engine configuration that KTX can't serve."""
    cache = vllm_config.cache_config
    config = ktx_config(vllm_config)
    if cache.user_specified_block_size and (cache.block_size % 32 or cache.block_size > MAX_PAGE_SIZE):
        raise ValueError(
            f"--block-size {cache.block_size}: KTX needs a multiple of 32 up to {MAX_PAGE_SIZE} (default "
            f"{DEFAULT_PAGE_SIZE})"
        )
    _warn_of_misplaced_settings(vllm_config)
    page_size = cache.block_size if cache.user_specified_block_size else DEFAULT_PAGE_SIZE
    config.sparse_settings(config.kv_format(cache.cache_dtype), page_size)
    reasons = unsupported(vllm_config)
    if reasons:
        raise ValueError(f"Attention backend KTX can't serve this model: {'; '.join(reasons)}.")
    settle_format(vllm_config, config, page_size)


def settle_format(vllm_config: Any, config: KtxConfig, page_size: int) -> None:
    """Checks formats against the model, and puts what `auto` became into the settings that workers get."""
    model, cache_dtype = vllm_config.model_config, vllm_config.cache_config.cache_dtype
    PageLayout(config.kv_format(cache_dtype), page_size, 1, model.get_head_size())
    layers, named = model.get_total_num_hidden_layers(), config.layer_formats().last
    if named >= layers:
        raise ValueError(f"ktx.format.layers names layer {named}, and the model has layers 0 to {layers - 1}")
    if config.dense_layers > layers:
        raise ValueError(f"ktx.dense_layers={config.dense_layers}: the model has {layers} layers, use as many or fewer")
    chosen = choose_format(vllm_config, config, page_size)
    chosen.sparse_settings(chosen.kv_format(cache_dtype), page_size)
    if chosen is not config:
        extra = vllm_config.additional_config or {}
        vllm_config.additional_config = {**extra, "ktx": {**extra.get("ktx", {}), "format": chosen.format}}


def unsupported(vllm_config: Any) -> list[str]:
    """Why KTX can't serve this configuration, as far as it shows before the model's layers exist."""
    from vllm.platforms import current_platform

    model, reasons = vllm_config.model_config, []
    if current_platform.is_cpu() and ktx_config(vllm_config).weights == "prefetch":
        reasons.append("ktx.weights='prefetch' copies weights to a GPU, and this is vLLM's CPU platform: leave it out")
    if current_platform.is_cpu() and ktx_config(vllm_config).prefill_kernel == "xformers":
        reasons.append("ktx.prefill_kernel='xformers' runs on CUDA, and this is vLLM's CPU platform: leave it out")
    if current_platform.is_cpu() and ktx_config(vllm_config).cudagraph == "full":
        reasons.append("ktx.cudagraph='full' is for CUDA, and this is vLLM's CPU platform: leave it out")
    if not current_platform.is_cpu():
        reasons += unsupported_on_device(vllm_config, ktx_config(vllm_config), current_platform)
    if model.is_encoder_decoder:
        reasons.append("encoder-decoder models have cross attention, which KTX doesn't page")
    if model.is_hybrid or model.has_inner_state:
        reasons.append("state-space (Mamba) and hybrid models keep a recurrent state beside the KV cache")
    if model.use_mla:
        reasons.append(
            "its multi-head latent attention caches one latent for all heads, which KTX doesn't page yet: on CUDA set "
            "VLLM_MLA_DISABLE=1, so that vLLM caches keys and values by head (more memory a token; vLLM 0.32's CPU "
            "build computes such heads wrongly)"
        )
    if vllm_config.kv_transfer_config is not None and vllm_config.kv_transfer_config.is_kv_transfer_instance:
        reasons.append("a KV connector (--kv-transfer-config) would move pages without their open copies: remove it")
    if getattr(model.hf_text_config, "attention_chunk_size", None):
        reasons.append("chunked local attention (Llama 4) attends in chunks that KTX doesn't know")
    config = ktx_config(vllm_config)
    if config.host_gib + config.disk_gib > 0 and model.runner_type != "generate":
        reasons.append(
            f"a {model.runner_type} model can't be told of lost pages: leave ktx.host_gib and ktx.disk_gib out"
        )
    if vllm_config.cache_config.kv_cache_dtype_skip_layers:
        reasons.append("--kv-cache-dtype-skip-layers is not served: give layers formats of their own by ktx.format")
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


def unsupported_on_device(vllm_config: Any, config: KtxConfig, platform: Any) -> list[str]:
    """Why KTX can't serve this configuration on `platform`'s devices, which aren't CPUs."""
    if not platform.is_cuda():
        return [f"its kernels run on CUDA and on CPUs, and vLLM's platform here is {platform.device_name}"]
    reasons = []
    capability = platform.get_device_capability()
    if capability is not None and capability.to_int() < MIN_CAPABILITY:
        reasons.append(
            f"{platform.get_device_name()} has compute capability {capability.as_version_str()}, and its kernels need "
            f"{MIN_CAPABILITY / 10:.1f} (A100, A10, RTX 30) or later"
        )
    if importlib.util.find_spec("triton") is None:
        reasons.append("its CUDA kernels are Triton's, and triton isn't installed: pip install triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        reasons.append("TRITON_INTERPRET=1 runs Triton's kernels on the CPU: unset it")
    if config.kernels not in ("auto", "triton"):
        reasons.append(f"ktx.kernels={config.kernels!r} runs on CPUs only: leave it out")
    reasons += _formats_without_kernels(config, vllm_config.cache_config.cache_dtype)
    if not vllm_config.use_v2_model_runner:
        reasons.append(
            "on CUDA it needs vLLM's V2 model runner, and this configuration runs on V1: unset "
            "VLLM_USE_V2_MODEL_RUNNER, or leave out what vLLM's log says V2 doesn't support"
        )
    if vllm_config.speculative_config is not None and vllm_config.scheduler_config.async_scheduling:
        reasons.append(
            f"steps are planned before the drafts of the last one are checked (speculative method "
            f"{vllm_config.speculative_config.method!r} with async scheduling): use --no-async-scheduling"
        )
    if vllm_config.speculative_config is not None and config.cudagraph == "full":
        reasons.append(
            f"ktx.cudagraph='full' captures steps of one token a row, and drafts (speculative method "
            f"{vllm_config.speculative_config.method!r}) make them longer: leave one of the two out"
        )
    parallel = vllm_config.parallel_config
    if parallel.enable_dbo:
        reasons.append("dual batch overlap splits a step that is planned as one: leave --enable-dbo out")
    if parallel.prefill_context_parallel_size > 1:
        reasons.append("prefill context parallelism splits a sequence's pages over ranks: leave it out")
    return reasons


def _formats_without_kernels(config: KtxConfig, cache_dtype: str) -> list[str]:
    from .attention_backends.triton.geometry import unserved

    layers = (None, *(first for first, _, _ in config.layer_formats().ranges))
    missing = {unserved(config.kv_format(cache_dtype, layer)) for layer in layers} - {None}
    return [f"there are no CUDA kernels for {part}: leave ktx.key_scale and ktx.value_scale out"
            for part in sorted(missing)]  # fmt: skip


def apply_defaults(vllm_config: Any) -> None:
    """KTX's page size and scheduler where the user chose none (after the platform chose its own defaults)."""
    if not vllm_config.cache_config.user_specified_block_size:
        vllm_config.cache_config.block_size = DEFAULT_PAGE_SIZE
    config, scheduler = ktx_config(vllm_config), vllm_config.scheduler_config
    generates = vllm_config.model_config.runner_type == "generate" and scheduler.enable_chunked_prefill
    generates &= getattr(vllm_config, "diffusion_config", None) is None  # which have a scheduler of their own
    grouped, tiered = config.scheduler == "length_grouped" and generates, config.host_gib + config.disk_gib > 0
    if (grouped or tiered) and scheduler.scheduler_cls is None:
        kind = "LengthGroupedScheduler" if grouped else "StockScheduler"
        scheduler.scheduler_cls = f"vllm_ktx.scheduler.{'Async' if scheduler.async_scheduling else ''}{kind}"
    elif tiered:
        _check_scheduler(scheduler)
    if config.weights == "prefetch":
        _prefetch_weights(vllm_config.offload_config)


def _check_scheduler(scheduler: Any) -> None:
    """A scheduler of the user's own must do with lost pages what KTX's do."""
    from .scheduler.recompute import RecomputesLostBlocks

    found = scheduler.get_scheduler_cls()
    if not issubclass(found, RecomputesLostBlocks):
        raise ValueError(
            f"--scheduler-cls {found.__name__} doesn't compute lost pages again, which pages off the device need: "
            "leave it out, derive it from vllm_ktx.scheduler.recompute.RecomputesLostBlocks, or leave ktx.host_gib and "
            "ktx.disk_gib out"
        )


def _prefetch_weights(offload: Any) -> None:
    """vLLM's own prefetch of weights; of each four layers one, unless the user gave a number."""
    offload.offload_backend = "prefetch"
    if offload.prefetch.offload_group_size == 0:
        offload.prefetch.offload_group_size = 4
    logger.info(
        "KTX: weights of %d of every %d layers stay in host memory and are copied %d ahead of use "
        "(--offload-num-in-group, --offload-group-size, --offload-prefetch-step)",
        offload.prefetch.offload_num_in_group,
        offload.prefetch.offload_group_size,
        offload.prefetch.offload_prefetch_step,
    )


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
