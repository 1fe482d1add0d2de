"""The baseline of the kernel benchmarks: vLLM's own CPU attention op, called as `CPUAttentionBackend` calls it.

A bf16 cache in blocks of 128 tokens (vLLM's default on CPU), the library and the ISA that vLLM chooses here, or, to
compare at an older instruction set, the library that vLLM would load on such a machine.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .harness import Problem

BLOCK_SIZE = 128
LIBRARIES = ("auto", "avx512", "avx2")


def library_name() -> str:
    """Which of its libraries of CPU kernels vLLM loads here; the rule of `CpuPlatform.import_kernels`."""
    if not torch.cpu._is_avx512_supported():
        return "AVX2"
    return "AVX512_BF16" if torch.cpu._is_avx512_bf16_supported() else "AVX512"


def choose_library(name: str) -> None:
    """Lets vLLM load the library for an older CPU, for a comparison at the same instruction set.

    Raises RuntimeError where vLLM has already loaded its kernels.
    """
    if name == "auto":
        return
    if "vllm._custom_ops" in sys.modules:
        raise RuntimeError(f"--vllm-isa {name}: vLLM has loaded its kernels already; set it in a fresh process")
    torch.cpu._is_avx512_bf16_supported = lambda: False
    if name == "avx2":
        torch.cpu._is_avx512_supported = lambda: False


class VllmAttention:
    """vLLM's CPU attention op over an unquantized paged cache holding the same tokens as `problem`."""

    def __init__(self, problem: Problem) -> None:
        from vllm import _custom_ops as ops
        from vllm import envs
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        self.ops, self.problem = ops, problem
        shape, total = problem.shape, problem.context + problem.query_len
        self.isa = _get_attn_isa(torch.bfloat16, BLOCK_SIZE, shape.head_dim)
        self.name = f"{self.isa} ({library_name()})"
        num_blocks = -(-total // BLOCK_SIZE)
        cache = torch.zeros(num_blocks, shape.kv_heads, 2 * BLOCK_SIZE, shape.head_dim, dtype=torch.bfloat16)
        self.key_cache, self.value_cache = cache.chunk(2, dim=2)
        self.block_table = torch.arange(num_blocks, dtype=torch.int32).reshape(1, -1)
        self.cu_q, self.seq_lens = problem.pages["cu_q"], torch.tensor([total], dtype=torch.int32)
        self._write(problem.keys, problem.values, 0)
        self._write(problem.k, problem.v, problem.context)
        self.metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1,
            num_heads=shape.q_heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            seq_lens=self.seq_lens,
            dtype=torch.bfloat16,
            query_start_loc=self.cu_q,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )
        self.out = torch.empty_like(problem.q)

    def _write(self, keys: torch.Tensor, values: torch.Tensor, position: int) -> None:
        if len(keys):
            slots = torch.arange(position, position + len(keys), dtype=torch.int64)
            self.ops.cpu_attn_reshape_and_cache(keys, values, self.key_cache, self.value_cache, slots, self.isa)

    def __call__(self) -> None:
        self.ops.cpu_attention_with_kv_cache(
            query=self.problem.q,
            key_cache=self.key_cache,
            value_cache=self.value_cache,
            output=self.out,
            query_start_loc=self.cu_q,
            seq_lens=self.seq_lens,
            scale=self.problem.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self.block_table,
            softcap=0.0,
            scheduler_metadata=self.metadata,
            s_aux=None,
        )
