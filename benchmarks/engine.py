"""Runs vLLM in a process of its own: `vllm_ktx.probe.engine`, by the name that the benchmarks use."""

from vllm_ktx.probe.engine import (
    ENVIRONMENT,
    TOP,
    Engine,
    Ran,
    Scores,
    generate,
    in_fresh_process,
    prepare_environment,
    run,
    score,
)

__all__ = [
    "ENVIRONMENT",
    "TOP",
    "Engine",
    "Ran",
    "Scores",
    "generate",
    "in_fresh_process",
    "prepare_environment",
    "run",
    "score",
]
