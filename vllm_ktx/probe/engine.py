"""Runs vLLM in a process of its own and hands back plain results, with counters that prove which backend served them.

    ran = engine.run(Engine(folder, ktx={"format": "k4v4"}), work, *args)    # work(llm, *args), any importable function
    ran.value, ran.counters

One process an engine: vLLM binds its backend, threads and memory once per process. The engine itself runs inside that
process (no second one), so KTX's counters are readable there. `generate` and `score` are the work most callers need.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm import LLM

TOP = 20  # alternatives kept at each position: vLLM's own limit
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Engine:
    """What to start. `ktx`: KTX's settings, or None for stock vLLM. `options`: further arguments of `vllm.LLM`.

    chunk: most tokens that one step takes (`max_num_batched_tokens`).
    """

    model: str
    max_model_len: int
    ktx: dict[str, Any] | None = None
    chunk: int = 64
    rows: int = 32
    cache_bytes: int = 1 << 30
    options: dict[str, Any] = field(default_factory=dict)

    def start(self) -> LLM:
        """The engine, in this process."""
        from vllm import LLM

        options: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.chunk,
            "max_num_seqs": min(self.rows, self.chunk),
            "kv_cache_memory_bytes": self.cache_bytes,
        }
        if self.ktx is not None:
            options |= {"attention_backend": "KTX", "additional_config": {"ktx": self.ktx}}
        return LLM(self.model, **{**options, **self.options})


@dataclass(frozen=True)
class Ran:
    """What came back. `counters`: KTX's, all zero under stock vLLM. `kernels`: the instruction set of KTX's kernels or
    `torch`; None under stock."""

    value: Any
    counters: dict[str, int]
    kernels: str | None
    seconds: float


def run(engine: Engine, work: Callable[..., Any], *args: Any) -> Ran:
    """Starts `engine` in a fresh process and returns `work(llm, *args)`.

    Raises RuntimeError with the child's traceback if it failed, or if KTX was asked for and did not serve (or the
    reverse): a figure must not come from the wrong backend.
    """
    ran: Ran = in_fresh_process(_serve, engine, work, args)
    if bool(ran.counters["attention_calls"]) != (engine.ktx is not None):
        asked = "KTX" if engine.ktx is not None else "stock vLLM"
        raise RuntimeError(f"{asked} was asked for, but KTX counted {ran.counters['attention_calls']} attention calls")
    return ran


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in a spawned process, whose stdout goes to stderr. Raises RuntimeError if it fails or dies."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(sender, function, args))
    child.start()
    sender.close()
    try:
        good, value = receiver.recv()
    except EOFError:
        child.join()
        raise RuntimeError(f"the engine's process ended with exit code {child.exitcode} and no result") from None
    child.join()
    if not good:
        raise RuntimeError(f"the engine's process failed:\n{value}")
    return value


def _child(sender: Any, function: Callable[..., Any], args: tuple) -> None:
    os.dup2(2, 1)  # the caller's stdout is for results
    try:
        result = (True, function(*args))
    except BaseException:
        result = (False, traceback.format_exc())
    sender.send(result)


def prepare_environment() -> None:
    """For a process that is about to start an engine within itself."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the counters live in the worker's process: this one


def _serve(engine: Engine, work: Callable[..., Any], args: tuple) -> Ran:
    prepare_environment()
    from vllm_ktx import metrics

    started = time.perf_counter()
    value = work(engine.start(), *args)
    seconds, kernels = time.perf_counter() - started, None
    if engine.ktx is not None:
        from vllm_ktx.attention_backends.kernels import kernels_for
        from vllm_ktx.config import KtxConfig

        config = KtxConfig.parse(engine.ktx)
        chosen = kernels_for(config.kernels, config.kv_format(engine.options.get("kv_cache_dtype", "auto")))
        kernels = getattr(chosen, "isa", None) or chosen.name
    return Ran(value, metrics.snapshot(), kernels, seconds)


@dataclass(frozen=True)
class Scores:
    """What a model predicts for tokens 1 .. n-1 of a text of n; row t-1 is the prediction of token t.

    `nll` float64 `[n-1]`: negative log-likelihood of the token that is there. `top_ids` int64, `top_logprobs` float64
    `[n-1, TOP]`: the likeliest tokens, best first.
    """

    nll: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    @property
    def best(self) -> np.ndarray:
        """The likeliest token `[n-1]`."""
        return self.top_ids[:, 0]


def generate(
    llm: LLM, prompts: Sequence[list[int]], max_tokens: int, stop: Sequence[int] = (), temperature: float = 0.0
) -> list[list[int]]:
    """Continuations of all prompts in one batch, greedy unless `temperature` says otherwise; the stop token, where one
    came, is included."""
    from vllm import SamplingParams

    how: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens, "detokenize": False}
    if temperature:
        how |= {"seed": 0, "ignore_eos": True}
    params = SamplingParams(stop_token_ids=list(stop), **how)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def score(llm: LLM, ids: list[int]) -> Scores:
    """Scores one text, alone in the batch: every step takes exactly the engine's `chunk` tokens of it."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TOP, flat_logprobs=True, detokenize=False)
    flat = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].prompt_logprobs
    shape = (len(ids) - 1, TOP + 1)  # the token that is there comes first, then the likeliest
    logprobs = np.array(flat.logprobs, np.float64).reshape(shape)
    return Scores(-logprobs[:, 0], np.array(flat.token_ids).reshape(shape)[:, 1:], logprobs[:, 1:])
