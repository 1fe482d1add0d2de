"""Two ranks, each with half of the kv heads: real vLLM with a process for each, on the CPU."""

import pytest

from tests.e2e.support import engine
from tests.e2e.test_tiers import SPARSE, asked, generate
from vllm_ktx.metrics import STATS, snapshot

pytestmark = pytest.mark.e2e
OPTIONS = {"max_model_len": 4096, "max_num_batched_tokens": 1000, "max_num_seqs": 4}


def test_two_ranks_plan_the_same_steps_and_share_the_kv_heads(retrieval, monkeypatch):
    """Sparse, over pages that the device doesn't hold, on a cached prefix: the tokens of one rank."""
    ids, answers = asked(3000, 4, seed=9)
    with engine(retrieval, SPARSE, **OPTIONS) as llm:
        before = STATS.snapshot()
        want, _ = generate(llm, ids)
        alone = {name: now - before[name] for name, now in STATS.snapshot().items()}
    assert [tokens[0] for tokens in want] == answers
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|0")  # one core each; two need not be there
    paged = {**SPARSE, "host_gib": 0.02, "overcommit": 6}
    device = {"kv_cache_memory_bytes": 600_000, "tensor_parallel_size": 2}
    with engine(retrieval, paged, **OPTIONS, **device) as llm:
        got, cached = generate(llm, ids)
        ranks = llm.collective_rpc(snapshot)
    assert got == want and max(cached) > 2900
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["steps"] == alone["steps"] and rank["sealed"] == alone["sealed"] > 0
        assert rank["tier_fetched_bytes"] > 0 and rank["tier_lost"] == rank["tier_faults"] == 0
    assert sum(rank["sparse_rows"] for rank in ranks) == alone["sparse_rows"] > 0, "each row and kv head once"
