"""Engines for end-to-end tests: real vLLM, in this process, with counters that prove which backend ran."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from vllm_ktx.metrics import STATS

# vLLM scans every loaded module for kernels to override whenever a CPU worker starts, and fails in the second engine of
# a process, when numba (imported by the first) is among them. Once is enough: the overrides stay.
_platform = type(current_platform)
_platform.register_triton_kernel_overrides = classmethod(  # type: ignore[method-assign]
    functools.cache(_platform.register_triton_kernel_overrides.__func__)
)

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@contextmanager
def engine(model: Any, ktx: dict | None = None, backend: str | None = "KTX", **options: Any) -> Iterator[LLM]:
    """An LLM that is shut down at the end. `backend=None`: stock vLLM. Asserts that KTX ran, or did not (but where
    ranks have processes of their own, and counters)."""
    defaults: dict[str, Any] = {
        "enforce_eager": True,
        "dtype": "float32",
        "kv_cache_memory_bytes": 256 << 20,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "disable_log_stats": False,
    }
    if backend:
        defaults |= {"attention_backend": backend, "additional_config": {"ktx": ktx or {}}}
    before = STATS.attention_calls
    llm = LLM(str(model), **(defaults | options))
    try:
        yield llm
        ran = STATS.attention_calls > before or options.get("tensor_parallel_size", 1) > 1
        assert ran == bool(backend), "the other backend than the asked one ran"
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def texts(outputs: list) -> list[list[int]]:
    """Generated token ids, one list a sample."""
    return [list(sample.token_ids) for out in outputs for sample in out.outputs]


def metric(llm: LLM, name: str) -> float:
    """The sum of a vLLM counter, e.g. `vllm:num_preemptions`."""
    return sum(m.value for m in llm.get_metrics() if m.name == name)


def prompt_logprobs(llm: LLM, ids: list[list[int]]) -> list[list[float]]:
    """The logprob of each prompt token but the first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outs = llm.generate([{"prompt_token_ids": x} for x in ids], params, use_tqdm=False)
    return [
        [step[t].logprob for step, t in zip(o.prompt_logprobs[1:], x[1:], strict=True)]
        for o, x in zip(outs, ids, strict=True)
    ]


def builder(llm: LLM) -> Any:
    """KTX's metadata builder of an engine in this process."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return worker.model_runner.attn_groups[0][0].metadata_builders[0]


def prompts(*ids: list[int]) -> list[dict]:
    return [{"prompt_token_ids": list(x)} for x in ids]
