"""The Triton kernels inside real vLLM, on the CPU in Triton's interpreter: what the backend hands them, and what the
model says with them. Started by `tests/attention_backends/test_triton.py`, in a process with TRITON_INTERPRET=1.
"""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: tests/attention_backends/test_triton.py runs it", allow_module_level=True)
from vllm import SamplingParams

from tests.e2e.support import builder, engine, prompts
from vllm_ktx.metrics import snapshot

pytestmark = pytest.mark.e2e
SPARSE = {"format": "k4v4", "window": 64, "sinks": 64, "min_pages": 1, "max_pages": 2}
# Prompts of one and of several chunks; the second leaves pages out.
IDS = prompts([i % 90 + 5 for i in range(70)], [i * i % 97 + 5 for i in range(390)])


DENSE = {"format": "k8v8", "attention": "dense"}
TIERS = {"host_gib": 0.05, "overcommit": 4}
FEW = {"num_gpu_blocks_override": 68}  # 17 slots


@pytest.mark.parametrize(
    ("ktx", "below"), [(SPARSE, {}), (DENSE, {}), (SPARSE, TIERS)], ids=["sparse", "dense", "tiers"]
)
def test_a_model_says_the_same_with_native_and_with_triton_kernels(retrieval_small, ktx, below):
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)
    said = []
    for more in ({"kernels": "auto"}, {"kernels": "triton", **below}):
        options = {"max_num_batched_tokens": 192, "max_num_seqs": 2, "max_model_len": 512, **(FEW if below else {})}
        with engine(retrieval_small, {**ktx, **more}, **options) as llm:
            outs = llm.generate(IDS, params, use_tqdm=False)
            if below and "host_gib" in more:  # once more, over pages that the prefix cache kept
                llm.generate(IDS, params, use_tqdm=False)
                assert builder(llm).tier_plan.planes and (builder(llm).device_tiers.layers[0].planes != 0).any()
                counts = snapshot()
                assert counts["tier_fetched_bytes"] > 0 and counts["tier_hits"] > 0
        said.append([[(t, step[t].logprob) for t, step in zip(o.outputs[0].token_ids, o.outputs[0].logprobs,
                     strict=True)] for o in outs])  # fmt: skip
    for native, triton in zip(*said, strict=True):
        assert [t for t, _ in native] == [t for t, _ in triton]
        assert [x for _, x in triton] == pytest.approx([x for _, x in native], abs=1e-3)
