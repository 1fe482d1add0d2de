"""DeepSeek's attention with keys and values by head (VLLM_MLA_DISABLE): head size 192, values padded to it.

Requests run alone, and what they say is stock's, not the model's: vLLM 0.32's CPU build rotates these heads wrongly, by
the number of tokens in a step (stock's logprobs of a text differ between decoding it and reading it).
"""

import numpy as np
import pytest
from vllm import SamplingParams

from tests.e2e.support import engine, prompt_logprobs, prompts, texts
from vllm_ktx.metrics import STATS

pytestmark = pytest.mark.e2e
OPTIONS = {"skip_tokenizer_init": True, "max_num_batched_tokens": 500, "kv_cache_memory_bytes": 128 << 20}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """Random weights, large enough that attention decides what comes out."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "vocab_size": 512}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 32, "q_lora_rank": None}
    heads |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 2}
    experts |= {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}
    model = DeepseekV2ForCausalLM(DeepseekV2Config(num_hidden_layers=2, max_position_embeddings=4096,
                                                   **sizes, **heads, **experts))  # fmt: skip
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.15)
    folder = tmp_path_factory.mktemp("deepseek")
    model.save_pretrained(folder)
    return folder


def test_deepseek_by_head_as_stock(deepseek, monkeypatch):
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    ids = np.random.default_rng(3).integers(5, 500, (2, 1500)).tolist()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    found = {}
    for name, ktx in {"stock": None, "none": {"format": "none"}, "k8v8": {"format": "k8v8", "window": 512}}.items():
        before = STATS.snapshot()
        with engine(deepseek, ktx, None if ktx is None else "KTX", **OPTIONS) as llm:
            tokens = [texts(llm.generate(prompts(x), params, use_tqdm=False)) for x in ids]
            found[name] = tokens, np.array([prompt_logprobs(llm, [x])[0] for x in ids])
        gained = {key: now - before[key] for key, now in STATS.snapshot().items()}
        assert (gained["sealed"] > 0) == (name != "stock") and (gained["sparse_rows"] > 0) == (name == "k8v8")
    assert found["none"][0] == found["stock"][0]
    assert np.abs(found["none"][1] - found["stock"][1]).max() < 1e-3
    assert 0 < np.abs(found["k8v8"][1] - found["stock"][1]).mean() < 0.05
